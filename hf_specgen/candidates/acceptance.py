"""Acceptance: a drafter's probability of a token is taken for the probability that the target accepts it.

With samples it is the softmax of `VerificationSession.draft_scores`.
"""

from __future__ import annotations

import torch

MAX_PROBABILITY = 0.999
"""Limit of an acceptance probability on the host: every node is strictly less likely than its parent."""


def finite(scores: torch.Tensor) -> torch.Tensor:
    """A drafter's logits without NaN and infinity, which rejection sampling and some logits processors refuse.

    Elsewhere they pass: candidates without a probability are no nodes of a tree.
    """
    return scores.nan_to_num(-1e20, 1e20, -1e20)


def confidence_by_rank(largest: torch.Tensor, ranks: int) -> torch.Tensor:
    """`[…]` largest probabilities of distributions to `[…, ranks]` confidences in samples drawn from them.

    In rejection sampling a node must not be left out because of its token, only because of its rank: otherwise the
    sampled tokens would not have the distribution q.
    """
    rest = 1 - largest.clamp(max=0.95)
    return largest[..., None] * rest[..., None] ** torch.arange(ranks, device=largest.device)
