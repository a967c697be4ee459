"""The loss of Medusa heads: KL(p || q) of each head to what the target itself said later, head by head, in chunks.

    flat answer positions j, row-major:      0   1   2   3   4        (one answer)
    target's distribution p:                p0  p1  p2  p3  p4        p_j is of the token after position j
    head 0 at position i learns p_(i+1):        q0  q1  q2  q3
    head 1 at position i learns p_(i+2):            q0  q1  q2

So head h at the state that predicts token t+1 learns token t+h+2, and p is computed once for all heads.
Vocabulary-sized tensors exist for one head and `CHUNK` positions at a time: their gradient is taken at once, and only
that of the head's state is kept (as in a fused linear cross-entropy).

Source: Cai et al., "Medusa" (2024), sections 2.2.1 (loss, 0.8^h) and 2.3.2 (self-distillation with KL).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import kl_div, log_softmax
from transformers import PreTrainedModel

from distillation import CHUNK
from hf_specgen.heads.anatomy import output_logits
from hf_specgen.heads.medusa import MedusaHeads

DECAY = 0.8
Logits = Callable[[torch.Tensor], torch.Tensor]


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
        target: for p; no gradient reaches it through p.
        heads: to be trained.
        outputs: the output matrix of each head.
        hidden: `[positions, hidden]` what the target's output matrix read at the answers' positions, row by row.
        tokens: `[positions, hidden]` embeddings of the tokens that those positions predict, for `reads_token`.
        rows: `[positions]` which answer each position is of.
    """
    states = [heads.head_state(head, hidden, tokens) for head in range(heads.config.num_heads)]
    total = hidden.new_zeros((), dtype=torch.float32)
    for first in range(0, len(hidden), CHUNK):
        with torch.no_grad():
            log_p = log_softmax(output_logits(target, hidden[first : first + CHUNK].detach()).float(), dim=-1)
        for head, state in enumerate(states):
            learns = torch.arange(first, first + len(log_p), device=rows.device)
            learns = learns[learns > head]
            learns = learns[rows[learns] == rows[learns - head - 1]]
            if len(learns):
                q = scaled_like(target, outputs[head])
                parameters = [p for p in outputs[head].parameters() if p.requires_grad]
                total = total + DECAY**head * _kl(log_p[learns - first], state[learns - head - 1], q, parameters)
    return total


def scaled_like(target: PreTrainedModel, output: nn.Module) -> Logits:
    """Logits through `output`, scaled and capped as the target's own."""
    return lambda hidden: output_logits(target, hidden, output)


def _kl(log_p: torch.Tensor, state: torch.Tensor, logits: Logits, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    def of_state(leaf: torch.Tensor) -> torch.Tensor:
        return kl_div(log_softmax(logits(leaf).float(), dim=-1), log_p, reduction="sum", log_target=True)

    return cast(torch.Tensor, _GradientAtOnce.apply(state, of_state, *parameters))


class _GradientAtOnce(torch.autograd.Function):
    """A scalar function of a state whose graph is used up in the forward pass, so that nothing of it is kept."""

    @staticmethod
    def forward(
        ctx: Any, state: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor], *parameters: Any
    ) -> Any:
        with torch.enable_grad():
            leaf = state.detach().requires_grad_()
            value = function(leaf)
        ctx.save_for_backward(*torch.autograd.grad(value, (leaf, *parameters)))
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        state, *parameters = ctx.saved_tensors
        return (upstream[0] * state, None, *(upstream[0] * gradient for gradient in parameters))
