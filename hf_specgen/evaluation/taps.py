"""Compares the taps of a head: the configured hidden states of the target, and those one layer below and above.

Formats count hidden states differently, and some published heads were trained with another convention than their config
specifies. The output is the same with every choice; the acceptance shows which one the head was trained with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from hf_specgen.candidates.draft_heads import HeadCandidates
from hf_specgen.depth import FixedDepth

SHIFTS = (0, -1, 1)
"""Compared taps, in layers relative to the configured ones."""
DEPTH = 4
"""Draft tokens per step: enough to compare acceptance, and no more than any published head drafts."""


@dataclass(frozen=True)
class TapsResult:
    """The acceptance with one choice of taps.

    Args:
        shift: relative to the configured taps, in layers.
        taps: indices into Transformers' `hidden_states`.
        tokens_per_step: mean, bonus token included.
    """

    shift: int
    taps: tuple[int, ...]
    tokens_per_step: float


def compare_taps(
    model: PreTrainedModel,
    heads: HeadCandidates,
    batches: Sequence[dict[str, torch.Tensor]],
    generation: dict[str, Any],
) -> list[TapsResult]:
    """Generate with the configured taps of a head, and with these shifted by one layer.

    Args:
        model: the target.
        heads: the strategy, with the configured taps.
        batches: inputs of `generate`.
        generation: further arguments of `generate`.

    Returns:
        A result for each choice for which the target has hidden states, the configured one first.
    """
    configured = heads.target_requirements(model).taps
    last = model.config.get_text_config().num_hidden_layers
    results = []
    for shift in SHIFTS:
        taps = tuple(tap + shift for tap in configured)
        if all(0 <= tap <= last for tap in taps):
            results.append(
                TapsResult(
                    shift, taps, _tokens_per_step(model, heads.with_aux_hidden_states(taps, DEPTH), batches, generation)
                )
            )
    return results


def _tokens_per_step(
    model: PreTrainedModel,
    heads: HeadCandidates,
    batches: Iterable[dict[str, torch.Tensor]],
    generation: dict[str, Any],
) -> float:
    tokens = steps = 0
    for seed, inputs in enumerate(batches):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            cast(Any, model).generate(**inputs, **generation, candidate_generator=heads, policy=FixedDepth())
        assert heads.speculation is not None
        tokens += heads.speculation.emitted
        steps += sum(len(row) for row in heads.speculation.rows)
    return tokens / max(steps, 1)
