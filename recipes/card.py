"""The model card of a result, the files beside its weights, and what the end of a run prints."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from huggingface_hub import ModelCard, ModelCardData, hf_hub_download
from jinja2 import Template

from arguments import Arguments, public
from conversations import ChatFormat
from hf_specgen import __version__
from hf_specgen.call_statistics import Statistics
from hf_specgen.candidates.auto import chat_template_hash
from target import revision_of

RECORD = "training.json"  # file beside the weights: for which target, chat template and length they were trained
TEMPLATES = Path(__file__).with_name("templates")


@dataclass
class Measured:
    """What was counted in the generations of one domain: with chains, with trees; whether tokens are those of plain."""

    chain: Statistics = field(default_factory=lambda: Statistics([]))
    tree: Statistics = field(default_factory=lambda: Statistics([]))
    identical: int = 0
    prompts: int = 0


def write_card(
    drafter: Any, chat: ChatFormat, results: dict[str, Measured], history: list[dict[str, Any]], rows: int
) -> None:
    """Write card, record and, for a repository of the Hub, custom code into the output folder."""
    args, folder = drafter.args, Path(drafter.args.output_dir)
    record = {"target": public(args.target), "chat_template": chat_template_hash(chat.tokenizer)}
    record |= {"chat_template_kwargs": dict(args.chat_template_kwargs), "max_length": args.max_length}
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if args.hub_model_id:
        write_custom_generate(folder, args.hub_model_id)
    data = ModelCardData(
        library_name=drafter.library,
        license=license_of(args.target, revision_of(args)),
        tags=["speculative-decoding", "hf_specgen"],
        base_model=args.target if not Path(args.target).exists() else None,  # ids of the Hub only
    )
    trained = sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad)
    card = ModelCard.from_template(
        data,
        str(TEMPLATES / "card.md.j2"),
        title=folder.name,
        name=args.hub_model_id or folder.name,
        target=public(args.target),
        evaluation=public(args.evaluation),
        drafter=drafter,
        args=args,
        parameters=trained / 1e6,
        results=results,
        dtype=str(drafter.target.dtype).removeprefix("torch."),
        arguments=yaml.safe_dump({name: public(value) for name, value in args.own_values().items()}, sort_keys=False),
        record=record,
        rows=rows,
        loss=next((entry["loss"] for entry in reversed(history) if "loss" in entry), None),
        versions=f"hf-specgen {__version__}, torch {torch.__version__}, transformers {transformers.__version__}",
    )
    card.save(folder / "README.md")


def license_of(target: str, revision: str = "main") -> str | None:
    """The license that the target's own card names, if there is one."""
    with suppress(OSError, ValueError):
        is_local = Path(target).exists()
        path = Path(target, "README.md") if is_local else hf_hub_download(target, "README.md", revision=revision)
        return ModelCard.load(path).data.license
    return None


def write_custom_generate(folder: Path, name: str) -> None:
    """Write `custom_generate/generate.py` into the folder of a drafter that is loaded from `name`."""
    path, template = folder / "custom_generate" / "generate.py", TEMPLATES / "custom_generate.py.j2"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(Template(template.read_text(encoding="utf-8")).render(name=name) + "\n", encoding="utf-8")


def summary(args: Arguments, results: dict[str, Measured]) -> str:
    """Where the result is, what was measured, and how it is used."""
    measured = [
        f"{domain}: tokens per step: chains {one.chain.tokens_per_step:.2f}, trees {one.tree.tokens_per_step:.2f}"
        for domain, one in results.items()
    ]
    use = f'model.generate(**inputs, candidate_generator=AutoCandidates.from_pretrained("{args.output_dir}"))'
    return "\n".join([*measured, f"the result is in {args.output_dir}: {use}"])
