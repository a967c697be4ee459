"""Finds earlier occurrences of the last tokens of a text: hash chains over a growing text.

For each of a few n-gram lengths, a table maps the hash of an n-gram to where it ended last, and a link leads from every
position to the one before it with the same hash: the structure by which LZ77 compressors find repetitions. A lookup
visits a bounded number of positions and compares tokens there, so a collision of hashes is never taken for a match.

Source: Ziv and Lempel, "A Universal Algorithm for Sequential Data Compression" (1977); Deutsch, RFC 1951 (1996),
section 4, for hash chains that are abandoned after a number of links.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

MAX_MATCH_LENGTH = 64  # tokens that are compared at most; drafts after longer matches are accepted as often
ORDERS = (1, 2, 4, 8)
"""Lengths of the n-grams that are indexed, each twice the one before; any other match contains one of them."""
CONTEXT = ORDERS[-1] - 1  # tokens before a token that its n-grams contain
SEPARATOR = -1  # marker between texts, which is no token id, so that no match spans two texts
MIN_CAPACITY = 1023  # tokens that the first arrays can hold
MAX_BATCH = 2**16  # tokens that are indexed at once, which bounds the memory of intermediate arrays
BASE = 0x9E3779B1
"""Base of the polynomial hash: a prime close to the golden ratio of 2^32, so that close tokens get distant hashes."""
POWERS = np.array(
    [[pow(BASE, back, 2**64) if back < order else 0 for order in ORDERS] for back in range(CONTEXT, -1, -1)], np.uint64
)
"""`[CONTEXT + 1, levels]` weights of the last tokens in the hash of the n-gram of each level."""
LEVELS = np.arange(len(ORDERS))
MAX_SKIPPED = 3
"""New tokens that are not in the copied text, after which copying may still resume behind the last token copied."""


class NgramIndex:
    """An index of the n-grams of one text, `tokens`.

    Example:
        >>> index = NgramIndex([1, 2, 3, 9, 2, 3, 7, 2, 3])
        >>> index.occurrences([7, 2, 3], limit=8)  # by the position of what followed: the length of the match
        {6: 2, 3: 2}
    """

    def __init__(self, tokens: Sequence[int] = ()):
        self.tokens = array("i")
        self.max_token = -1
        self._allocate(0)
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        first = len(self.tokens)
        self.tokens.extend(tokens)
        self.max_token = max(self.max_token, max(tokens, default=-1))
        end = len(self.tokens)
        if end > self._capacity:
            self._allocate(end)
            first = 0
        for begin in range(first, end, MAX_BATCH):
            self._add_ngrams(begin, min(end, begin + MAX_BATCH))

    def occurrences(self, tail: Sequence[int], limit: int) -> dict[int, int]:
        """Where the end of a text occurs in this one: the position after each occurrence, and the length of its match.

        Occurrences of the longest indexed n-grams come first, of these the most recent.
        """
        tokens = self.tokens
        heads = self._heads
        links = self._links
        end = len(tokens)
        backwards = array("i", tail[-MAX_MATCH_LENGTH:])[::-1]
        matches: dict[int, int] = {}
        [buckets] = self._buckets(_padded(backwards[CONTEXT::-1], CONTEXT + 1)[None]).tolist()
        for order, bucket in zip(reversed(ORDERS), reversed(buckets), strict=True):
            entry = heads[bucket]
            for _ in range(limit + 1):  # one of the visits may be the end of the text itself, which no token follows
                if not entry or len(matches) == limit:
                    break
                following = (entry - 1) // len(ORDERS) + 1
                if following < end and following not in matches:
                    before = tokens[max(0, following - len(backwards)) : following][::-1]
                    length = common_length(before, backwards)
                    if length >= order:
                        matches[following] = length
                entry = links[entry - 1]
        return matches

    def _allocate(self, length: int) -> None:
        """Make empty tables and links for twice a text."""
        self._capacity = max(MIN_CAPACITY, 2 * length + 1)  # odd, so that all bits of a hash count
        empty = bytes(array("i").itemsize * len(ORDERS) * self._capacity)
        self._heads = array("i", empty)
        self._links = array("i", empty)

    def _add_ngrams(self, first: int, end: int) -> None:
        """Add the n-grams that end at the positions `first` to `end - 1` of the text to tables and links.

        The n-gram of a level that ends with token i is entry 4 * i + level + 1; 0 is none.
        """
        heads = np.frombuffer(self._heads, np.int32)
        links = np.frombuffer(self._links, np.int32)
        padded = _padded(self.tokens[max(0, first - CONTEXT) : end], CONTEXT + end - first)
        windows = padded[np.arange(end - first)[:, None] + np.arange(CONTEXT + 1)]
        buckets = self._buckets(windows).ravel()
        # Entries of one bucket side by side, in the order of the text.
        order = np.argsort(buckets, kind="stable")
        buckets = buckets[order]
        entries = (order + (len(ORDERS) * first + 1)).astype(np.int32)
        # Each links to the one before it in its bucket, the first of them to what was the last of the bucket until now.
        previous = heads[buckets]
        is_same = buckets[1:] == buckets[:-1]
        previous[1:][is_same] = entries[:-1][is_same]
        links[entries - 1] = previous
        heads[buckets] = entries  # the last one of each bucket stays

    def _buckets(self, windows: NDArray[np.uint64]) -> NDArray[np.int64]:
        """`[n, levels]` indices into the tables, of the n-grams at the ends of windows of `[n, CONTEXT + 1]` tokens."""
        return (windows @ POWERS % np.uint64(self._capacity)).astype(np.int64) + self._capacity * LEVELS


@dataclass
class CopySource:
    """A text in the index of a row that tokens are copied from: an expected output, or the row's own text."""

    kind: int  # of occurrences close to the position
    first: int  # where the text begins
    end: float = inf  # and ends
    position: int = -1  # that after the token that was copied last, -1 for none
    skipped: int = 0  # the differing tokens that were appended since

    def is_near(self, position: int) -> bool:
        """Whether a position is at, or shortly after, the one that was copied from last."""
        return 0 <= self.position <= position < min(self.position + 33, self.end)

    def resumed(self) -> list[int]:
        """Positions at which copying continues, begins, or resumes after a few tokens were replaced or inserted."""
        if self.position < 0 or self.skipped > MAX_SKIPPED:
            return []
        return [position for position in (self.position + self.skipped, self.position) if position < self.end]

    def follow(self, tokens: Sequence[int], text: Sequence[int], matches: Mapping[int, int]) -> None:
        """Move to the occurrence that begins with most of the new tokens, the nearest one if several do.

        `matches` of the end of the row's text have the length of each by its position.
        """
        matches_in_source = {at: length for at, length in matches.items() if self.first <= at < self.end}
        lengths = dict.fromkeys(self.resumed(), 0) | matches_in_source
        # A match of a single token counts only near the position that was copied from last.
        positions = [at for at, length in lengths.items() if length != 1 or self.is_near(at)]
        copied = {at: common_length(text[at : at + len(tokens)], tokens) for at in positions}  # tokens from there on
        best = max(positions, key=lambda at: (copied[at], self.is_near(at), lengths[at], at), default=-1)
        if best >= 0 and copied[best]:
            self.position = best + copied[best]
            self.skipped = len(tokens) - copied[best]
        else:
            self.skipped += len(tokens)


def _padded(tokens: Sequence[int], length: int) -> NDArray[np.uint64]:
    """`[length]` tokens as positive numbers, the separator (-1) too, after zeros if there are fewer tokens."""
    padded = np.zeros(length, dtype=np.int64)
    padded[length - len(tokens) :] = tokens
    padded[length - len(tokens) :] += 2
    return padded.view(np.uint64)


def common_length(first_text: Sequence[int], second_text: Sequence[int]) -> int:
    """How many tokens at the beginning of two texts are equal."""
    length = 0
    for first, second in zip(first_text, second_text, strict=False):
        if first != second:
            break
        length += 1
    return length
