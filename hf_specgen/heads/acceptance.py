"""Acceptance rates of Medusa heads by confidence and rank: the prior by which draft trees are built.

Tokens of a head are accepted more often when its confidence (the probability of its most likely token) is high, so
acceptance is kept by confidence: entry `[h][c][r]` is the share of steps in which the token of rank r of head h was
accepted, of those in which the head's confidence was in bin c and the tokens before it were accepted.

Source: Cai et al., "Medusa" (2024), section 2.3.3 (acceptance by rank); Li et al., "EAGLE-2" (2024), section 4.1
(acceptance by confidence).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

CONFIDENCE_EDGES = (0.2, 0.4, 0.6, 0.8, 0.95)
"""Probabilities between the bins of confidence."""
RANKS = 10
"""Tokens of each head that are counted: the tenth of head 0 of the embedded heads is accepted in about 1% of steps."""
HEAD_DECAY = 0.8
"""Assumed acceptance of each head relative to the one before."""


def confidence_bin(confidence: float) -> int:
    """The bin of a head's confidence, from 0 to `len(CONFIDENCE_EDGES)`.

    Example:
        >>> confidence_bin(0.1), confidence_bin(0.99)
        (0, 5)
    """
    return bisect_right(CONFIDENCE_EDGES, confidence)


@dataclass(frozen=True)
class Acceptance:
    """Acceptance rates by head, confidence and rank.

    Args:
        table: `[heads][bins][ranks]` probabilities.

    Raises:
        ValueError: if the table has another number of bins, or the entries of a bin are not probabilities that fall
            with the rank.
    """

    table: tuple[tuple[tuple[float, ...], ...], ...]

    def __post_init__(self) -> None:
        for head, bins in enumerate(self.table):
            if len(bins) != len(CONFIDENCE_EDGES) + 1:
                raise ValueError(f"head {head} has {len(bins)} bins of confidence, not {len(CONFIDENCE_EDGES) + 1}")
            for ranks in bins:
                if not ranks or not all(0 <= later <= earlier <= 1 for earlier, later in pairwise((1.0, *ranks))):
                    raise ValueError(f"head {head}: acceptance must fall with the rank, from 1 to 0, got {ranks}")

    @classmethod
    def from_lists(cls, table: Sequence[Sequence[Sequence[float]]]) -> Acceptance:
        """From the lists of a JSON file.

        Raises:
            ValueError: if they are not nested lists of numbers, or as for `Acceptance`.
        """
        try:
            return cls(tuple(tuple(tuple(map(float, ranks)) for ranks in bins) for bins in table))
        except TypeError:
            raise ValueError(f"acceptance must be lists [heads][bins][ranks] of numbers, got {table!r:.80}") from None

    @classmethod
    def untuned(cls, heads: int) -> Acceptance:
        """The assumption for heads that were not measured: rank 0 is accepted with the confidence as probability.

        Rank r > 0 is accepted with (1 - confidence) / 2^r, but no more than rank 0; every head is accepted `HEAD_DECAY`
        times as often as the one before.
        """
        edges = (0.0, *CONFIDENCE_EDGES, 1.0)
        confidences = [(low + high) / 2 for low, high in pairwise(edges)]
        return cls(
            tuple(
                tuple(
                    tuple(HEAD_DECAY**head * min(c, c if rank == 0 else (1 - c) * 0.5**rank) for rank in range(RANKS))
                    for c in confidences
                )
                for head in range(heads)
            )
        )

    @property
    def heads(self) -> int:
        """Number of heads."""
        return len(self.table)

    def cut(self, ranks: int) -> Acceptance:
        """The same table, reduced to the first `ranks` ranks."""
        return Acceptance(tuple(tuple(row[:ranks] for row in bins) for bins in self.table))
