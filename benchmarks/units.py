"""A run cut into rounds that stand for themselves: the same inputs for every contender."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from benchmarks.domains import Domain
from benchmarks.plan import Plan
from benchmarks.prompts import first_turns, followups, of_length
from benchmarks.strategies import PLAIN, Family
from hf_specgen.measure import Contender

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
        generation: arguments of `generate` that all contenders share.
        contenders: plain decoding first.
        followups: further turns of a chat.
    """

    section: str
    cell: str
    number: int
    repeat: int
    inputs: dict[str, torch.Tensor]
    generation: dict[str, Any]
    contenders: list[Contender]
    followups: list[torch.Tensor] = field(default_factory=list)

    @property
    def key(self) -> str:
        """Tells it from the others of a run."""
        return f"{self.section}/{self.cell}/{self.number}/{self.repeat}"

    @property
    def weight(self) -> int:
        """Roughly how long it takes, for the time left."""
        return len(self.contenders) * (1 + len(self.followups))


def tuning_units(
    plan: Plan, domains: Sequence[Domain], tokenizer: PreTrainedTokenizerBase, families: Sequence[Family]
) -> Iterator[Unit]:
    """Every setting of every family, on conversations that are not measured afterwards."""
    contenders = [PLAIN, *(family.contender(setting) for family in families for setting in family.settings)]
    for domain in domains:
        held_out = domain.conversations[plan.prompts : plan.prompts + plan.tuning_prompts]
        for number, turns in enumerate(held_out or domain.conversations[: plan.tuning_prompts]):
            yield _unit(plan, "tuning", domain, number, 0, turns[:1], tokenizer, contenders)


def measured_units(
    plan: Plan,
    domains: Sequence[Domain],
    tokenizer: PreTrainedTokenizerBase,
    contenders: list[Contender],
    ours: Sequence[str],
) -> Iterator[Unit]:
    """The domains with everybody, then the sweeps with plain decoding and ours."""
    for repeat in range(plan.repeats):
        for domain in domains:
            for number, turns in enumerate(domain.conversations[: plan.prompts]):
                yield _unit(plan, "domains", domain, number, repeat, turns, tokenizer, contenders)
    mixed = mixed_prompts(domains)
    swept = [contender for contender in contenders if contender is PLAIN or contender.name in ours]
    settings = {"max_new_tokens": max(1, plan.max_new_tokens // 2), **SAMPLED}
    for number in range(plan.sweep_prompts):
        for size in plan.batches:
            prompts = [mixed[(number * size + row) % len(mixed)] for row in range(size)]
            yield Unit("batch", str(size), number, 0, first_turns(tokenizer, prompts), settings, swept)
        inputs = first_turns(tokenizer, [mixed[number % len(mixed)]])
        for temperature in plan.temperatures:
            sampling = {"temperature": temperature} if temperature else {"do_sample": False, "temperature": None}
            yield Unit("temperature", str(temperature), number, 0, inputs, {**settings, **sampling}, swept)
        for context in plan.contexts:
            inputs = of_length(tokenizer, mixed[number % len(mixed)], mixed, context)
            yield Unit("context", str(context), number, 0, inputs, settings, swept)


def mixed_prompts(domains: Sequence[Domain]) -> list[str]:
    """First turns, taken from the domains in turn."""
    longest = max(len(domain.conversations) for domain in domains)
    return [d.conversations[i][0] for i in range(longest) for d in domains if i < len(d.conversations)]


def _unit(
    plan: Plan,
    section: str,
    domain: Domain,
    number: int,
    repeat: int,
    turns: list[str],
    tokenizer: PreTrainedTokenizerBase,
    contenders: list[Contender],
) -> Unit:
    generation = {"max_new_tokens": plan.max_new_tokens, **domain.generation}
    later = followups(tokenizer, turns) if len(turns) > 1 else []
    inputs = first_turns(tokenizer, turns[:1])
    return Unit(section, domain.name, number, repeat, inputs, generation, contenders, later)
