"""Finds earlier occurrences of the last tokens of a text: hash chains over a growing or a bounded text.

For each of a few n-gram lengths, a table maps the hash of an n-gram to where it ended last, and a link leads from every
position to the one before it with the same hash: the structure by which LZ77 compressors find repetitions. Tables,
links and a bounded text lie in flat arrays of 32-bit integers, 36 bytes a token, and a bounded text overwrites its
oldest tokens in place. A text without limit is a list, whose tokens Python reads in a quarter of the time.
Adding a token costs one entry for each length; a lookup visits a bounded number of positions and compares tokens there,
so that a collision of hashes is never taken for a match.

Source: Ziv and Lempel, "A Universal Algorithm for Sequential Data Compression" (1977); Deutsch, RFC 1951 (1996),
section 4, for hash chains that are abandoned after a number of links.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from hf_specgen.candidates.ngram_match import MAX_MATCH_LENGTH, NO_OCCURRENCES, Chain, compare, repeated_end

ORDERS = (1, 2, 4, 8)
"""Lengths of the n-grams that are indexed; a match of any other length contains one of them."""
SEPARATOR = -1
"""Marker between texts, which is no token id, so that no match spans two texts."""
MIN_BULK_TOKENS = 64
"""From this number of tokens on, numpy indexes them faster than one by one."""
INITIAL_CAPACITY = 1024
"""Tokens that the arrays of a text without limit hold at first; they grow by doubling."""
BASE = 0x9E3779B1
"""Base of the polynomial hash: a prime close to the golden ratio of 2^32, so that close tokens get distant hashes."""
POWERS = tuple(pow(BASE, exponent, 2**32) for exponent in range(ORDERS[-1]))
"""A hash is the sum of at most eight tokens, each plus two, times these: below 2^64, as numpy's integers require."""
OFFSETS = tuple((order - 1, 2 * sum(POWERS[:order])) for order in ORDERS)
"""For each order, the index of its last token, and the part of the hash that comes from the two added to each token."""
RANGES = tuple(range(shorter, order) for shorter, order in zip((0, *ORDERS), ORDERS, strict=False))
"""For each order, which tokens, counted back from the last, its n-grams have beyond those of the previous order."""


