"""Rejection sampling: the text has the target's distribution, but is not the one that plain `generate` would draw.

A guess that was drawn from q is accepted with probability min(1, p/q). If it is rejected, what p has in excess of q
takes the place of p: max(0, p - q), normalised. Accepted or not, the token then has distribution p, and the guess was
accepted with probability sum_v min(p_v, q_v), the most that any lossless mode without knowledge of q's noise can reach.
With several siblings, each is judged by what its elder ones left of p, and q loses the tokens that were drawn before.

Sources: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), section 2.3; Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling" (2023); for siblings Miao et al., "SpecInfer"
(2023), section 4.3, and Jeon et al., "Recursive Speculative Decoding" (2024), without replacement.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_specgen.state import GenerationState
from hf_specgen.tree import DraftTree
from hf_specgen.verification.base import Verifier
from hf_specgen.verification.processors import LogitsPipeline
from hf_specgen.verification.sampling import DraftSampler, exponential, exponential_race
from hf_specgen.verification.siblings import child_table, tokens_of


class RejectionVerifier(Verifier):
    """Accepts with min(1, p/q): the distribution of plain `generate`, though not the text of its seed. Lossless.

    For drafts that carry `DraftTree.q`; one that was guessed without chance is accepted with p. Greedy, it is the same
    as the coupled mode.
    """

    def begin(self, scorer: LogitsPipeline, sequences: GenerationState, do_sample: bool, keep_scores: bool) -> None:
        super().begin(scorer, sequences, do_sample, keep_scores)
        self._drafts = DraftSampler() if do_sample else None

    @property
    def wants_q(self) -> bool:
        return self.do_sample

    def draft_weights(self, scores: torch.Tensor, steps: Sequence[Sequence[int]]) -> torch.Tensor:
        """A race of the draft's own: its winners, best first, are drawn from `softmax(scores)` without replacement."""
        return self._drafts.weights(scores) if self._drafts else super().draft_weights(scores, steps)

    def choose(
        self, scores: torch.Tensor, steps: Sequence[Sequence[int]], tree: DraftTree, nodes: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        if not self.do_sample:
            return scores.argmax(dim=-1)
        device, (batch, _, vocab) = scores.device, scores.shape
        table = child_table(tree, nodes, device)
        q = None if tree.q is None else _fit(tree.q, vocab).to(device, torch.float32)
        uniforms = torch.rand(table.shape, device=device)
        accepted, rest = judge(scores.softmax(dim=-1), q, table, tokens_of(tree, table), uniforms)
        # One noise for all slots of a row: only the last slot of its accepted path uses it, and which one that is
        # depends on the uniforms alone. (No slot's `rest` has any of its guesses, so the path cannot go on from there.)
        return torch.where(accepted >= 0, accepted, exponential_race(rest, exponential((batch, 1, vocab), device)))


def judge(
    p: torch.Tensor, q: torch.Tensor | None, table: torch.Tensor, tokens: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept or reject the guesses at every slot, elder siblings first.

    Args:
        p: `[batch, slots, vocab]` of the target.
        q: `[batch, nodes, vocab]` of the draft; None if nothing was left to chance.
        table: `[batch, slots, siblings]` nodes that continue each slot, -1 for none.
        tokens: those nodes' tokens, -1 for none.
        uniforms: as many numbers in [0, 1).

    Returns:
        `[batch, slots]` the accepted token, or -1; and `[batch, slots, vocab]` what to draw from where none was.
    """
    accepted = torch.full(table.shape[:2], -1, device=p.device)
    for rank in range(table.shape[2]):
        node, token, uniform = table[..., rank], tokens[..., rank], uniforms[..., rank]
        index = token.clamp(min=0).unsqueeze(-1)
        drawn_from = draft_distribution(q, node, index, tokens[..., :rank], p)
        excess = residual(p, drawn_from)
        mass = excess.sum(dim=-1)
        p_token, q_token = p.gather(-1, index)[..., 0], drawn_from.gather(-1, index)[..., 0]
        # No mass means p = q, and then a rejection could only come from rounding.
        stands = (uniform * q_token < p_token) | (mass <= 0)
        judged = (token >= 0) & (accepted < 0)
        accepted = torch.where(judged & stands, token, accepted)
        p = torch.where((judged & ~stands).unsqueeze(-1), excess / mass.unsqueeze(-1), p)
    return accepted, p


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """What p has in excess of q; zero at a rejected token, which had p <= q."""
    return (p - q).clamp_(min=0)


def draft_distribution(
    q: torch.Tensor | None, node: torch.Tensor, token: torch.Tensor, elder: torch.Tensor, p: torch.Tensor
) -> torch.Tensor:
    """`[batch, slots, vocab]` what each slot's guess was drawn from: q without the elder siblings' tokens.

    A guess that cannot have been drawn from there was not left to chance: a point mass.
    """
    point_mass = torch.zeros_like(p).scatter_(-1, token, 1.0)
    if q is None:
        return point_mass
    rows = torch.arange(len(q), device=q.device).unsqueeze(-1)
    left = q[rows, node.clamp(min=0)]  # a copy
    if elder.shape[-1]:
        left = left.scatter_(-1, elder.clamp(min=0), 0.0)
        left = left / left.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(left.dtype).tiny)
    return torch.where(left.gather(-1, token) > 0, left, point_mass)


def _fit(q: torch.Tensor, vocab: int) -> torch.Tensor:
    if q.shape[-1] > vocab:
        raise ValueError(
            f"the draft's q has {q.shape[-1]} tokens, the target has {vocab}; cut the draft's scores before the softmax"
        )
    return torch.nn.functional.pad(q, (0, vocab - q.shape[-1])) if q.shape[-1] < vocab else q
