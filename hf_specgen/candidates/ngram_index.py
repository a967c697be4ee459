"""Where did the last n tokens occur before? An incremental index of all n-grams of a text, for n up to a limit.

For each n a dictionary maps an n-gram's hash to the position after its latest occurrence, and a linked list leads from
there to the earlier ones. Appending a token costs one entry per n; a lookup costs one probe per n and a bounded walk,
whatever the length of the text.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np

MULTIPLIER = 0x9E3779B97F4A7C15
MASK = 2**64 - 1
BULK = 256
SEPARATOR = -1
"""A token that is no token: put between texts, so that no match reaches across."""


class NgramIndex:
    """All n-grams of a growing text, `1 <= n <= max_ngram`.

    Args:
        max_ngram: length of the longest match that is looked for.

    Example:
        >>> index = NgramIndex(max_ngram=3)
        >>> index.extend([1, 2, 3, 9, 2, 3])
        >>> list(index.matches([9, 2, 3], min_ngram=1, limit=8))  # (length, where the text went on)
        [(2, 3)]
    """

    def __init__(self, max_ngram: int):
        self.max_ngram = max_ngram
        self.tokens: list[int] = []
        self._latest: list[dict[int, int]] = [{} for _ in range(max_ngram)]
        self._earlier = [array("q") for _ in range(max_ngram)]
        self._levels = list(zip(self._latest, self._earlier, strict=True))

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        if len(tokens) >= BULK:
            self._extend_in_bulk(tokens)
            return
        for token in tokens:
            self._index_end()
            self.tokens.append(token)

    def matches(self, text: Sequence[int], min_ngram: int, limit: int) -> Iterator[tuple[int, int]]:
        """Earlier occurrences of the end of `text`: the longest first, and of each length the most recent first.

        An occurrence counts only if the index's text goes on after it. Each is given once, at its full length.

        Args:
            text: what is looked for; may be the index's own text.
            min_ngram: length of the shortest match.
            limit: how many occurrences are looked at for each length, and given at most. Hash collisions count.

        Yields:
            the length of the match (at most `max_ngram`), and the position in `tokens` of what followed it.
        """
        seen: set[int] = set()
        hashes = _suffix_hashes(text, self.max_ngram)
        for n in range(len(hashes), min_ngram - 1, -1):
            wanted = list(text[-n:])
            position = self._latest[n - 1].get(hashes[n - 1], -1)
            for _ in range(limit):
                if position < 0 or len(seen) == limit:
                    break
                if position not in seen and self.tokens[position - n : position] == wanted:
                    seen.add(position)
                    yield n, position
                position = self._earlier[n - 1][position]

    def _index_end(self) -> None:
        """Enter the n-grams that end where the text ends now: the next token is what follows them."""
        position = len(self.tokens)
        hashes = _suffix_hashes(self.tokens, self.max_ngram)
        for (latest, earlier), key in zip(self._levels, hashes, strict=False):
            earlier.append(latest.get(key, -1))
            latest[key] = position
        for _, earlier in self._levels[len(hashes) :]:
            earlier.append(-1)

    def _extend_in_bulk(self, tokens: Sequence[int]) -> None:
        """The same as one by one, with numpy: a prompt of 100,000 tokens takes a fraction of a second."""
        first = len(self.tokens)
        self.tokens.extend(tokens)
        origin = max(0, first - self.max_ngram)
        text = np.array(self.tokens[origin:], dtype=np.int64).astype(np.uint64)
        positions = np.arange(first, len(self.tokens))
        hashes = np.zeros(len(positions), dtype=np.uint64)
        for n in range(1, self.max_ngram + 1):
            # The same recurrence as in `_suffix_hashes`, for all positions at once; uint64 wraps like MASK.
            hashes = hashes * np.uint64(MULTIPLIER) + text[np.maximum(positions - n - origin, 0)] + np.uint64(1)
            too_early = int(np.searchsorted(positions, n))
            self._earlier[n - 1].extend([-1] * too_early)
            self._enter(n, hashes[too_early:], positions[too_early:])

    def _enter(self, n: int, hashes: np.ndarray, positions: np.ndarray) -> None:
        """Enter the n-grams with these hashes, which end right before `positions`."""
        latest = self._latest[n - 1]
        order = np.argsort(hashes, kind="stable")
        repeats = hashes[order[1:]] == hashes[order[:-1]]
        earlier = np.full(len(positions), -1)
        earlier[order[1:][repeats]] = positions[order[:-1][repeats]]
        keys = hashes.tolist()
        if latest:
            for index in np.flatnonzero(earlier < 0).tolist():
                earlier[index] = latest.get(keys[index], -1)
        self._earlier[n - 1].extend(earlier.tolist())
        latest.update(zip(keys, positions.tolist(), strict=True))


def _suffix_hashes(text: Sequence[int], longest: int) -> list[int]:
    """The hashes of the last 1, 2, … tokens; entry n-1 belongs to the n-gram."""
    hashes: list[int] = []
    value = 0
    for token in reversed(text[-longest:]):
        value = (value * MULTIPLIER + token + 1) & MASK
        hashes.append(value)
    return hashes
