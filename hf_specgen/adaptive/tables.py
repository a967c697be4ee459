"""What was measured of steps, kept per model: tables of times, and what is made of them where nothing was measured."""

from __future__ import annotations

from collections import deque
from math import log2
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from hf_specgen.adaptive.chances import Array
from hf_specgen.adaptive.draft_times import KEPT, Curve, DraftTimes, typical

STALE = 64
"""After so many others, the earlier measurements of a size count as one."""
VERIFY_SLOPE, DRAFT_SLOPE = 0.03, 0.1


class Table:
    """Times at some sizes; elsewhere the shape of `prior`, scaled to what was measured nearby.

    Args:
        prior: seconds, or any multiple of them, for increasing sizes.
        trusted: whether it is seconds, and known well enough to outvote the first two measurements of a size: one
            that was disturbed would otherwise decide alone what a plain step takes.

    Example:
        >>> table = Table(lambda sizes: 1 + 0.1 * sizes)
        >>> table.add(10, 0.4)
        >>> table(np.array([10.0, 20.0])).round(2).tolist()
        [0.4, 0.6]
    """

    def __init__(self, prior: Curve, *, trusted: bool = False):
        self._prior, self._trusted = prior, trusted
        self._times: dict[int, deque[float]] = {}
        self._first: set[int] = set()
        self._added: dict[int, int] = {}
        self._count = 0
        self._changed = False
        self._sizes, self._ratios = np.empty(0), np.empty(0)

    def add(self, size: int, seconds: float) -> None:
        """Enter a measurement. The first of a size, in which kernels are prepared, gives way to the second."""
        self._count += 1
        times = self._times.get(size)
        if times is None:
            times = self._times[size] = deque(maxlen=KEPT)
            self._first.add(size)
        elif size in self._first:
            self._first.remove(size)
            times.clear()
        elif self._count - self._added[size] > STALE:
            earlier = typical(times)
            times.clear()
            times.append(earlier)
        times.append(seconds)
        self._added[size] = self._count
        self._changed = True

    def knows(self, size: int) -> bool:
        """Whether a size was measured, and not for the first time just now."""
        return size in self._times and size not in self._first

    def smallest(self) -> float:
        """The smallest size that it knows."""
        return min(self._times.keys() - self._first, default=float("inf"))

    def age(self, size: int) -> int:
        """How many measurements were entered since the last of this size."""
        return self._count - self._added.get(size, 0)

    def __len__(self) -> int:
        return len(self._times)

    def __call__(self, sizes: Array) -> Array:
        shape = self._prior(sizes)
        if not self._times:
            return shape
        if self._changed:
            self._sizes = np.array(sorted(self._times), dtype=float)
            self._changed = False
            believed = self._prior(self._sizes)
            votes = believed.tolist() if self._trusted else []
            measured = [self._times[int(size)] for size in self._sizes]
            medians = [typical([*times, *2 * votes[i : i + 1]]) for i, times in enumerate(measured)]
            self._ratios = np.array(medians) / believed
        scaled: Array = shape * np.interp(sizes, self._sizes, self._ratios)
        return scaled


class Place(NamedTuple):
    """Where the times of a target hold; contexts in powers of four."""

    device: str
    dtype: str
    samples: bool
    context: int


class TargetTimes:
    """Seconds of the target's part of a step, by rows and width.

    A pass over 4 tokens in each of 4 rows takes about as long as one over 16 tokens in one row, so all share a table
    by the number of tokens, from which that of each number of rows differs by what was measured there.

    Args:
        before: the times at a similar place, to begin with.
    """

    def __init__(self, before: TargetTimes | None = None):
        self._by_tokens: Table = Table(_guess) if before is None else Table(_snapshot(before._by_tokens), trusted=True)
        self._before = before
        self._by_rows: dict[int, Table] = {}

    def add(self, rows: int, width: int, seconds: float) -> None:
        self._by_tokens.add(_rounded(rows * width), seconds)
        self.of(rows).add(width, seconds)

    def of(self, rows: int) -> Table:
        """Seconds by width."""
        if rows not in self._by_rows:
            self._by_rows[rows] = Table(lambda widths: self._by_tokens(rows * widths), trusted=True)
        return self._by_rows[rows]

    def knows(self, rows: int, width: int) -> bool:
        """Whether it was measured what as many tokens take, however they are spread over rows."""
        return self._by_tokens.knows(_rounded(rows * width))

    def steps_since(self, rows: int, width: int) -> int:
        """How many steps were measured since the last of as many tokens."""
        return self._by_tokens.age(_rounded(rows * width))

    def knows_plain_steps(self, rows: int) -> bool:
        """Whether it is known what a plain step takes, or what steps of fewer and of more tokens take.

        What a few tokens take says nothing of what one takes: a product with a vector is another one.
        """
        return self._before is not None or self._by_tokens.smallest() <= rows

    @property
    def knows_wide_steps(self) -> bool:
        """The same of steps with drafts."""
        return self._before is not None or any(len(table) > 1 for table in self._by_rows.values())


