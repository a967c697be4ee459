"""The loss of a drafter: the distance of each drafted distribution q from the target's distribution p.

    positions j of one answer:                       0   1   2   3   4
    target's distribution p_j of the next token:    p0  p1  p2  p3  p4
    depth 0, drafted at position i, learns p_(i+1):     q0  q1  q2  q3
    depth 1, drafted at position i, learns p_(i+2):         q0  q1  q2

So depth d, drafted from what is known at the position that predicts token t+1, predicts token t+d+2; p is computed once
for all depths. `[positions, vocab]` tensors exist for one depth and `CHUNK` positions at a time: their gradients are
computed at once and accumulated over states and trained matrices, as in a fused linear cross-entropy.

| name | loss | |
|---|---|---|
| kl | KL(p‖q) | bounds the rejection rate: TV <= sqrt(KL / 2) (arXiv 2211.17192, section 3) |
| ce | -log q(token) | needs no p; for data that are the target's own answers |
| tv | TV = sum_v abs(p - q) / 2 | the rejection rate itself |
| lk | r KL + (1 - r) TV, r = exp(-3 (1 - TV)) | KL while q is far from p, then TV (arXiv 2602.23881) |

Source: Cai et al., "Medusa" (2024), sections 2.2.1 (loss, 0.8^d) and 2.3.2 (self-distillation with KL).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, kl_div, linear, log_softmax, nll_loss
from transformers import PreTrainedModel

from hf_specgen.targets.model_parts import output_logits, output_matrix

CHUNK = 1024
"""Positions whose logits `[positions, vocab]` are in memory at once."""
Logits = Callable[[torch.Tensor], torch.Tensor]
"""From states `[n, width]` to logits `[n, draft vocabulary]`."""


@dataclass
class Drafts:
    """What a drafter drafts in one training pass."""

    states: Sequence[torch.Tensor]  # for each depth [sources, width]
    logits: Sequence[Logits]  # for each depth
    sources: torch.Tensor | None = None  # [sources] predicting positions to draft from, ascending; None: all
    first: int = 1  # how many positions after its source depth 0 predicts; 0: the same token as the target there
    trained: Sequence[torch.Tensor] = ()  # further trained tensors that `logits` reads
    drafted_ids: torch.Tensor | None = None  # [draft vocabulary], over which p is then normalised; None: all
    confidence: Logits | None = None  # from states to `[n]` logits of being accepted


@dataclass
class TrainingPositions:
    """The predicting positions of a batch, row by row, from which drafts learn."""

    hidden: torch.Tensor  # [positions, hidden], inputs of the target's output matrix
    tokens: torch.Tensor  # [positions], which these positions predict
    answers: torch.Tensor  # [positions], number of the answer of each of them, ascending


def later_pairs(
    answers: torch.Tensor, offset: int, sources: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of sources, and the position `offset` after each of them, where that is in the same answer."""
    starts = torch.arange(len(answers), device=answers.device) if sources is None else sources
    later = starts + offset
    inside = (later < len(answers)) & (answers[later.clamp(max=len(answers) - 1)] == answers[starts])
    index = inside.nonzero()[:, 0]
    return index, later[index]


