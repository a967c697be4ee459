"""Rejection sampling: the output has the target's distribution, but is not what plain `generate` samples.

A draft token sampled from q is accepted with probability min(1, p/q). If it is rejected, p is replaced by the residual
distribution norm(max(0, p - q)). Accepted or not, the emitted token then has distribution p, and a draft token is
accepted with probability sum_v min(p_v, q_v), the maximum for a token with distribution q. Siblings are verified in
order: each against the residual that its earlier siblings left, with their tokens removed from q.

Sources: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), section 2.3; Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling" (2023); for siblings Miao et al., "SpecInfer"
(2023), section 4.3, and Jeon et al., "Recursive Speculative Decoding" (2024), without replacement.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_specgen.call import Call
from hf_specgen.tree import DraftTree
from hf_specgen.verification.base import VerificationSession, Verifier
from hf_specgen.verification.sampling import (
    DraftSampler,
    argmax,
    child_table,
    exponential,
    exponential_race,
    tokens_of,
)


class RejectionVerifier(Verifier):
    """Accepts with probability min(1, p/q): lossless in distribution, but not token for token with the same seed.

    For drafts that carry `DraftTree.q`; a deterministic proposal (point-mass q) is accepted with probability p. In
    greedy decoding it is the same as exact verification.
    """

    def start(self, call: Call) -> VerificationSession:
        return _RejectionSession(call)


class _RejectionSession(VerificationSession):
    def __init__(self, call: Call):
        super().__init__(call)
        self._drafts = DraftSampler() if call.do_sample else None

    @property
    def wants_q(self) -> bool:
        return self.call.do_sample

    def draft_weights(self, scores: torch.Tensor, steps: Sequence[Sequence[int]]) -> torch.Tensor:
        """In descending order, a sample without replacement from `softmax(scores)`, independent of the target."""
        return self._drafts.weights(scores) if self._drafts else super().draft_weights(scores, steps)

    def choose(
        self, scores: torch.Tensor, steps: Sequence[Sequence[int]], tree: DraftTree, nodes: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        if not self.call.do_sample:
            return argmax(scores)
        device, (batch, _, vocab) = scores.device, scores.shape
        table = child_table(tree, nodes, device)
        q = None if tree.q is None else _fit(tree.q, vocab).to(device, torch.float32)
        uniforms = torch.rand(table.shape, device=device)
        accepted, remaining = accept_or_reject(scores.softmax(dim=-1), q, table, tokens_of(tree, table), uniforms)
        # One noise tensor for all slots of a row: only the last slot of its accepted path uses it, and which slot that
        # is depends on the uniforms alone. (A slot's rejected tokens have probability 0 in `remaining`.)
        bonus = exponential_race(remaining, exponential((batch, 1, vocab), device))
        return torch.where(accepted >= 0, accepted, bonus)


def accept_or_reject(
    p: torch.Tensor, q: torch.Tensor | None, table: torch.Tensor, tokens: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept or reject the draft tokens at every slot, earlier siblings first.

    Args:
        p: `[batch, slots, vocab]` probabilities of the target.
        q: `[batch, nodes, vocab]` probabilities of the draft; None if the proposal is deterministic.
        table: `[batch, slots, siblings]` the children of each slot's node, -1 for none.
        tokens: `[batch, slots, siblings]` those nodes' tokens, -1 for none.
        uniforms: `[batch, slots, siblings]` numbers in [0, 1).

    Returns:
        `[batch, slots]` the accepted token, or -1; `[batch, slots, vocab]` the distribution to sample from then.
    """
    accepted = torch.full(table.shape[:2], -1, device=p.device)
    for rank in range(table.shape[2]):
        node, token, uniform = table[..., rank], tokens[..., rank], uniforms[..., rank]
        index = token.clamp(min=0).unsqueeze(-1)
        drawn_from = draft_distribution(q, node, index, tokens[..., :rank], p)
        difference = residual(p, drawn_from)
        mass = difference.sum(dim=-1)
        p_token, q_token = p.gather(-1, index)[..., 0], drawn_from.gather(-1, index)[..., 0]
        # No mass means p = q, and then a rejection could only come from rounding.
        accept = (uniform * q_token < p_token) | (mass <= 0)
        considered = (token >= 0) & (accepted < 0)
        accepted = torch.where(considered & accept, token, accepted)
        p = torch.where((considered & ~accept).unsqueeze(-1), difference / mass.unsqueeze(-1), p)
    return accepted, p


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """max(0, p - q), not normalised; 0 at a rejected token, which has p <= q."""
    return (p - q).clamp_(min=0)


def draft_distribution(
    q: torch.Tensor | None, node: torch.Tensor, token: torch.Tensor, earlier: torch.Tensor, p: torch.Tensor
) -> torch.Tensor:
    """`[batch, slots, vocab]` the distribution of each slot's draft token: q without the tokens of earlier siblings.

    Where the token has probability 0 in it, it was proposed deterministically: a point mass. `token` is `[batch, slots,
    1]`, 0 for none; `p` gives shape, dtype and device.
    """
    point_mass = torch.zeros_like(p).scatter_(-1, token, 1.0)
    if q is None:
        return point_mass
    rows = torch.arange(len(q), device=q.device).unsqueeze(-1)
    remaining = q[rows, node.clamp(min=0)]  # a copy
    if earlier.shape[-1]:
        remaining = remaining.scatter_(-1, earlier.clamp(min=0), 0.0)
        remaining = remaining / remaining.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(remaining.dtype).tiny)
    return torch.where(remaining.gather(-1, token) > 0, remaining, point_mass)


def _fit(q: torch.Tensor, vocab: int) -> torch.Tensor:
    if q.shape[-1] > vocab:
        raise ValueError(
            f"the draft's q has {q.shape[-1]} tokens, the target has {vocab}; cut the draft's scores before the softmax"
        )
    return torch.nn.functional.pad(q, (0, vocab - q.shape[-1])) if q.shape[-1] < vocab else q
