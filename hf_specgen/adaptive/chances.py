"""How likely is position i of a draft, given that the ones before it came off? For each row, and pooled over rows.

Two such chances describe a strategy. *Gained*: position i was asked for, drafted and accepted. *Drafted*: a draft went
on to position i (n-grams often have nothing to say). Both are censored: whatever lies behind a position that failed was
not seen, and counts neither for nor against. Dividing accepted by drafted tokens at a position would count it against,
and choose drafts that are too short.

Old trials fade, and all at once when the first position turns out very differently from what was believed, so that a
change of domain is followed. A row with few trials of its own leans on all rows, a position with few trials on the
position before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import log
from operator import mul
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]
QUICK = 0.7
ALARM = 4.0
LEFT_AFTER_ALARM = 0.15


Counts = Sequence[int]
"""`[steps * rows]`, the rows of one step side by side."""


class Chances:
    """Chances of each position of one row's drafts, given the positions before it.

    Args:
        k: positions.
        prior: what is believed of the first position before anything was seen; fades like trials.
        fade: weight of a trial one step later; 0.95 looks back on about twenty.
        lean: how many trials the belief from elsewhere (at first, other rows, the position before) weighs.

    Example:
        >>> chances = Chances(k=3, prior=0.5, fade=1.0, lean=1.0)
        >>> chances.observe(asked=[3], seen=[2], came_off=[1])  # accepted, rejected, not seen
        >>> [round(chance, 2) for chance in chances.conditional()]
        [0.75, 0.38, 0.38]
    """

    def __init__(self, k: int, prior: float, fade: float, lean: float):
        self._fade, self._lean = fade, lean
        self._tried, self._good = [lean] + [0.0] * (k - 1), [lean * prior] + [0.0] * (k - 1)
        self._change = ChangeAlarm(prior)

    def observe(self, asked: Counts, seen: Counts, came_off: Counts) -> None:
        """Count some steps.

        Args:
            asked: `[steps * rows]` how many positions were asked for.
            seen: how many of them were tried, from the first one on.
            came_off: how many of those came off; all but the last, or all.
        """
        tried, good = sum(map(bool, seen)), sum(map(bool, came_off))
        left = self._change.weight_left(self.first(), tried, good)
        for wanted, looked, succeeded in zip(asked, seen, came_off, strict=True):
            for i in range(wanted):
                self._tried[i] = self._fade * self._tried[i] + (i < looked)
                self._good[i] = self._fade * self._good[i] + (i < succeeded)
        if left < 1:
            self._tried, self._good = ([left * n for n in counts] for counts in (self._tried, self._good))

    def begin_with(self, counts: tuple[Sequence[float], Sequence[float]], weight: float) -> None:
        """Start from the `counts` of an earlier call, as if they were at most `weight` trials."""
        self._tried, self._good = (scaled[: len(self._tried)] for scaled in _weighing(counts, weight))

    def counts(self) -> tuple[Sequence[float], Sequence[float]]:
        """`[k]` trials of each position, and how many came off."""
        return self._tried, self._good

    def first(self) -> float:
        """The chance of the first position."""
        return self._good[0] / self._tried[0]

    def conditional(self) -> list[float]:
        """`[k]` the chance of each position, given that those before it came off."""
        return _leaning(self._good, self._tried, self._lean)

    def cumulative(self) -> list[float]:
        """`[k]` the chance that each position and all before it come off."""
        return list(accumulate(self.conditional(), mul))


class BatchChances:
    """The same for the rows of a batch: each row has its own counts, and leans on those of all rows.

    Args:
        rows: in the batch.
        k, prior, fade, lean: as for `Chances`.
    """

    def __init__(self, rows: int, k: int, prior: float, fade: float, lean: float):
        self._fade, self._lean = fade, lean
        self._tried, self._good = np.zeros((rows, k)), np.zeros((rows, k))
        self._all_tried, self._all_good = np.zeros(k), np.zeros(k)
        self._all_tried[0], self._all_good[0] = lean, lean * prior
        self._positions = np.arange(k)
        self._change = ChangeAlarm(prior)

    def observe(self, asked: Counts, seen: Counts, came_off: Counts) -> None:
        """Count some steps; as `Chances.observe`."""
        counts = np.array([asked, seen, came_off]).reshape(3, -1, len(self._tried), 1)  # [3, steps, rows, 1]
        wanted, looked, succeeded = self._positions < counts  # each [steps, rows, k]
        tried, good = looked.sum(axis=0), succeeded.sum(axis=0)  # [rows, k]
        all_tried, all_good = tried.sum(axis=0), good.sum(axis=0)  # [k]
        left = self._change.weight_left(self.first(), int(all_tried[0]), int(all_good[0]))
        fade = self._fade ** wanted.sum(axis=0)
        fade_all = self._fade ** wanted.any(axis=1).sum(axis=0)
        self._tried, self._good = left * (fade * self._tried + tried), left * (fade * self._good + good)
        self._all_tried = left * (fade_all * self._all_tried + all_tried)
        self._all_good = left * (fade_all * self._all_good + all_good)

    def begin_with(self, counts: tuple[Sequence[float], Sequence[float]], weight: float) -> None:
        """As `Chances.begin_with`, for what is pooled over rows."""
        self._all_tried, self._all_good = (np.array(scaled) for scaled in _weighing(counts, weight))

    def counts(self) -> tuple[Sequence[float], Sequence[float]]:
        """As `Chances.counts`, over all rows."""
        return self._all_tried.tolist(), self._all_good.tolist()

    def first(self) -> float:
        """As `Chances.first`, over all rows."""
        return float(self._all_good[0] / self._all_tried[0])

    def conditional(self) -> Array:
        """`[rows, k]` the chance of each position, given that those before it came off."""
        pooled = _leaning(self._all_good.tolist(), self._all_tried.tolist(), self._lean)
        return (self._good + self._lean * np.array(pooled)) / (self._tried + self._lean)

    def cumulative(self) -> Array:
        """`[rows, k]` the chance that each position and all before it come off."""
        return np.cumprod(self.conditional(), axis=1)


class ChangeAlarm:
    """Notices that the first position turns out very differently from what is believed.

    A cumulative sum of log likelihood ratios between a mean that fades quickly and the belief.

    Source: Page, "Continuous inspection schemes" (1954).
    """

    def __init__(self, prior: float):
        self._recent, self._sum = prior, 0.0

    def weight_left(self, believed: float, tried: int, good: int) -> float:
        """How much of the old counts still holds after some more trials of the first position."""
        if not tried:
            return 1.0
        p, q = (min(0.95, max(0.05, chance)) for chance in (believed, self._recent))
        self._sum = max(0.0, self._sum + good * log(q / p) + (tried - good) * log((1 - q) / (1 - p)))
        share = good / tried
        self._recent = share + QUICK**tried * (self._recent - share)
        if self._sum < ALARM:
            return 1.0
        self._sum = 0.0
        return LEFT_AFTER_ALARM


def _weighing(counts: tuple[Sequence[float], Sequence[float]], weight: float) -> list[list[float]]:
    share = min(1.0, weight / max(1e-9, max(counts[0])))
    return [[share * n for n in column] for column in counts]


def _leaning(good: Sequence[float], tried: Sequence[float], lean: float) -> list[float]:
    belief = good[0] / tried[0]
    chances = [belief]
    for hits, trials in zip(good[1:], tried[1:], strict=True):
        belief = (hits + lean * belief) / (trials + lean)
        chances.append(belief)
    return chances
