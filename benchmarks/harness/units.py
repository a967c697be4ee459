"""A run cut into rounds that stand for themselves: the same inputs for every variant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from benchmarks.domains import Domain
from benchmarks.plan import Plan
from benchmarks.prompts import first_turns, followups, of_length
from benchmarks.strategies import PLAIN, Family
from hf_specgen.evaluation.measure import Variant

T = TypeVar("T")
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 0}


@dataclass(frozen=True)
class Unit:
    """One round.

    Args:
        section: "tuning", "domains", "batch", "temperature" or "context".
        cell: the domain, batch size, … it belongs to.
        number: of the prompt or batch in the cell.
        repeat: from 0.
        inputs: `input_ids` and `attention_mask`.
        generation: arguments of `generate` that all variants share.
        variants: plain decoding first.
        followups: further turns of a chat.
    """

    section: str
    cell: str
    number: int
    repeat: int
    inputs: dict[str, torch.Tensor]
    generation: dict[str, Any]
    variants: list[Variant]
    followups: list[torch.Tensor] = field(default_factory=list)

    @property
    def key(self) -> str:
        """Tells it from the others of a run."""
        return f"{self.section}/{self.cell}/{self.number}/{self.repeat}"

    @property
    def weight(self) -> float:
        """Roughly how long it takes, for the time left: a batch of 16 about four times as long as one row."""
        rows = len(self.inputs["input_ids"])
        able = len(self.variants) if rows == 1 else sum(variant.batched for variant in self.variants)
        return able * (1 + len(self.followups)) * self.generation["max_new_tokens"] * rows**0.5


def tuning_units(
    plan: Plan, domains: Sequence[Domain], tokenizer: PreTrainedTokenizerBase, families: Sequence[Family]
) -> Iterator[Unit]:
    """Every setting of every family, on conversations that are not measured afterwards (if there are more)."""
    variants = [PLAIN, *(family.variant(setting) for family in families for setting in family.settings)]
    held_out = [[(d, turns) for turns in d.conversations[plan.prompts :] or d.conversations] for d in domains]
    for number, (domain, turns) in enumerate(_in_turn(held_out)[: plan.tuning_prompts]):
        yield _unit(plan, "tuning", domain, number, 0, turns[:1], tokenizer, variants)


def measured_units(
    plan: Plan,
    domains: Sequence[Domain],
    tokenizer: PreTrainedTokenizerBase,
    variants: list[Variant],
) -> Iterator[Unit]:
    """The domains, then the sweeps; from batches those are left out that take one row only."""
    for repeat in range(plan.repeats):
        for domain in domains:
            for number, turns in enumerate(domain.conversations[: plan.prompts]):
                yield _unit(plan, "domains", domain, number, repeat, turns, tokenizer, variants)
    mixed = mixed_prompts(domains)
    settings = {"max_new_tokens": max(1, plan.max_new_tokens // 2), **SAMPLED}
    for number in range(plan.sweep_prompts):
        for size in plan.batches:
            prompts = [mixed[(number * size + row) % len(mixed)] for row in range(size)]
            yield Unit("batch", str(size), number, 0, first_turns(tokenizer, prompts), settings, variants)
        inputs = first_turns(tokenizer, [mixed[number % len(mixed)]])
        for temperature in plan.temperatures:
            sampling = {"temperature": temperature} if temperature else {"do_sample": False, "temperature": None}
            yield Unit("temperature", str(temperature), number, 0, inputs, {**settings, **sampling}, variants)
        for context in plan.contexts:
            inputs = of_length(tokenizer, mixed[number % len(mixed)], mixed, context)
            yield Unit("context", str(context), number, 0, inputs, settings, variants)


def mixed_prompts(domains: Sequence[Domain]) -> list[str]:
    """First turns, taken from the domains in turn."""
    return _in_turn([[turns[0] for turns in domain.conversations] for domain in domains])


def _in_turn(groups: Sequence[Sequence[T]]) -> list[T]:
    """The first of each group, then the second of each, …"""
    return [group[i] for i in range(max(map(len, groups))) for group in groups if i < len(group)]


def _unit(
    plan: Plan,
    section: str,
    domain: Domain,
    number: int,
    repeat: int,
    turns: list[str],
    tokenizer: PreTrainedTokenizerBase,
    variants: list[Variant],
) -> Unit:
    generation = {"max_new_tokens": plan.max_new_tokens, **domain.generation}
    later = followups(tokenizer, turns) if len(turns) > 1 else []
    inputs = first_turns(tokenizer, turns[:1])
    return Unit(section, domain.name, number, repeat, inputs, generation, variants, later)
