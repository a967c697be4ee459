"""The most frequent tokens of a growing text, and what followed them: proposed where no occurrence is found."""

from __future__ import annotations

from collections import Counter
from heapq import nsmallest

from hf_specgen.candidates.ngram_index import NgramIndex
from hf_specgen.candidates.ngram_odds import OWN
from hf_specgen.candidates.ngram_votes import Occurrence

FREQUENT_TOKENS, FREQUENT_OCCURRENCES = 24, 4
"""How many of the most frequent tokens are proposed, and how many occurrences vote on what follows each of them."""
RECOUNT_EVERY = 32
"""Tokens between counts of the most frequent ones."""


class FrequentTokens:
    """The most frequent tokens of one text, as they were at the last count.

    Args:
        index: of the text, which is not bounded.

    Example:
        >>> index = NgramIndex()
        >>> index.extend([5, 6, 7, 6])
        >>> FrequentTokens(index).shares()
        [(6, 0.5), (5, 0.25), (7, 0.25)]
    """

    def __init__(self, index: NgramIndex):
        self._index = index
        self._counts: Counter[int] = Counter()
        self._rank: dict[int, int] = {}  # of each token, in the order of first appearance
        self._counted = self._next_count = 0
        self._shares: list[tuple[int, float]] = []
        self._following: dict[int, list[Occurrence]] = {}

    def shares(self) -> list[tuple[int, float]]:
        """The tokens and their shares of the text, the most frequent first and of equally frequent ones the older."""
        if len(self._index) >= self._next_count:
            self._count()
        return self._shares

    def occurrences(self, token: int) -> list[Occurrence]:
        """Occurrences of one of the tokens, as they were at the last count.

        Their positions are those of the token itself, one before the token that followed, since it is at depth 1.
        """
        if token not in self._following:
            text, end = self._index.tokens, self._index.end
            found = self._index.occurrences([token], FREQUENT_OCCURRENCES)
            self._following[token] = [(text, end, position - 1, 0, OWN) for position in found]
        return self._following[token]

    def _count(self) -> None:
        """Count the tokens since the last count: only they and the most frequent ones so far can be the next ones."""
        counts, rank, length = self._counts, self._rank, len(self._index)
        new = Counter(self._index.tokens[self._counted : length])
        counts.update(new)
        for token in new:
            rank.setdefault(token, len(rank))
        candidates = {*new, *(token for token, _ in self._shares)}
        best = nsmallest(FREQUENT_TOKENS, candidates, key=lambda token: (-counts[token], rank[token]))
        self._shares = [(token, counts[token] / length) for token in best]
        self._counted, self._next_count = length, length + RECOUNT_EVERY
        self._following.clear()
