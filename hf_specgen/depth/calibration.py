"""Calibration: maps a drafter's confidence in a token to the probability that the target accepts it.

A confidence is the drafter's probability of the token, or its share of the weights of
`VerificationSession.draft_weights`. Acceptance is counted by rank and confidence; with few counts, the estimate is
shrunk towards the confidence itself.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]

EDGES = np.array([0.005, 0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.87, 0.95, 0.985])
"""Bounds of the confidence bins: finer towards both ends, where a factor matters more than a difference."""
RANKS = 4
"""Ranks with bins of their own; later ones share the last."""
PRIOR_WEIGHT = 6.0
"""Weight, in observations, of the confidence itself."""
MEASURED_PRIOR_WEIGHT = 50.0
"""Weight, in observations, of acceptance measured on other texts: with it the projected speed of Medusa heads is 2.26x
of plain decoding, with `PRIOR_WEIGHT` 2.21x."""
REMEMBERED_OBSERVATIONS = 200.0
"""Maximum weight per bin of the counts of earlier calls: texts differ from call to call."""
REMEMBERED_KEYS = 64
"""Strategies and temperatures remembered per target; those stored longest ago are dropped."""


class Calibration:
    """Counts of accepted tokens by rank and confidence.

    Example:
        >>> calibration = Calibration()
        >>> calibration.acceptance(np.array([[0.5, 0.2]])).round(2).tolist()  # no observations yet
        [[0.5, 0.2]]
        >>> for _ in range(100):
        ...     calibration.observe(np.array([0]), np.array([0.5]), np.array([True]))
        >>> calibration.acceptance(np.array([[0.5, 0.2]])).round(2).tolist()
        [[0.97, 0.03]]
    """

    def __init__(self) -> None:
        self.seen: Floats = np.zeros((RANKS, len(EDGES) + 1))
        self.accepted: Floats = np.zeros((RANKS, len(EDGES) + 1))

    def acceptance(self, confidence: Floats, prior: Floats | None = None) -> Floats:
        """`[…, children]` acceptance probabilities of siblings: not increasing, with a sum of at most 1.

        Args:
            confidence: `[…, children]` of each sibling, most preferred first.
            prior: `[…, children]` probabilities measured on other texts; the confidences if left out.
        """
        weight = PRIOR_WEIGHT if prior is None else MEASURED_PRIOR_WEIGHT
        prior = confidence if prior is None else prior
        rank = np.minimum(np.arange(confidence.shape[-1]), RANKS - 1)
        place = rank, np.searchsorted(EDGES, confidence)
        estimate = (self.accepted[place] + weight * prior) / (self.seen[place] + weight)
        estimate = np.minimum.accumulate(estimate, axis=-1)
        before = np.cumsum(estimate, axis=-1) - estimate
        return np.minimum(estimate, np.clip(1.0 - before, 0.0, 1.0))

    def observe(self, rank: NDArray[np.integer[Any]], confidence: Floats, accepted: NDArray[np.bool_]) -> None:
        """Count tokens whose parent was accepted; three `[tokens]` arrays."""
        place = np.minimum(rank, RANKS - 1), np.searchsorted(EDGES, confidence)
        np.add.at(self.seen, place, 1.0)
        np.add.at(self.accepted, place, accepted.astype(float))

    def copy(self) -> Calibration:
        """A copy in which old observations weigh at most `REMEMBERED_OBSERVATIONS` per bin."""
        copied = Calibration()
        share = np.minimum(1.0, REMEMBERED_OBSERVATIONS / np.maximum(self.seen, 1.0))
        copied.seen, copied.accepted = self.seen * share, self.accepted * share
        return copied


class CalibrationMemory:
    """Keeps the calibrations of finished calls by target, for later calls. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: WeakKeyDictionary[Any, OrderedDict[Hashable, Calibration]] = WeakKeyDictionary()

    def recall(self, model: Any, key: Hashable) -> Calibration:
        """A calibration to start a call with; `model` may be None."""
        with self._lock:
            known = self._known[model].get(key) if model is not None and model in self._known else None
            return Calibration() if known is None else known.copy()

    def store(self, model: Any, key: Hashable, calibration: Calibration) -> None:
        """Keep the counts of a call."""
        if model is None:
            return
        with self._lock:
            known = self._known.setdefault(model, OrderedDict())
            known[key] = calibration.copy()
            known.move_to_end(key)
            while len(known) > REMEMBERED_KEYS:
                known.popitem(last=False)


calibration_memory = CalibrationMemory()
