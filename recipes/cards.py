"""Model cards, and the upload to the Hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from benchmarks.harness.provenance import provenance

UNRELATED = ("output", "evaluate_every", "resume", "report_to", "push_to_hub", "log_every", "save_every")
"""Settings that do not influence the result."""


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
    results: Sequence[EvalResult] = (),
    leave_out: Sequence[str] = (),
) -> None:
    """Write the model card, `README.md`, into an output folder.

    Args:
        folder: the output folder.
        title: heading, and name of the model in its metadata.
        base_model: the target that it was trained for; None for a model of its own.
        summary: one or two sentences.
        usage: Python code.
        settings: the dataclass of the recipe.
        measured: text of the section on measured results.
        losses: (step, nats per token).
        recipe: name of the script.
        library: that loads the model.
        results: measured results for the metadata.
        leave_out: settings that this run did not use.
    """
    data = ModelCardData(
        library_name=library,
        tags=["speculative-decoding", "hf_specgen"],
        base_model=base_model if base_model and not Path(base_model).exists() else None,  # ids of the Hub only
        model_name=title if results else None,
        eval_results=list(results) or None,
    )
    hidden = {*UNRELATED, *leave_out}
    given = {name: value for name, value in asdict(settings).items() if name not in hidden and value is not None}
    shown = {name: dict(value) if isinstance(value, dict) else value for name, value in given.items()}
    last = losses[-max(1, len(losses) // 10) :]  # the last tenth
    final = f"Final loss: {sum(loss for _, loss in last) / len(last):.4f} nats per token." if last else ""
    sections = [
        f"---\n{data.to_yaml()}\n---",
        f"# {title}",
        summary,
        f"Trained for `{base_model}`; it does not fit other models." if base_model else "",
        f"```python\n{usage.strip()}\n```",
        f"## Measured\n\n{measured}",
        f"## Training\n\nSettings of hf_specgen's `recipes/{recipe}.py`:\n\n```yaml\n"
        f"{yaml.safe_dump(shown, sort_keys=False)}```\n\n{final}",
        "Versions: " + ", ".join(f"{name} {number}" for name, number in provenance()["versions"].items()) + ".",
    ]
    ModelCard("\n\n".join(section for section in sections if section) + "\n").save(Path(folder) / "README.md")


def push(folder: str | Path, repository: str | None) -> None:
    """Upload an output folder, without its checkpoints and logs; does nothing if `repository` is None."""
    if repository is None:
        return
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(repository, exist_ok=True)
    ignored = ["checkpoint*", "*/checkpoint*", "runs/*", "wandb/*"]
    api.upload_folder(repo_id=repository, folder_path=folder, ignore_patterns=ignored)
