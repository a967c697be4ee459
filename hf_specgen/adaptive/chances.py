"""How likely is position i of a draft, given that the ones before it came off? For each row, and pooled over rows.

Two such chances describe a strategy. *Gained*: position i was asked for, drafted and accepted. *Drafted*: a draft went
on to position i (n-grams often have nothing to say). Both are censored: whatever lies behind a position that failed was
not seen, and counts neither for nor against. Dividing accepted by drafted tokens at a position would count it against,
and choose drafts that are too short.

Old trials fade, so that a change of domain is followed. A row with few trials of its own leans on all rows, a position
with few trials on the position before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Chances:
    """Chances of each position, given the positions before it.

    Args:
        rows: in the batch.
        k: positions.
        prior: what is believed of the first position before anything was seen.
        fade: weight of a trial after one more trial of its position; 0.9 looks back on about ten.
        lean: how many trials the belief from elsewhere (other rows, the position before) weighs.

    Example:
        >>> chances = Chances(rows=1, k=3, prior=0.5, fade=1.0, lean=1.0)
        >>> chances.observe(seen=[2], came_off=[1])  # the first accepted, the second rejected, the third not seen
        >>> chances.conditional()[0].round(2).tolist()
        [0.75, 0.38, 0.38]
    """

    def __init__(self, rows: int, k: int, prior: float, fade: float, lean: float):
        self._prior, self._fade, self._lean = prior, fade, lean
        self._tried, self._good = np.zeros((rows, k)), np.zeros((rows, k))
        self._all_tried, self._all_good = np.zeros(k), np.zeros(k)
        self._positions = np.arange(k)

    def observe(self, seen: Sequence[int], came_off: Sequence[int]) -> None:
        """Count one step.

        Args:
            seen: for each row, how many positions were tried, from the first one on; 0 if none.
            came_off: how many of them came off; all but the last, or all.
        """
        tried = self._positions < np.array(seen)[:, None]  # [rows, k]
        good = self._positions < np.array(came_off)[:, None]
        self._tried = np.where(tried, self._fade * self._tried + 1, self._tried)
        self._good = np.where(tried, self._fade * self._good + good, self._good)
        if len(seen) == 1:
            self._all_tried, self._all_good = self._tried[0], self._good[0]
            return
        fade = np.where(tried.any(axis=0), self._fade, 1.0)
        self._all_tried = fade * self._all_tried + tried.sum(axis=0)
        self._all_good = fade * self._all_good + good.sum(axis=0)

    def conditional(self) -> Array:
        """`[rows, k]` the chance of each position, given that those before it came off."""
        belief, pooled = self._prior, []
        for good, tried in zip(self._all_good.tolist(), self._all_tried.tolist(), strict=True):
            belief = (good + self._lean * belief) / (tried + self._lean)
            pooled.append(belief)
        if len(self._tried) == 1:
            return np.array([pooled])
        return (self._good + self._lean * np.array(pooled)) / (self._tried + self._lean)

    def cumulative(self) -> Array:
        """`[rows, k]` the chance that each position and all before it come off."""
        return np.cumprod(self.conditional(), axis=1)