def _parts(
    target: PreTrainedModel,
    drafts: Drafts,
    positions: TrainingPositions,
    ids: torch.Tensor | None,
    needs_p: bool = True,
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """All training positions, in parts of at most `CHUNK` positions; p over `ids`, or over all tokens.

    Each part is a depth, the sources that draft, the positions that they learn, and log p of these.
    """
    pairs = [
        later_pairs(positions.answers, drafts.first + depth, drafts.sources) for depth in range(len(drafts.states))
    ]
    for first in range(0, len(positions.tokens), CHUNK):
        last = min(first + CHUNK, len(positions.tokens))
        log_p = _log_p(target, positions.hidden[first:last], ids) if needs_p else None
        for depth, (index, learns) in enumerate(pairs):
            inside = (learns >= first) & (learns < last)
            if inside.any():
                p = None if log_p is None else log_p[learns[inside] - first]
                yield depth, index[inside], learns[inside], p


def draft_loss(
    target: PreTrainedModel, drafts: Drafts, positions: TrainingPositions, weights: Mapping[str, float], decay: float
) -> torch.Tensor:
    """Sum over depths and positions of decay^depth times the weighted losses; p has no gradient."""

    def parts(leaves: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        needs_p = set(weights) != {"ce"}
        for depth, drafted, learns, log_p in _parts(target, drafts, positions, drafts.drafted_ids, needs_p):
            chosen = leaves[depth][drafted]
            log_q = log_softmax(drafts.logits[depth](chosen).float(), dim=-1)
            loss, overlap = _losses(log_q, log_p, positions.tokens[learns], drafts.drafted_ids, weights)
            if drafts.confidence is not None and overlap is not None:
                confidence = drafts.confidence(chosen).float()
                loss = loss + weights.get("confidence", 1.0) * binary_cross_entropy_with_logits(
                    confidence, overlap.detach(), reduction="sum"
                )
            yield decay**depth * loss

    trained = list(dict.fromkeys(parameter for parameter in drafts.trained if parameter.requires_grad))
    return cast(torch.Tensor, _GradientAtOnce.apply(parts, len(drafts.states), *drafts.states, *trained))


def rows_of_matrix(matrix: nn.Linear, ids: torch.Tensor) -> Logits:
    """The output matrix of some tokens."""
    bias = None if matrix.bias is None else matrix.bias[ids]
    return partial(linear, weight=matrix.weight[ids], bias=bias)


@torch.no_grad()
def _log_p(target: PreTrainedModel, hidden: torch.Tensor, drafted_ids: torch.Tensor | None) -> torch.Tensor:
    matrix = None if drafted_ids is None else rows_of_matrix(output_matrix(target), drafted_ids)
    return log_softmax(output_logits(target, hidden.detach(), matrix).float(), dim=-1)


def _losses(
    log_q: torch.Tensor,
    log_p: torch.Tensor | None,
    tokens: torch.Tensor,
    drafted_ids: torch.Tensor | None,
    weights: Mapping[str, float],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weighted sum of the losses of n positions; and 1 - TV of each, where a loss needs it."""
    total, overlap = log_q.new_zeros(()), None
    if "ce" in weights:
        if drafted_ids is not None:  # ascending; a token that cannot be drafted has no loss
            place = torch.searchsorted(drafted_ids, tokens).clamp(max=len(drafted_ids) - 1)
            tokens = torch.where(drafted_ids[place] == tokens, place, -100)
        total = total + weights["ce"] * nll_loss(log_q, tokens, reduction="sum", ignore_index=-100)
    if log_p is None:
        return total, None
    width = min(log_q.shape[-1], log_p.shape[-1])  # the vocabulary of one of them may be padded
    log_q, log_p = log_q[:, :width], log_p[:, :width]
    if set(weights) == {"kl"}:
        return weights["kl"] * kl_div(log_q, log_p, reduction="sum", log_target=True), None
    kl = kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=-1)
    overlap = 1 - (log_p.exp() - log_q.exp()).abs().sum(dim=-1) / 2
    ratio = (-3 * overlap.detach()).exp()
    each = {"kl": kl, "tv": 1 - overlap, "lk": ratio * kl + (1 - ratio) * (1 - overlap)}
    for name in each.keys() & weights.keys():
        total = total + weights[name] * each[name].sum()
    return total, overlap


@torch.no_grad()
def acceptance_counts(
    target: PreTrainedModel, drafts: Drafts, positions: TrainingPositions, rows: torch.Tensor, depths: int
) -> torch.Tensor:
    """`[batch, depths, 4]` by row and depth: drafts, most likely tokens that agree, chains that do, sum of 1 - TV.

    The true tokens before it are given to each draft token. A chain agrees at a depth if all depths up to it do.
    """
    count = len(positions.answers) if drafts.sources is None else len(drafts.sources)
    agrees, overlaps = torch.zeros(2, depths, count, device=rows.device)
    for depth, drafted, _, log_p in _parts(target, drafts, positions, None):
        if log_p is None or depth >= depths:
            continue
        logits = drafts.logits[depth](drafts.states[depth][drafted]).float()
        ids = torch.arange(logits.shape[-1], device=rows.device) if drafts.drafted_ids is None else drafts.drafted_ids
        width = min(len(ids), log_p.shape[-1])  # the vocabulary of one of them may be padded
        agrees[depth, drafted] = (ids[logits.argmax(-1)] == log_p.argmax(-1)).float()
        q = log_softmax(logits, dim=-1)[:, :width]
        overlaps[depth, drafted] = torch.minimum(q, log_p[:, ids[:width]]).exp().sum(dim=-1)
    sources = torch.arange(count, device=rows.device) if drafts.sources is None else drafts.sources
    counts = torch.zeros(int(rows.max()) + 1 if len(rows) else 1, depths, 4, device=rows.device)
    chain = torch.ones(count, device=rows.device)
    single = drafts.first == 0  # one token each: a chain are the drafts of successive positions
    for depth in range(depths if single else min(depths, len(drafts.states))):
        index, learns = later_pairs(positions.answers, drafts.first + depth, drafts.sources)
        at, place = (0, learns) if single else (depth, index)
        chain = torch.zeros_like(chain).index_put((index,), chain[index] * agrees[at, place])
        values = torch.stack([torch.ones(len(index), device=rows.device), agrees[at, place], chain[index]], dim=-1)
        counts[:, depth].index_add_(0, rows[sources[index]], torch.cat([values, overlaps[at, place, None]], dim=-1))
    return counts


class _GradientAtOnce(torch.autograd.Function):
    """A sum of scalars whose gradients are computed one by one, so that only one of their graphs exists at a time."""

    @staticmethod
    def forward(ctx: Any, parts: Any, count: int, *inputs: torch.Tensor) -> Any:
        leaves = [state.detach().requires_grad_() for state in inputs[:count]]
        sources = [*leaves, *inputs[count:]]
        needed = ctx.needs_input_grad[2:]
        sums = [torch.zeros_like(source) for source in sources]
        total = inputs[0].new_zeros((), dtype=torch.float32)
        with torch.set_grad_enabled(any(needed)):
            for part in parts(leaves):
                total += part.detach()
                if not any(needed):
                    continue
                for gradient, new in zip(sums, torch.autograd.grad(part, sources, allow_unused=True), strict=True):
                    if new is not None:
                        gradient += new
        ctx.save_for_backward(*sums)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        return (None, None, *(upstream[0] * gradient for gradient in ctx.saved_tensors))
