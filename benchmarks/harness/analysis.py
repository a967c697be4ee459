"""Analysis of speculative decoding: expected tokens per step, expected speedup, optimal draft length.

All of them depend on alpha, the probability that a draft token is accepted, given that all draft tokens before it were.
Leviathan et al. assume the same alpha at every position; measured acceptance by position may be given instead
(`Statistics.acceptance_rate_per_position`).

Sources: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), section 3.1, equation 1
(expected tokens), theorem 3.8 (speedup), section 3.5 (best draft length); Chen et al., "Sequoia" (2024), section 3.2
(a verification cost that grows with the number of tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_specgen.counters import Statistics

Acceptance = float | Sequence[float]
Cost = Callable[[int], float]


def free_verification(queries: int) -> float:
    """The cost curve that Leviathan et al. assume: verifying any number of tokens takes as long as one."""
    return 1.0


def expected_accepted(acceptance: Acceptance, k: int) -> float:
    """Expected number of accepted tokens in a draft of k, without the bonus token (equation 1).

    Example:
        >>> expected_accepted(0.5, 3), expected_accepted([0.8, 0.5, 0.4], 2)
        (0.875, 1.3)
    """
    if k < 0:
        raise ValueError(f"k must be at least 0, got {k}")
    shares = acceptance if isinstance(acceptance, Sequence) else [acceptance**position for position in range(1, k + 1)]
    for value in shares if isinstance(acceptance, Sequence) else [acceptance]:
        if not 0 <= value <= 1:
            raise ValueError(f"acceptance must be between 0 and 1, got {value}")
    if any(later > earlier for earlier, later in pairwise(shares)):
        raise ValueError(
            "acceptance by position must not increase, as a position is accepted only with all before it; "
            f"got {list(shares)}"
        )
    if k > len(shares):
        raise ValueError(f"acceptance is given for {len(shares)} positions, but k is {k}")
    return float(sum(shares[:k]))


def expected_speedup(
    acceptance: Acceptance, k: int, cost: Cost = free_verification, draft_cost: float = 0.0, overhead: float = 0.0
) -> float:
    """Expected tokens per second relative to plain decoding, if every step drafts k tokens (theorem 3.8).

        (1 + expected_accepted) T(1) / (T(k + 1) + k draft_cost + overhead)

    Args:
        acceptance, k: as for `expected_accepted`.
        cost: T(q), the time of a target pass over q tokens, such as a measured `CostCurve`.
        draft_cost, overhead: time to draft one token, and further time of a speculative step, in the unit of `cost`.

    Example:
        >>> round(expected_speedup(0.8, 5, draft_cost=0.05), 3)
        2.951
    """
    tokens = 1 + expected_accepted(acceptance, k)
    return tokens * cost(1) / (cost(k + 1) + k * draft_cost + overhead)


def optimal_k(
    acceptance: Acceptance,
    cost: Cost = free_verification,
    draft_cost: float = 0.0,
    overhead: float = 0.0,
    max_k: int = 64,
) -> int:
    """The draft length with the highest expected speedup, 0 if no draft is faster (section 3.5).

    Example:
        >>> optimal_k(0.8, draft_cost=0.1), optimal_k(0.05, draft_cost=0.1)
        (6, 0)
    """
    longest = min(max_k, len(acceptance)) if isinstance(acceptance, Sequence) else max_k

    def speedup(k: int) -> float:
        return expected_speedup(acceptance, k, cost, draft_cost, overhead if k else 0.0)

    return max(range(longest + 1), key=lambda k: (speedup(k), -k))


def speedup_limit(tokens_per_step: float, verification: float, drafting: float, plain_token: float) -> float:
    """The speedup if a step took only the time of its draft and of the target's forward pass.

    Example:
        >>> speedup_limit(2.0, verification=0.012, drafting=0.004, plain_token=0.010)
        1.25
    """
    return tokens_per_step * plain_token / (verification + drafting)


def estimated_alpha(statistics: Statistics) -> float:
    """Maximum-likelihood estimate of alpha for chains: accepted / (accepted + rejections); 0 without any trial.

    Draft tokens after the first rejected one are never verified, so accepted / drafted underestimates alpha. Drafts
    that were fully accepted, or cut off by a stop, contain no rejection.

    Example:
        >>> from hf_specgen.counters import RowStep, Statistics
        >>> estimated_alpha(Statistics([[RowStep(3, 3, 3, 4), RowStep(3, 3, 1, 2)]]))  # 4 accepted, 1 rejection
        0.8
    """
    steps = [step for row in statistics.rows for step in row]
    rejections = sum(step.accepted < step.depth and step.emitted > step.accepted for step in steps)
    tried = statistics.accepted + rejections
    return statistics.accepted / tried if tried else 0.0
