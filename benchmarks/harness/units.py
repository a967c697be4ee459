"""A plan divided into units: the same inputs for every variant. Units are measured and recorded one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.harness.plan import Plan
from benchmarks.harness.variants import PLAIN, Family
from benchmarks.workloads.domains import Domain, DomainError, load_domain, names_of
from benchmarks.workloads.prompts import first_turns, followups, of_length
from hf_specgen.evaluation.measure import Variant
from hf_specgen.evaluation.workloads import SAMPLED

T = TypeVar("T")


@dataclass(frozen=True)
class Unit:
    """Inputs that all variants are measured on, one after the other."""

    section: str  # "tuning", "domains", "batch", "temperature" or "context"
    cell: str  # the domain, batch size, … within the section
    number: int  # of the prompt or batch within the cell
    repeat: int  # from 0
    inputs: dict[str, torch.Tensor]  # `input_ids` and `attention_mask` [rows, prompt]
    generation: dict[str, Any]  # arguments of `generate` that all variants share
    variants: list[Variant]  # plain decoding first
    followups: list[torch.Tensor] = field(default_factory=list)  # further turns of a chat

    @property
    def key(self) -> str:
        """Identifies the unit within a run."""
        return f"{self.section}/{self.cell}/{self.number}/{self.repeat}"


def load_domains(
    plan: Plan, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, notes: list[str]
) -> list[Domain]:
    """The domains that can be measured; a note on each of the others."""
    if not tokenizer.chat_template:
        notes.append(f"{model.name_or_path} has no chat template: prompts are given as plain text.")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31
    domains: list[Domain] = []
    for name in names_of(plan.domains):
        try:
            domain = load_domain(name)
        except DomainError as error:
            notes.append(f"Left out: {error}.")
            continue
        if not tokenizer.chat_template and any(len(turns) > 1 for turns in domain.conversations):
            notes.append(f"Left out: domain {name!r} has several turns, and the model has no chat template.")
            continue
        wanted = plan.prompts + plan.tuning_prompts
        fitting = [c for c in domain.conversations if _length(tokenizer, c, plan) <= limit][:wanted]
        if not fitting:
            notes.append(f"Left out: no prompt of domain {name!r} fits into the model's {limit} positions.")
            continue
        domains.append(replace(domain, conversations=fitting))
    if not domains:
        raise DomainError(" ".join(["no domain is left to measure.", *notes]))
    return domains


def _length(tokenizer: PreTrainedTokenizerBase, turns: Sequence[str], plan: Plan) -> int:
    """Tokens of a whole conversation with its answers, and about 16 of the chat template per turn."""
    return sum(len(tokenizer(turn)["input_ids"]) + 16 + plan.max_new_tokens for turn in turns)


def tuning_units(
    plan: Plan, domains: Sequence[Domain], tokenizer: PreTrainedTokenizerBase, families: Sequence[Family]
) -> Iterator[Unit]:
    """Every setting of every family, on prompts that are not measured afterwards if a domain has more of them."""
    variants = [PLAIN, *(family.variant(setting) for family in families for setting in family.settings)]
    held_out = [[(d, turns) for turns in d.conversations[plan.prompts :] or d.conversations] for d in domains]
    for number, (domain, turns) in enumerate(_round_robin(held_out)[: plan.tuning_prompts]):
        yield _unit(plan, "tuning", domain, number, 0, turns[:1], tokenizer, variants)


def measured_units(
    plan: Plan, domains: Sequence[Domain], tokenizer: PreTrainedTokenizerBase, variants: list[Variant]
) -> Iterator[Unit]:
    """The domains, then the sweeps."""
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
    """First turns, alternating between the domains."""
    return _round_robin([[turns[0] for turns in domain.conversations] for domain in domains])


def _round_robin(groups: Sequence[Sequence[T]]) -> list[T]:
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
