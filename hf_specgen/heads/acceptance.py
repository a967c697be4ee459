"""How often each head's guesses are right, and the tree of guesses that is worth most.

A head that is sure of itself is right more often, so acceptance is kept by confidence: entry `[h][c][r]` is how often
the guess of rank r of head h was right where the head's confidence lay in bin c and the guesses before it were right.
A tree's path is a list of ranks: `[0, 2]` is the best guess of head 0, then the third of head 1. The product of its
entries is how likely it is to be accepted.

Source: Cai et al., "Medusa" (2024), section 2.3.3 (optimised tree construction); choosing by confidence is after
Li et al., "EAGLE-2" (2024), section 4.1.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

Path = tuple[int, ...]
CONFIDENCE_EDGES = (0.2, 0.4, 0.6, 0.8, 0.95)
RANKS = 10


def confidence_bin(confidence: float) -> int:
    """The bin of a head's confidence, from 0 to `len(CONFIDENCE_EDGES)`.

    Example:
        >>> confidence_bin(0.1), confidence_bin(0.99)
        (0, 5)
    """
    return bisect_right(CONFIDENCE_EDGES, confidence)


@dataclass(frozen=True)
class Acceptance:
    """Acceptance by head, confidence and rank.

    Args:
        table: `[heads][bins][ranks]` probabilities.

    Raises:
        ValueError: if the table has another number of bins, or a guess is likelier than one of a better rank.
    """

    table: tuple[tuple[tuple[float, ...], ...], ...]

    def __post_init__(self) -> None:
        for head, bins in enumerate(self.table):
            if len(bins) != len(CONFIDENCE_EDGES) + 1:
                raise ValueError(f"head {head} has {len(bins)} bins of confidence, not {len(CONFIDENCE_EDGES) + 1}")
            if any(list(ranks) != sorted(ranks, reverse=True) for ranks in bins):
                raise ValueError(f"head {head} has a guess that is likelier than one of a better rank")

    @classmethod
    def from_lists(cls, table: Sequence[Sequence[Sequence[float]]]) -> Acceptance:
        """From the lists of a JSON file."""
        return cls(tuple(tuple(tuple(map(float, ranks)) for ranks in bins) for bins in table))

    @classmethod
    def untuned(cls, heads: int) -> Acceptance:
        """What to assume of heads that nobody has measured: a guess is right as often as its head is confident.

        What is left is shared out over the further ranks, each half as likely as the one before (and never likelier);
        every head is 0.8 times as reliable as the one before.
        """
        edges = (0.0, *CONFIDENCE_EDGES, 1.0)
        confidences = [(low + high) / 2 for low, high in pairwise(edges)]
        return cls(
            tuple(
                tuple(
                    tuple(0.8**head * min(c, c if rank == 0 else (1 - c) * 0.5**rank) for rank in range(RANKS))
                    for c in confidences
                )
                for head in range(heads)
            )
        )

    @property
    def heads(self) -> int:
        return len(self.table)

    def cut(self, ranks: int) -> Acceptance:
        """The same for the first ranks only."""
        return Acceptance(tuple(tuple(row[:ranks] for row in bins) for bins in self.table))

    def at(self, bins: Sequence[int]) -> list[tuple[float, ...]]:
        """The probabilities of each head's ranks at the bins that the heads' confidences lie in."""
        return [self.table[head][bin_] for head, bin_ in enumerate(bins)]


def best_tree(
    probabilities: Sequence[Sequence[float]], cost: Callable[[int], float], max_nodes: int
) -> tuple[list[Path], float]:
    """The tree with the most expected tokens per time: grown by the likeliest path, cut where it is worth most.

    Args:
        probabilities: `[heads][ranks]`, falling with the rank.
        cost: time of a step that verifies n nodes, in any unit.
        max_nodes: largest tree.

    Returns:
        its paths, the likeliest first, and how many tokens a step is expected to yield, the target's own included.

    Example:
        >>> best_tree([[0.8, 0.1], [0.5, 0.2]], lambda nodes: 1 + 0.1 * nodes, max_nodes=4)
        ([(0,), (0, 0)], 2.2)
    """
    heap: list[tuple[float, Path]] = [(-probabilities[0][0], (0,))]
    grown: list[Path] = []
    expected, best_size, best_expected = 1.0, 0, 1.0
    while heap and len(grown) < max_nodes:
        negative, path = heapq.heappop(heap)
        grown.append(path)
        expected -= negative
        if expected / cost(len(grown)) > best_expected / cost(best_size):
            best_size, best_expected = len(grown), expected
        last, head = path[-1], len(path) - 1
        if last + 1 < len(probabilities[head]) and (here := probabilities[head][last]) > 0:
            heapq.heappush(heap, (negative / here * probabilities[head][last + 1], (*path[:-1], last + 1)))
        if head + 1 < len(probabilities):
            heapq.heappush(heap, (negative * probabilities[head + 1][0], (*path, 0)))
    return grown[:best_size], round(best_expected, 6)
