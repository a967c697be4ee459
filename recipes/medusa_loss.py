"""The loss of Medusa heads: KL(p || q) between each head and the target's distribution at the later position.

    positions j of one answer:                       0   1   2   3   4
    target's distribution p_j of the next token:    p0  p1  p2  p3  p4
    head 0 at position i is trained on p_(i+1):         q0  q1  q2  q3
    head 1 at position i is trained on p_(i+2):             q0  q1  q2

So head h, at the hidden state that predicts token t+1, predicts token t+h+2; p is computed once for all heads.
`[positions, vocab]` tensors exist for one head and `CHUNK` positions at a time: their gradients are computed at once
and accumulated over states and trained matrices, as in a fused linear cross-entropy.

Source: Cai et al., "Medusa" (2024), sections 2.2.1 (loss, 0.8^h) and 2.3.2 (self-distillation with KL).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from transformers import PreTrainedModel

from distillation import CHUNK
from hf_specgen.heads.medusa import MedusaHeads
from hf_specgen.target.model_parts import output_logits, output_matrix

DECAY = 0.8


def medusa_loss(
    target: PreTrainedModel,
    heads: MedusaHeads,
    outputs: Sequence[nn.Module],
    hidden: torch.Tensor,
    tokens: torch.Tensor | None,
    rows: torch.Tensor,
) -> torch.Tensor:
    """Sum over heads and positions of 0.8^h KL(p || q).

    Args:
        target: for p, which has no gradient.
        heads: are trained.
        outputs: the output matrix of each head.
        hidden: `[positions, hidden]` inputs of the target's output matrix at the answers' positions, row by row.
        tokens: `[positions, hidden]` embeddings of the tokens that those positions predict, for `reads_token`.
        rows: `[positions]` index of the answer of each position.
    """
    states = [heads.head_state(head, hidden, tokens) for head in range(heads.config.num_heads)]

    def parts(leaves: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        for first in range(0, len(hidden), CHUNK):
            with torch.no_grad():
                log_p = log_softmax(output_logits(target, hidden[first : first + CHUNK].detach()).float(), dim=-1)
            for head, state in enumerate(leaves):
                learns = later_positions(rows, head)
                learns = learns[(learns >= first) & (learns < first + len(log_p))]
                if len(learns):
                    log_q = log_softmax(output_logits(target, state[learns - head - 1], outputs[head]).float(), dim=-1)
                    yield DECAY**head * kl_div(log_q, log_p[learns - first], reduction="sum", log_target=True)

    return gradient_at_once(parts, states, [p for output in outputs for p in output.parameters()])


def later_positions(rows: torch.Tensor, head: int) -> torch.Tensor:
    """The positions whose next token is predicted by head h, from the state h + 1 positions earlier in the same answer.

    Args:
        rows: `[positions]` index of the answer of each position.
        head: h.

    Example:
        >>> later_positions(torch.tensor([0, 0, 0, 1, 1]), head=0).tolist()
        [1, 2, 4]
    """
    later = torch.arange(head + 1, len(rows), device=rows.device)
    return later[rows[later] == rows[later - head - 1]]


def answer_loss(target: PreTrainedModel, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The target's own cross-entropy, summed over positions, in chunks.

    Args:
        target: for the output matrix.
        hidden: `[positions, hidden]`, with a gradient.
        tokens: `[positions]` the tokens to predict.
    """

    def parts(leaves: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        for first in range(0, len(hidden), CHUNK):
            logits = output_logits(target, leaves[0][first : first + CHUNK]).float()
            yield cross_entropy(logits, tokens[first : first + CHUNK], reduction="sum")

    return gradient_at_once(parts, [hidden], list(output_matrix(target).parameters()))


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
