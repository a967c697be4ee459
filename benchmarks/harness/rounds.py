"""Runs several variants in turns on the same inputs: single requests, batches, or chats of several turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specgen import compat
from hf_specgen.evaluation.measure import Sample, Variant, measure_call, total_counts

ONE_ROW = {"prompt_lookup_num_tokens", "assistant_model", "assistant_early_exit"}
"""Arguments of Transformers' assisted decoding, which takes no batches."""


def measure_round(
    model: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    variants: Sequence[Variant],
    generation: dict[str, Any],
    seed: int,
    *,
    first: int = 0,
    followups: Sequence[torch.Tensor] = (),
) -> dict[str, Sample]:
    """Run every variant once on the same inputs, of a batch only those that take one; number `first` runs first.

    `followups` are, for a chat (one row), the tokens `[1, length]` of every further turn, starting at the end of the
    previous answer; each turn continues from the cache of the previous one.
    """
    is_batch = len(inputs["input_ids"]) > 1
    able = [variant for variant in variants if not (is_batch and ONE_ROW & set(variant.arguments()))]
    order = able[first % len(able) :] + able[: first % len(able)]
    samples = {variant.name: _measure_chat(model, inputs, followups, variant, generation, seed) for variant in order}
    return {variant.name: samples[variant.name] for variant in able}


def _measure_chat(
    model: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    followups: Sequence[torch.Tensor],
    variant: Variant,
    generation: dict[str, Any],
    seed: int,
) -> Sample:
    """The sums over all turns, with the text of the last one; a single request is a chat of one turn."""
    if not followups:
        return measure_call(model, inputs, variant, generation, seed)
    generation = {**generation, "return_dict_in_generate": True}
    turns = [measure_call(model, inputs, variant, generation, seed)]
    for followup in followups:
        text = turns[-1].ids
        is_repeated = int(text[0, -1]) == int(followup[0, 0])  # an EOS token at the end of the answer
        ids = torch.cat([text, followup[:, int(is_repeated) :]], dim=1)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), compat.CACHE: turns[-1].cache}
        turns.append(measure_call(model, inputs, variant, generation, seed))
    return replace(
        turns[-1],
        tokens=sum(turn.tokens for turn in turns),
        seconds=sum(turn.seconds for turn in turns),
        thread_seconds=sum(turn.thread_seconds for turn in turns),
        first_token=turns[0].first_token,
        speculation=total_counts(turns) if turns[0].speculation is not None else None,
        cache=None,
    )
