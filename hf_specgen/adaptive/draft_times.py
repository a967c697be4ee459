"""What drafting takes, learnt from the drafts of a call."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from statistics import median_low

import numpy as np

from hf_specgen.adaptive.chances import Array

KEPT = 7
Curve = Callable[[Array], Array]


class DraftTimes:
    """Seconds that drafting took, by depth; 0 for a draft that was asked for in vain.

    Between measured depths the time rises evenly, beyond them in proportion: most networks run once per token.

    Args:
        guess: gives the seconds of a draft by its depth, as long as nothing was measured.
        reading: seconds to read a token of each row's text, to begin with.
    """

    def __init__(self, guess: Curve, reading: float = 0.0):
        self._guess = guess
        self._times: dict[int, deque[float]] = {}
        self._has_first = False
        self.reading = reading
        """Seconds to read a token of each row's prompt or plain steps, which the next draft does first."""
        self._read = 0.0

    def add(self, depth: int, seconds: float) -> None:
        """Enter a measurement. The first, in which kernels are prepared, gives way to the second.

        Until then it is believed only where it is less than was guessed.
        """
        if self._has_first:
            self._times.clear()
        self._has_first = not self._times and not self._has_first
        self._times.setdefault(depth, deque(maxlen=KEPT)).append(seconds)

    def add_reading(self, tokens: int, seconds: float) -> None:
        """Enter what it took to read so many tokens of each row; earlier measurements count half each time."""
        self._read = 0.5 * self._read + tokens
        self.reading += (max(0.0, seconds) - tokens * self.reading) / self._read

    def __call__(self, depths: Array) -> Array:
        if not self._times:
            return self._guess(depths)
        measured = self._measured(depths)
        return np.minimum(measured, self._guess(depths)) if self._has_first else measured

    def _measured(self, depths: Array) -> Array:
        known = sorted(self._times)
        seconds = [typical(self._times[depth]) for depth in known]
        if known[0] > 0:
            known, seconds = [0, *known], [0.0, *seconds]
        slope = (seconds[-1] - seconds[0]) / max(1, known[-1])
        beyond: Array = np.interp(depths, known, seconds) + max(0.0, slope) * np.maximum(0, depths - known[-1])
        return beyond


def typical(times: Iterable[float]) -> float:
    """Their median; the lower of two, as what disturbs a step makes it longer."""
    return median_low(times)
