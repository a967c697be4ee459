"""Measures a saved drafter on held-out prompts, by domain: real generations, with chains and with trees."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from huggingface_hub import EvalResult
from transformers import PreTrainedModel

from arguments import Arguments
from conversations import ChatFormat, Row, prompt_of
from generate_answers import answer_rows, batches_by_domain, generation_of
from hf_specgen import AutoCandidates, FixedDepth, NgramCandidates
from hf_specgen.counters import Statistics

Prompts = dict[str, list[Row]]
TREE = 32
"""Draft tokens of a tree."""


@dataclass
class Measured:
    """What was counted in the generations of one domain: with chains, with trees; whether tokens are those of plain."""

    chain: Statistics
    tree: Statistics
    identical: int = 0
    prompts: int = 0


def answers_file(args: Arguments, prompts: Prompts) -> Path | None:
    """Where the target's answers to held-out prompts are kept, beside its hidden states; None without these."""
    depends_on = json.dumps([prompts, args.generation, args.evaluation_tokens], sort_keys=True)
    digest = hashlib.sha256(depends_on.encode()).hexdigest()[:16]
    return Path(args.features) / f"answers-{digest}.json" if args.features else None


def target_answers(args: Arguments, target: PreTrainedModel, chat: ChatFormat, prompts: Prompts) -> Dataset:
    """The target's own answers to the held-out prompts."""
    kept = answers_file(args, prompts)
    if kept and kept.exists():
        return Dataset.from_list(json.loads(kept.read_text(encoding="utf-8")))
    rows: list[Row] = []
    call = {"max_new_tokens": args.evaluation_tokens, "max_rows": 16}
    plain = NgramCandidates(policy=FixedDepth(0))  # the same passes in all processes, which a sharded target needs
    with torch.random.fork_rng():
        for seed, members in enumerate(batches_by_domain([row for some in prompts.values() for row in some], 64)):
            rows += answer_rows(target, chat, members, plain, 1000 * seed, args.generation, **call)
    if kept and PartialState().is_main_process:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(rows), encoding="utf-8")
    return Dataset.from_list(rows)


def measure(args: Arguments, target: Any, chat: ChatFormat, prompts: Prompts, settings: Any) -> dict[str, Measured]:
    """Generate answers with the drafter as it was saved, and count; the random state is left unchanged."""
    if not PartialState().is_main_process and not args.shard_target:  # a sharded target needs all in each pass
        return {}
    load, policy = AutoCandidates.from_pretrained, FixedDepth()
    generators = [load(args.output_dir, policy=policy, **settings(with_tree)) for with_tree in (False, True)]
    results: dict[str, Measured] = {}
    with torch.random.fork_rng():
        for domain, rows in prompts.items():
            result = results[domain] = Measured(Statistics([]), Statistics([]))
            for seed, row in enumerate(rows):
                chain, tree, identical = _generate(args, target, chat, row, seed, generators)
                result.chain, result.tree = result.chain + chain, result.tree + tree
                result.identical, result.prompts = result.identical + identical, result.prompts + 1
    return results


def _generate(
    args: Arguments, target: Any, chat: ChatFormat, row: Row, seed: int, generators: list[Any]
) -> tuple[Any, Any, bool]:
    """The statistics of one prompt with each generator, and whether all tokens are those of plain `generate`."""
    ids = torch.tensor([chat.ids(chat.prompt(prompt_of(row), row.get("tools")), True)])
    ids = ids.to(target.get_input_embeddings().weight.device)
    call = {"max_new_tokens": args.evaluation_tokens, "pad_token_id": chat.tokenizer.pad_token_id or 0}

    def generated(**more: Any) -> Any:
        torch.manual_seed(seed)
        settings = {**call, **generation_of(args.generation, row), **more}
        return target.generate(ids, attention_mask=torch.ones_like(ids), **settings)

    plain = generated()
    outputs = [generated(candidate_generator=one, return_dict_in_generate=True) for one in generators]
    chain, tree = (output.speculation for output in outputs)
    return chain, tree, all(torch.equal(plain, output.sequences) for output in outputs)


def measured_section(prompts: str | None, results: dict[str, Measured]) -> str:
    """The section of a model card: how it was measured, and a row per domain."""
    if not results:
        return "Nothing was measured, as the recipe was given no `evaluation` prompts."
    lines = [
        f"Generations for held-out prompts (`{prompts}`) with the decoding settings of each domain. *Tokens per step* "
        f"include the target's own token; trees have up to {TREE} draft tokens. *Accepted* is how often the draft "
        "token at each depth of a chain was accepted, of all chains.\n",
        "| domain | tokens per step, chains | tokens per step, trees | accepted by depth | same tokens as without |",
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


def eval_results(prompts: str | None, results: dict[str, Measured]) -> list[EvalResult]:
    """The same numbers for the metadata of a model card."""
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=str(prompts),
            dataset_name=str(prompts),
            dataset_config=domain,
            metric_type=metric,
            metric_value=round(value, 4),
        )
        for domain, result in results.items()
        for metric, value in (
            ("tokens per step, chains", result.chain.tokens_per_step),
            ("tokens per step, trees", result.tree.tokens_per_step),
        )
    ]