class NgramIndex:
    """An index of the n-grams of one text.

    Args:
        max_tokens: further tokens overwrite the oldest ones; None for a text without limit.

    Attributes:
        tokens: the text; a ring buffer if it is bounded. No match spans the end of the buffer, nor `end`.
        end: the index of the next token in `tokens`, which is longer than the text.

    Example:
        >>> index = NgramIndex()
        >>> index.extend([1, 2, 3, 9, 2, 3, 7, 2, 3])
        >>> index.occurrences([7, 2, 3], limit=8)  # by the position of what followed: the length of the match
        {6: 2, 3: 2}
    """

    tokens: list[int] | array[int]
    _links: list[memoryview]
    _heads: list[memoryview]
    _levels: tuple[tuple[int, memoryview, memoryview, tuple[tuple[int, int], ...]], ...]

    def __init__(self, max_tokens: int | None = None):
        self._max_tokens = max_tokens
        self.end = self._length = 0
        self._allocate(INITIAL_CAPACITY if max_tokens is None else max_tokens)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles hold the arrays behind the views."""
        arrays = [np.asarray(view) for view in (*self._links, *self._heads)]
        rest = (self._max_tokens, self.end, self._length, self._capacity)
        return {"tokens": self.tokens[:], "arrays": arrays, "rest": rest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._max_tokens, self.end, self._length, self._capacity = state["rest"]
        self.tokens = state["tokens"]
        self._set_views([array.copy().data for array in state["arrays"]])

    def __len__(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        """Memory of text, tables and links; a list holds a pointer for each token."""
        itemsize = self.tokens.itemsize if isinstance(self.tokens, array) else array("P").itemsize
        return itemsize * len(self.tokens) + sum(view.nbytes for view in (*self._links, *self._heads))

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        first = 0
        while first < len(tokens):
            if self.end == self._capacity:
                self._make_room(len(tokens) - first)
            part = tokens[first : first + self._capacity - self.end]
            if len(part) >= MIN_BULK_TOKENS:
                self._append_in_bulk(part)
            else:
                self._append(part)
            first += len(part)
            if self._length < self.end:
                self._length = self.end

    def occurrences(
        self, tail: Sequence[int], limit: int, known: Mapping[int, int] = NO_OCCURRENCES, grown: int = 0
    ) -> dict[int, int]:
        """Where the end of a text occurs in this one: the longest indexed n-grams first, and then the most recent.

        Args:
            tail: the last tokens of the text whose end is looked up, which may be this text.
            limit: maximum number of occurrences that are returned, and that are visited for each n-gram length.
            known: what was returned before the last `grown` tokens of `tail` were appended: match lengths grow from
                there instead of being compared anew.
            grown: number of tokens.

        Returns:
            by the position of the token that followed, the length of the match, at most `MAX_MATCH_LENGTH`.
        """
        tail = list(tail[-MAX_MATCH_LENGTH:])
        starts = [heads[value % self._capacity] for heads, value in zip(self._heads, _hashes(tail[::-1]), strict=False)]
        # One of the visits may be the end of the text itself, after which there is no token.
        chains = self._chains(starts, limit + 1)
        return compare(self.tokens, self.end, tail, chains, limit, known, grown)

    def repetitions(self, limit: int, known: Mapping[int, int] = NO_OCCURRENCES, grown: int = 0) -> dict[int, int]:
        """What `occurrences` returns for the end of this text, which has no limit: links lead there, without hashes."""
        return repeated_end(cast("list[int]", self.tokens), self.end, self._longest_first, limit, known, grown)

    def _chains(self, starts: Sequence[int], visits: int) -> Iterator[Chain]:
        """The positions after n-grams with the same hash, by the length of the n-grams, longest first.

        Args:
            starts: the most recent position for each length.
            visits: maximum number of positions for each length.
        """
        end, capacity, is_ring = self.end, self._capacity, self._max_tokens is not None
        for level in range(len(starts) - 1, -1, -1):
            links, following, age = self._links[level], starts[level], -1
            positions: list[int] = []
            for _ in range(visits):
                if is_ring:  # a link to a token that has been overwritten since leads forward in the text
                    if (end - following) % capacity <= age:
                        following = 0
                    age = (end - following) % capacity
                if not following:
                    break
                positions.append(following)
                following = links[following - 1]
            if is_ring and capacity in positions:  # no token follows the last one of the array
                positions.remove(capacity)
            if positions and positions[0] == end:
                del positions[0]
            yield ORDERS[level], positions, not following

    def _append(self, tokens: Sequence[int]) -> None:
        """Append tokens one by one; there is room for them."""
        text, end, capacity, levels = self.tokens, self.end, self._capacity, self._levels
        for token in tokens:
            text[end] = token
            value = 0
            for order, links, heads, added in levels:
                if order > end + 1:
                    links[end] = 0
                    continue
                for back, power in added:
                    value += (text[end - back] + 2) * power
                bucket = value % capacity
                links[end] = heads[bucket]
                heads[bucket] = end + 1
            end += 1
        self.end = end

    def _append_in_bulk(self, part: Sequence[int]) -> None:
        """The same as one by one, with numpy: a prompt of 100,000 tokens takes some hundredths of a second."""
        first, end = self.end, self.end + len(part)
        if isinstance(self.tokens, array):
            self.tokens[first:end] = array("i", part)
        else:
            self.tokens[first:end] = part
        origin = max(0, first - ORDERS[-1] + 1)
        values = (np.array(self.tokens[origin:end], dtype=np.int64) + 2).astype(np.uint64)
        hashes = np.zeros(len(values), dtype=np.uint64)
        for order, links, heads, added in self._levels:
            for back, power in added:
                hashes[back:] += values[: max(0, len(values) - back)] * np.uint64(power)
            begin = max(first, order - 1)
            np.frombuffer(links, dtype=np.int32)[first:begin] = 0
            if begin < end:
                _enter(hashes[begin - origin :], begin, links, heads)
        self.end = end

    def _make_room(self, wanted: int) -> None:
        """At the end of the buffer: continue at its beginning, or double it."""
        if self._max_tokens is not None:
            self.end = 0
            return
        text = self.tokens[: self.end]
        self._allocate(2 * (self.end + wanted))
        self.end = 0
        self._append_in_bulk(text)

    def _allocate(self, capacity: int) -> None:
        """An n-gram is stored as the position that followed it: zeros, which take no memory yet, stand for none."""
        self._capacity = capacity
        self.tokens = [0] * capacity if self._max_tokens is None else array("i", bytes(array("i").itemsize * capacity))
        self._set_views([np.zeros(capacity, dtype=np.int32).data for _ in range(2 * len(ORDERS))])

    def _set_views(self, views: list[memoryview]) -> None:
        self._links, self._heads = views[: len(ORDERS)], views[len(ORDERS) :]
        terms = [tuple((back, POWERS[back]) for back in added) for added in RANGES]
        self._levels = tuple(zip(ORDERS, self._links, self._heads, terms, strict=True))
        self._longest_first = tuple(zip(ORDERS, self._links, strict=True))[::-1]


def _hashes(backwards: Sequence[int]) -> list[int]:
    """The hashes of the last n-grams, in the order of `ORDERS`; fewer of a short text, which is given backwards."""
    sums = list(accumulate(map(mul, backwards, POWERS)))
    return [sums[last] + offset for last, offset in OFFSETS if last < len(sums)]


def _enter(hashes: NDArray[np.uint64], first: int, links: memoryview, heads: memoryview) -> None:
    """Add n-grams to one table, given by their hashes; they end at the positions from `first` on."""
    link, head = np.frombuffer(links, dtype=np.int32), np.frombuffer(heads, dtype=np.int32)
    buckets = (hashes % np.uint64(len(head))).astype(np.int64)
    order = np.argsort(buckets, kind="stable")
    ordered, places = buckets[order], (order + first + 1).astype(np.int32)
    begins = np.ones(len(ordered), dtype=bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    before = np.empty(len(ordered), dtype=np.int32)
    before[1:] = places[:-1]
    before[begins] = head[ordered[begins]]
    link[places - 1] = before
    ends = np.roll(begins, -1)  # the last of each bucket comes before the first of the next
    head[ordered[ends]] = places[ends]
