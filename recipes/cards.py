"""Model cards, and the way to the Hub."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from hf_specgen.evaluation.provenance import provenance

# Where the run lives is nobody's business, and no part of the result.
PRIVATE = ("output", "evaluate_every", "resume", "report_to", "push_to_hub", "log_every", "save_every")


def write_card(
    folder: str | Path,
    *,
    title: str,
    base_model: str | None,
    summary: str,
    usage: str,
    settings: Any,
    measured: str,
    losses: list[tuple[int, float]],
    recipe: str,
    library: str = "transformers",
) -> None:
    """Write `README.md` into an output folder.

    Args:
        base_model: the target that it belongs to; None for a model that stands alone.
        summary: one or two sentences on what this is.
        usage: Python.
        settings: the recipe's dataclass.
        measured: what was measured, and how.
        losses: (step, nats a token).
        recipe: name of the script.
    """
    header: dict[str, Any] = {"library_name": library, "tags": ["speculative-decoding", "hf_specgen"]}
    if base_model and not Path(base_model).exists():  # the Hub takes nothing but its own ids here
        header["base_model"] = base_model
    told = {name: value for name, value in asdict(settings).items() if name not in PRIVATE and value is not None}
    versions = provenance()["versions"]
    last = losses[-max(1, len(losses) // 10) :]  # the last tenth
    final = f"Final loss: {sum(loss for _, loss in last) / len(last):.4f} nats a token." if last else ""
    sections = [
        "---\n" + yaml.safe_dump(header, sort_keys=False) + "---",
        f"# {title}",
        summary,
        f"Made for `{base_model}`, and of no use with another model." if base_model else "",
        f"```python\n{usage.strip()}\n```",
        f"## Measured\n\n{measured}",
        f"## Training\n\nSettings of hf_specgen's `recipes/{recipe}.py`:\n\n```yaml\n"
        f"{yaml.safe_dump(told, sort_keys=False)}```\n\n{final}",
        "Versions: " + ", ".join(f"{name} {number}" for name, number in versions.items()) + ".",
    ]
    Path(folder).mkdir(parents=True, exist_ok=True)
    text = "\n\n".join(section for section in sections if section) + "\n"
    (Path(folder) / "README.md").write_text(text, encoding="utf-8")


def push(folder: str | Path, repository: str | None) -> None:
    """Upload an output folder, without its checkpoints and logs; does nothing if `repository` is None."""
    if repository is None:
        return
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(repository, exist_ok=True)
    ignored = ["checkpoint*", "*/checkpoint*", "runs/*", "wandb/*"]
    api.upload_folder(repo_id=repository, folder_path=folder, ignore_patterns=ignored)
