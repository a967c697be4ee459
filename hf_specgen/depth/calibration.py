"""Calibration: maps a drafter's confidence in a token to the probability that the target accepts it.

A confidence is the drafter's probability of the token, or its share of the weights of
`VerificationSession.draft_weights`. Acceptance is counted by rank and confidence; with few counts, the estimate is
shrunk towards the confidence itself.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

Floats = NDArray[np.floating[Any]]

EDGES = np.array([0.005, 0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.87, 0.95, 0.985])
"""Bounds of the confidence bins, narrower towards 0 and 1: relative errors matter there."""
BIN_CENTERS = (np.append(0.0, EDGES) + np.append(EDGES, 1.0)) / 2
RANKS = 4
"""Ranks with bins of their own; later ones share the last."""
PRIOR_WEIGHT = 6.0
"""Weight, in observations, of the confidence itself."""
MEASURED_PRIOR_WEIGHT = 50.0
"""Weight, in observations, of acceptance measured on other texts: with it the projected speed of Medusa heads is 2.26x
of plain decoding, with `PRIOR_WEIGHT` 2.21x."""
BIN_PRIOR_WEIGHT = 25.0
"""Weight of the centre of a bin, in observations, where tokens are counted by bin: with it the projected speed of
the default combination is 2.19x of plain decoding, with `PRIOR_WEIGHT` 2.13x, with 60 and 150 2.15x and 2.17x."""
REMEMBERED_OBSERVATIONS = 200.0
"""Weight per bin of what was counted in earlier calls: text changes, and a new call has to be followed."""
MAX_OBSERVATIONS = 64.0
"""Observations in a bin after which half of them are forgotten by `Calibration.count`."""
REMEMBERED_KEYS = 64
"""Strategies and temperatures remembered per target; those stored longest ago are dropped."""


class Calibration:
    """Counts of accepted tokens by rank and confidence.

    Attributes:
        seen, accepted: `[RANKS, bins]` weight of all tokens that were counted, and of those that were accepted.

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

    def by_bin(self, share: float = 1.0) -> Floats:
        """`[RANKS, bins]` acceptance of a token by its rank, or class, and the bin of its confidence.

        Args:
            share: acceptance over confidence that is assumed before anything was observed.
        """
        return (self.accepted + BIN_PRIOR_WEIGHT * share * BIN_CENTERS) / (self.seen + BIN_PRIOR_WEIGHT)

    def observe(self, rank: NDArray[np.integer[Any]], confidence: Floats, accepted: NDArray[np.bool_]) -> None:
        """Count tokens whose parent was accepted; three `[tokens]` arrays."""
        place = np.minimum(rank, RANKS - 1), np.searchsorted(EDGES, confidence)
        np.add.at(self.seen, place, 1.0)
        np.add.at(self.accepted, place, accepted.astype(float))

    def count(self, rank: int, place: int, accepted: bool, weight: float = 1.0) -> None:
        """Count one token whose parent was accepted, by its bin; beyond `MAX_OBSERVATIONS` the bin's counts are halved.

        So old tokens count less. This is for strategies that draft from the text alone, whose acceptance changes within
        a text, as between a heading and a copied paragraph.

        Args:
            rank: row of the counts: a rank, or a class; below `RANKS`.
            place: index of the confidence's bin.
            accepted: whether the target accepted the token.
            weight: of the token. If it is the confidence divided by the centre of its bin, `by_bin` returns the
                acceptance at the centres.
        """
        self.seen[rank, place] += weight
        self.accepted[rank, place] += accepted
        if self.seen[rank, place] > MAX_OBSERVATIONS:
            self.seen[rank, place] /= 2
            self.accepted[rank, place] /= 2

    def copy(self) -> Calibration:
        """A copy in which old observations weigh at most `REMEMBERED_OBSERVATIONS` per bin."""
        copied = Calibration()
        share = np.minimum(1.0, REMEMBERED_OBSERVATIONS / np.maximum(self.seen, 1.0))
        copied.seen, copied.accepted = self.seen * share, self.accepted * share
        return copied


class Learnt(Protocol):
    """What is learnt in a call and useful in later ones."""

    def copy(self) -> Self:
        """A copy for another call, which learns on its own."""


T = TypeVar("T", bound=Learnt)


class CalibrationMemory(Generic[T]):
    """What calls with a target have learnt, for later calls. May be shared by threads.

    Args:
        new: makes what the first call with a target and key starts with.
    """

    def __init__(self, new: Callable[[], T]):
        self._new, self._lock = new, threading.Lock()
        self._known: WeakKeyDictionary[Any, OrderedDict[Hashable, T]] = WeakKeyDictionary()

    def recall(self, model: Any, key: Hashable) -> T:
        """What was last stored for this target and key, or else what `new` makes; `model` may be None."""
        with self._lock:
            known = self._known[model].get(key) if model is not None and model in self._known else None
            return self._new() if known is None else known.copy()

    def store(self, model: Any, key: Hashable, calibration: T) -> None:
        """Keep what a call has learnt."""
        if model is None:
            return
        with self._lock:
            known = self._known.setdefault(model, OrderedDict())
            known[key] = calibration.copy()
            known.move_to_end(key)
            while len(known) > REMEMBERED_KEYS:
                known.popitem(last=False)


calibration_memory = CalibrationMemory(Calibration)
