"""Measures a saved drafter on held-out prompts, by domain: real generations, with chains and with trees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import PreTrainedModel

from arguments import Arguments
from conversations import ChatFormat, Row, domain_of
from generate_answers import answer_rows, completions
from hf_specgen import AutoCandidates, FixedDepth, NgramCandidates
from hf_specgen.counters import Statistics

Prompts = dict[str, list[Row]]
TREE = 32
"""Draft tokens of a tree."""
UNDRAFTED = NgramCandidates(policy=FixedDepth(0))
"""Plain decoding, with the same passes in all processes, which a sharded target needs."""


@dataclass
class Measured:
    """What was counted in the generations of one domain: with chains, with trees; whether tokens are those of plain."""

    chain: Statistics
    tree: Statistics
    identical: int = 0
    prompts: int = 0


def target_answers(args: Arguments, target: PreTrainedModel, chat: ChatFormat, prompts: Prompts) -> Dataset:
    """The target's own answers to the held-out prompts."""
    numbered = numbered_rows(prompts)
    with torch.random.fork_rng():
        answers = dict(answer_rows(target, chat, numbered, UNDRAFTED, 0, args.generation, **call_of(args)))
    return Dataset.from_list([answers[number] for number, _ in numbered])


def numbered_rows(prompts: Prompts) -> list[tuple[int, Row]]:
    """The prompts of all domains with numbers."""
    return list(enumerate(row for rows in prompts.values() for row in rows))


def call_of(args: Arguments) -> dict[str, Any]:
    """Arguments of `generate_many` in the evaluation."""
    return {"max_new_tokens": args.evaluation_tokens, "max_rows": 16}


def measure(args: Arguments, target: Any, chat: ChatFormat, prompts: Prompts, settings: Any) -> dict[str, Measured]:
    """Generate answers with the drafter as it was saved, and count; the random state is left unchanged."""
    if not PartialState().is_main_process and not args.shard_target:  # a sharded target needs all in each pass
        return {}
    load, policy, rows = AutoCandidates.from_pretrained, FixedDepth(), numbered_rows(prompts)
    drafters = [load(args.output_dir, policy=policy, **settings(with_tree)) for with_tree in (False, True)]
    with torch.random.fork_rng():
        plain, chains, trees = (
            dict(completions(target, chat, rows, drafter, 0, args.generation, **call_of(args)))
            for drafter in (UNDRAFTED, *drafters)
        )
    results = {domain: Measured(Statistics([]), Statistics([])) for domain in prompts}
    for number, row in rows:
        result, tokens = results[domain_of(row)], plain[number].tokens
        result.chain += chains[number].statistics
        result.tree += trees[number].statistics
        result.identical += chains[number].tokens == tokens == trees[number].tokens
        result.prompts += 1
    return results


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
