"""The result of a training: its acceptance on held-out prompts, by real generations; card, record, custom code."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from accelerate import PartialState
from datasets import Dataset
from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedModel

from arguments import Arguments
from conversations import ChatFormat, Row, domain_of
from generate_answers import answer_rows, completions
from hf_specgen import AutoCandidates, FixedDepth, NgramCandidates
from hf_specgen.candidates.auto import chat_template_hash
from hf_specgen.counters import Statistics
from hf_specgen.version import __version__

Prompts = list[tuple[int, Row]]
"""Held-out prompts with their numbers."""
TREE = 32
"""Draft tokens of a tree."""
UNDRAFTED = NgramCandidates(policy=FixedDepth(0))
"""Plain decoding, with the same passes in all processes, which a sharded target needs."""
RECORD = "training.json"
"""File beside the weights: for which target, chat template and length they were trained."""
USAGE = """
from transformers import AutoModelForCausalLM, AutoTokenizer
from hf_specgen import AutoCandidates

target = AutoModelForCausalLM.from_pretrained("{target}")
tokenizer = AutoTokenizer.from_pretrained("{target}")
inputs = tokenizer("Hello", return_tensors="pt")
target.generate(**inputs, candidate_generator=AutoCandidates.from_pretrained("{name}"))
# or:
target.generate(**inputs, custom_generate="{name}", trust_remote_code=True)
"""
CUSTOM_GENERATE = '''\
"""Speculative decoding with the drafter in this repository (pip install hf-specgen); same tokens as generate()."""

from functools import lru_cache
from typing import Any

from hf_specgen import AutoCandidates

drafter = lru_cache(AutoCandidates.from_pretrained)


def generate(model: Any, **arguments: Any) -> Any:
    """What `model.generate(candidate_generator=...)` returns."""
    given = {{name: value for name, value in arguments.items() if value is not None}}
    return model.generate(candidate_generator=drafter({name}), **given)
'''


@dataclass
class Measured:
    """What was counted in the generations of one domain: with chains, with trees; whether tokens are those of plain."""

    chain: Statistics = field(default_factory=lambda: Statistics([]))
    tree: Statistics = field(default_factory=lambda: Statistics([]))
    identical: int = 0
    prompts: int = 0


def target_answers(args: Arguments, target: PreTrainedModel, chat: ChatFormat, prompts: Prompts) -> Dataset:
    """The target's own answers to the held-out prompts."""
    with torch.random.fork_rng():
        answers = dict(answer_rows(target, chat, prompts, UNDRAFTED, 0, args.generation, **call_of(args)))
    return Dataset.from_list([answers[number] for number, _ in prompts])


def call_of(args: Arguments) -> dict[str, Any]:
    """Arguments of `generate_many` in the evaluation."""
    return {"max_new_tokens": args.evaluation_tokens, "max_rows": 16}


def measure(args: Arguments, target: Any, chat: ChatFormat, prompts: Prompts, settings: Any) -> dict[str, Measured]:
    """Generate answers with the drafter as it was saved, and count; the random state is left unchanged."""
    if not PartialState().is_main_process and not args.shard_target:  # a sharded target needs all in each pass
        return {}
    load, policy = AutoCandidates.from_pretrained, FixedDepth()
    drafters = [load(args.output_dir, policy=policy, **settings(with_tree)) for with_tree in (False, True)]
    with torch.random.fork_rng():
        plain, chains, trees = (
            dict(completions(target, chat, prompts, drafter, 0, args.generation, **call_of(args)))
            for drafter in (UNDRAFTED, *drafters)
        )
    results: dict[str, Measured] = {}
    for number, row in prompts:
        result, tokens = results.setdefault(domain_of(row), Measured()), plain[number].tokens
        result.chain += chains[number].statistics
        result.tree += trees[number].statistics
        result.identical += chains[number].tokens == tokens == trees[number].tokens
        result.prompts += 1
    return results


def measured_section(prompts: str | None, results: dict[str, Measured], dtype: str) -> str:
    """The section of a model card: how it was measured, and a row per domain."""
    if not results:
        return "Nothing was measured, as the recipe was given no `evaluation` prompts."
    lines = [
        f"Generations of the target in {dtype} for held-out prompts (`{prompts}`) with the decoding settings of each "
        f"domain. *Tokens per step* include the target's own token; trees have up to {TREE} draft tokens. *Accepted* "
        "is how often the draft token at each depth of a chain was accepted, of all chains. *Same tokens* counts the "
        "prompts whose tokens are those without drafts; below float32, near-ties may differ by rounding.\n",
        "| domain | tokens per step, chains | tokens per step, trees | accepted by depth | same tokens |",
        "|---|---|---|---|---|",
    ]
    for domain, result in results.items():
        drafts = max(1, result.chain.drafts)
        accepted = ", ".join(f"{count / drafts:.0%}" for count in result.chain.accepted_per_position)
        lines.append(
            f"| {domain} | {result.chain.tokens_per_step:.2f} | {result.tree.tokens_per_step:.2f} | {accepted} | "
            f"{result.identical} of {result.prompts} |"
        )
    return "\n".join(lines)


def write_card(drafter: Any, chat: ChatFormat, history: list[dict[str, Any]], results: dict[str, Measured]) -> None:
    """Write card, record and custom code into the output folder."""
    args, folder = drafter.args, Path(drafter.args.output_dir)
    name = args.hub_model_id or args.output_dir
    record = {"target": args.target, "chat_template": chat_template_hash(chat.tokenizer)}
    record |= {"chat_template_kwargs": dict(args.chat_template_kwargs), "max_length": args.max_length}
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    write_custom_generate(folder, name)
    data = ModelCardData(
        library_name=drafter.library,
        tags=["speculative-decoding", "hf_specgen"],
        base_model=args.target if not Path(args.target).exists() else None,  # ids of the Hub only
    )
    parameters = sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad)
    usage = USAGE.format(target=args.target, name=name)
    dtype = str(drafter.target.dtype).removeprefix("torch.")
    loss = next((entry["loss"] for entry in reversed(history) if "loss" in entry), None)
    sections = [
        f"---\n{data.to_yaml()}\n---",
        f"# {folder.name}: {drafter.kind}",
        f"A drafter for speculative decoding of `{args.target}`, for which alone it was trained: {drafter.kind}, "
        f"{parameters / 1e6:.1f}M trained parameters. The target itself is unchanged.",
        f"```python\n{usage.strip()}\n```",
        f"## Measured\n\n{measured_section(args.evaluation, results, dtype)}",
        f"## Training\n\nArguments of hf_specgen's `recipes/{drafter.recipe}.py`:\n\n```yaml\n"
        f"{yaml.safe_dump(args.own_values(), sort_keys=False)}```\n\nLoss at the end: {loss} per token.",
        f"Versions: hf-specgen {__version__}, torch {torch.__version__}, transformers {transformers.__version__}.",
    ]
    ModelCard("\n\n".join(sections) + "\n").save(folder / "README.md")


def write_custom_generate(folder: Path, name: str) -> None:
    """Write `custom_generate/generate.py` into the folder of a drafter that is loaded from `name`."""
    path = folder / "custom_generate" / "generate.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(CUSTOM_GENERATE.format(name=json.dumps(name)), encoding="utf-8")
