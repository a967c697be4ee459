"""What goes with the weights: model card, record of the training, the code that `custom_generate=` runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from huggingface_hub import ModelCard, ModelCardData

from conversations import ChatFormat
from evaluation import Measured, measured_section
from hf_specgen.candidates.auto import chat_template_hash
from hf_specgen.version import __version__

RECORD = "training.json"
"""File beside the weights: for which target, chat template and length they were trained."""
USAGE = """
from transformers import AutoModelForCausalLM, AutoTokenizer
from hf_specgen import {module}

target = AutoModelForCausalLM.from_pretrained("{target}")
tokenizer = AutoTokenizer.from_pretrained("{target}")
inputs = tokenizer("Hello", return_tensors="pt")
target.generate(**inputs, candidate_generator={usage})
# or:
target.generate(**inputs, custom_generate="{name}", trust_remote_code=True)
"""
CUSTOM_GENERATE = '''\
"""Speculative decoding with the drafter in this repository; the tokens are those of plain generate()."""

from functools import lru_cache
from typing import Any

DRAFTER = {name!r}


@lru_cache(maxsize=1)
def candidates() -> Any:
    """The drafter, loaded once."""
    try:
        from hf_specgen import AutoCandidates
    except ImportError:
        raise ImportError(f"{{DRAFTER}} needs hf_specgen, which is not installed: pip install hf-specgen") from None
    return AutoCandidates.from_pretrained(DRAFTER)


def generate(model: Any, **arguments: Any) -> Any:
    """What `model.generate(candidate_generator=...)` returns."""
    arguments = {{name: value for name, value in arguments.items() if value is not None}}
    return model.generate(candidate_generator=candidates(), **arguments)
'''


def write_card(drafter: Any, chat: ChatFormat, history: list[dict[str, Any]], results: dict[str, Measured]) -> None:
    """Write card, record and custom code into the output folder."""
    args, folder = drafter.args, Path(drafter.args.output_dir)
    name = args.hub_model_id or args.output_dir
    record = {"target": args.target, "chat_template": chat_template_hash(chat.tokenizer)}
    record |= {"chat_template_kwargs": dict(args.chat_template_kwargs), "max_length": args.max_length}
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    write_custom_generate(folder, name)
    title = f"{folder.name}: {drafter.kind}"
    data = ModelCardData(
        library_name=drafter.library,
        tags=["speculative-decoding", "hf_specgen"],
        base_model=args.target if not Path(args.target).exists() else None,  # ids of the Hub only
    )
    parameters = sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad)
    usage = USAGE.format(
        target=args.target,
        name=name,
        usage=drafter.usage.format(name=name),
        module=drafter.usage.split("(")[0].split(".")[0],
    )
    sections = [
        f"---\n{data.to_yaml()}\n---",
        f"# {title}",
        f"A drafter for speculative decoding of `{args.target}`, for which alone it was trained: {drafter.kind}, "
        f"{parameters / 1e6:.1f}M trained parameters. The target itself is unchanged.",
        f"```python\n{usage.strip()}\n```",
        f"## Measured\n\n{measured_section(args.evaluation, results)}",
        f"## Training\n\nArguments of hf_specgen's `recipes/{drafter.recipe}.py`:\n\n```yaml\n"
        f"{yaml.safe_dump(args.own_values(), sort_keys=False)}```\n\n{_final_loss(history)}",
        f"Versions: hf-specgen {__version__}, torch {torch.__version__}, transformers {transformers.__version__}.",
    ]
    ModelCard("\n\n".join(sections) + "\n").save(folder / "README.md")


def write_custom_generate(folder: Path, name: str) -> None:
    """Write `custom_generate/generate.py` into the folder of a drafter that is loaded from `name`."""
    path = folder / "custom_generate" / "generate.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(CUSTOM_GENERATE.format(name=name), encoding="utf-8")


def _final_loss(history: list[dict[str, Any]]) -> str:
    """The mean of the last tenth of the logged losses."""
    losses = [entry["loss"] for entry in history if "loss" in entry]
    last = losses[-max(1, len(losses) // 10) :]
    return f"Final loss: {sum(last) / len(last):.4f} per token." if last else ""
