"""Judges the first token that differs from plain decoding by what decides it: logits, or p over noise when sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from hf_specgen import compat
from hf_specgen.evaluation.measure import Sample
from hf_specgen.targets.support import is_rounding

ROUNDING, UNEXPLAINED = "rounding", "NO"
NO_TOKEN = -1
"""In place of a token after the end of the shorter output."""


@dataclass(frozen=True)
class Difference:
    """The first token at which the output differs from plain decoding."""

    row: int
    position: int
    plain_token: int
    our_token: int


def first_difference(plain: Sample, ours: Sample) -> Difference | None:
    """The first token at which `ours` differs from `plain`, in any row; None if they are identical."""
    width = max(plain.ids.shape[1], ours.ids.shape[1])
    plain_ids, our_ids = (pad(s.ids, (0, width - s.ids.shape[1]), value=NO_TOKEN) for s in (plain, ours))
    differs = (plain_ids != our_ids).nonzero()
    if len(differs) == 0:
        return None
    row, position = min(differs.tolist(), key=lambda place: place[1])
    return Difference(row, position, int(plain_ids[row, position]), int(our_ids[row, position]))


def explain_difference(
    model: PreTrainedModel,
    plain: Sample,
    difference: Difference,
    generation: dict[str, Any],
    seed: int,
    attention_mask: torch.Tensor,
) -> dict[str, Any]:
    """By how much plain decoding preferred its own token, and whether rounding explains the difference.

    A sampled token is the argmax of p / e, e exponential noise: of ``logit / temperature - log e``. Two tokens whose
    values are closer than the rounding of both logits may exchange their places. (Top-k and top-p leave the order of
    tokens that they keep as it is.)

    Args:
        generation: arguments of `generate`.
        seed: of the call.
        attention_mask: `[batch, prompt]`, of prompts that are padded on the left.
    """
    tokens = [difference.plain_token, difference.our_token]
    if NO_TOKEN in tokens:
        return {"decided by": "length", "explained": UNEXPLAINED}
    width, row = attention_mask.shape[1], difference.row
    text = plain.ids[row : row + 1, int(attention_mask[row].argmax()) : difference.position]
    with torch.no_grad():
        logits = model(text.to(compat.input_device(model))).logits[0, -1].float()
    values, scale, decided_by = logits[tokens], float(logits.std()), "logits"
    if generation.get("do_sample"):
        temperature = generation.get("temperature") or 1.0
        shape = (len(plain.ids), len(logits))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for _ in range(difference.position - width + 1):
                noise = torch.empty(shape, device=logits.device).exponential_()
        values, scale = values / temperature - noise[row, tokens].log(), scale / temperature
        decided_by = "p over noise"
    margin = float(values[0] - values[1])
    explained = ROUNDING if is_rounding([abs(margin) / 2 / scale], model.dtype) else UNEXPLAINED
    return {"decided by": decided_by, "margin": margin, "explained": explained}