class Memory:
    """All that is remembered of one model: times, and what was last accepted of each strategy."""

    def __init__(self) -> None:
        self._targets: dict[Place, TargetTimes] = {}
        self._drafts: dict[tuple[str, int], DraftTimes] = {}
        self.prices: dict[tuple[Place, int, str], Any] = {}
        """By place, rows and strategy the `Prices` that were looked up last."""
        self.counts: dict[tuple[str, float], tuple[Any, Any, Any]] = {}
        """By strategy and temperature the `Chances` of the last call, gained and drafted, and its `Probes`."""

    def nearest_temperature(self, strategy: str, temperature: float) -> float | None:
        """Of those that the strategy was used at."""
        known = [other for name, other in self.counts if name == strategy]
        return min(known, key=lambda other: abs(other - temperature), default=None)

    def target(self, place: Place) -> TargetTimes:
        if place not in self._targets:
            alike = [other for other in self._targets if other[:2] == place[:2]]
            nearest = min(alike, key=lambda other: _apart(other, place), default=None)
            self._targets[place] = TargetTimes(None if nearest is None else self._targets[nearest])
        return self._targets[place]

    def draft(self, strategy: str, rows: int, target: TargetTimes) -> DraftTimes:
        """Of a network's drafts for about that many rows."""
        size = round(2 * log2(rows))
        if (strategy, size) not in self._drafts:
            sizes = [other for name, other in self._drafts if name == strategy]
            nearest = min(sizes, key=lambda other: abs(other - size), default=None)
            self._drafts[strategy, size] = self._similar(strategy, size, nearest, target.of(rows))
        return self._drafts[strategy, size]

    def _similar(self, strategy: str, size: int, nearest: int | None, plain: Curve) -> DraftTimes:
        """What to expect of another number of rows: rather too little, which the first draft shows, than too much."""
        if nearest is None:
            return DraftTimes(lambda depths: DRAFT_SLOPE * float(plain(np.ones(1))[0]) * depths)
        known, more = self._drafts[strategy, nearest], 2 ** ((size - nearest) / 2)
        return DraftTimes(lambda depths: known(depths) * min(1.0, more**0.5), known.reading * more)


_memories: WeakKeyDictionary[Any, Memory] = WeakKeyDictionary()


def memory_of(model: Any) -> Memory:
    """What is remembered of a model; nothing of None."""
    return Memory() if model is None else _memories.setdefault(model, Memory())


def _guess(tokens: Array) -> Array:
    return 1 + VERIFY_SLOPE * (np.asarray(tokens, dtype=float) - 1)


def _snapshot(curve: Curve) -> Curve:
    """A curve as it is now; beyond its widest point it goes on as it did there."""
    sizes = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256], dtype=float)
    values = curve(sizes)
    slope = (values[-1] - values[-2]) / (sizes[-1] - sizes[-2])
    return lambda wanted: np.interp(wanted, sizes, values) + slope * np.maximum(0, wanted - sizes[-1])


def _rounded(tokens: int) -> int:
    """To about 6%, so that sizes are met again."""
    fine = max(0, tokens.bit_length() - 5)
    return tokens >> fine << fine


def _apart(a: Place, b: Place) -> tuple[bool, int]:
    return a.samples != b.samples, abs(a.context - b.context)
