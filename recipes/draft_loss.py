"""The loss of heads that draft several tokens: KL(p || q) between each draft position and the target's distribution.

    positions j of one answer:                       0   1   2   3   4
    target's distribution p_j of the next token:    p0  p1  p2  p3  p4
    depth 0, drafted at position i, learns p_(i+1):     q0  q1  q2  q3
    depth 1, drafted at position i, learns p_(i+2):         q0  q1  q2

So depth d, drafted from what is known at the position that predicts token t+1, predicts token t+d+2; p is computed once
for all depths. `[positions, vocab]` tensors exist for one depth and `CHUNK` positions at a time: their gradients are
computed at once and accumulated over states and trained matrices, as in a fused linear cross-entropy.

Source: Cai et al., "Medusa" (2024), sections 2.2.1 (loss, 0.8^d) and 2.3.2 (self-distillation with KL).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.nn.functional import kl_div, log_softmax
from transformers import PreTrainedModel

from distillation import CHUNK
from hf_specgen.targets.model_parts import output_logits

DECAY = 0.8
"""Weight of each depth relative to the one before."""
Logits = Callable[[torch.Tensor], torch.Tensor]


def later_pairs(
    rows: torch.Tensor, depth: int, sources: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The targets of a depth: indices of sources, and the position whose next token each of them predicts.

    Args:
        rows: `[positions]` index of the answer of each position.
        depth: d.
        sources: `[sources]` positions; None: all.

    Example:
        >>> later_pairs(torch.tensor([0, 0, 0, 1, 1]), 0, torch.tensor([1, 2, 3]))
        (tensor([0, 2]), tensor([2, 4]))
    """
    starts = torch.arange(len(rows), device=rows.device) if sources is None else sources
    later = starts + depth + 1
    index = (rows[later.clamp(max=len(rows) - 1)] == rows[starts]).logical_and(later < len(rows)).nonzero()[:, 0]
    return index, later[index]


def draft_loss(
    target: PreTrainedModel,
    states: Sequence[torch.Tensor],
    logits: Sequence[Logits],
    hidden: torch.Tensor,
    rows: torch.Tensor,
    *,
    sources: torch.Tensor | None = None,
    trained: Sequence[torch.Tensor] = (),
    drafted_ids: torch.Tensor | None = None,
    decay: float = DECAY,
) -> torch.Tensor:
    """Sum over depths and positions of decay^d KL(p || q).

    Args:
        target: for p, which has no gradient.
        states: for each depth `[sources, width]` what is drafted from each source.
        logits: for each depth from `[n, width]` to `[n, draft vocabulary]`.
        hidden: `[positions, hidden]` inputs of the target's output matrix at the answers' positions, row by row.
        rows: `[positions]` index of the answer of each position.
        sources: `[sources]` the positions from which is drafted; None: all.
        trained: further trained tensors that `logits` reads.
        drafted_ids: `[draft vocabulary]` the target's ids; p is then normalised over these. None: all.
        decay: weight of each depth relative to the one before.
    """

    pairs = [later_pairs(rows, depth, sources) for depth in range(len(states))]

    def parts(leaves: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        for first in range(0, len(hidden), CHUNK):
            with torch.no_grad():
                p_logits = output_logits(target, hidden[first : first + CHUNK].detach()).float()
                log_p = log_softmax(p_logits if drafted_ids is None else p_logits[:, drafted_ids], dim=-1)
            for depth, state in enumerate(leaves):
                index, learns = pairs[depth]
                inside = (learns >= first) & (learns < first + len(log_p))
                index, learns = index[inside], learns[inside]
                if len(learns):
                    log_q = log_softmax(logits[depth](state[index]).float(), dim=-1)
                    yield decay**depth * kl_div(log_q, log_p[learns - first], reduction="sum", log_target=True)

    return gradient_at_once(parts, states, trained)


def gradient_at_once(
    parts: Callable[[Sequence[torch.Tensor]], Iterator[torch.Tensor]],
    states: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
) -> torch.Tensor:
    """A sum of scalars whose gradients are computed one by one, so that only one of their graphs exists at a time.

    Args:
        parts: yields the scalars, from detached copies of the states.
        states: receive the accumulated gradient.
        parameters: further inputs of the scalars; those that require no gradient are left out.
    """
    trained = list(dict.fromkeys(parameter for parameter in parameters if parameter.requires_grad))
    return cast(torch.Tensor, _GradientAtOnce.apply(parts, len(states), *states, *trained))


class _GradientAtOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Any, count: int, *inputs: torch.Tensor) -> Any:
        leaves = [state.detach().requires_grad_() for state in inputs[:count]]
        sources = [*leaves, *inputs[count:]]
        sums = [torch.zeros_like(source) for source in sources]
        total = inputs[0].new_zeros((), dtype=torch.float32)
        with torch.enable_grad():
            for part in parts(leaves):
                total += part.detach()
                for gradient, new in zip(sums, torch.autograd.grad(part, sources, allow_unused=True), strict=True):
                    if new is not None:
                        gradient += new
        ctx.save_for_backward(*sums)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        return (None, None, *(upstream[0] * gradient for gradient in ctx.saved_tensors))
