"""Estimates the acceptance probability of each draft position, per row, from the outcomes of a call's steps.

Two conditional probabilities describe position i of a draft, given the same event at position i - 1:

- *accepted*: it was proposed and the target accepted it;
- *proposed*: the strategy had a token for it (n-gram matches often end earlier than requested).

Both are censored: the positions after a rejected token were not verified, so they are not counted as trials. Dividing
accepted by drafted tokens at each position would count them as failures and choose depths that are too small.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from hf_specgen.depth.cost import Array

if TYPE_CHECKING:
    from hf_specgen.counters import RowStep, StepRecord

FORGETTING = 0.95
"""Weight of a trial one draft later: a half-life of 14 drafts. Simulated speeds differ by 0.3% between 0.9 and 0.97."""
SPEED_FORGETTING, SPEED_FORGETTING_PLAIN = 0.9, 0.98
"""Weight of the observed speed after one more step with a draft, and after a plain step."""
SPEED_PRIOR, SPEED_PRIOR_WEIGHT = 1.2, 8.0
"""Speedup before any observation, and its weight in plain steps. A strategy leaves out a tree that should not be
faster, at the cost of a pass of the drafter, so turning drafts off by mistake costs more than turning them off late."""
SHRINKAGE = 4.0
"""Weight, in trials, of the estimate that a row or position is shrunk towards."""
PRIOR_ACCEPTANCE = 0.7
"""Acceptance before any observation: high enough that drafting is tried, low enough to stop after few drafts."""
MAX_SNAPSHOTS = 64
"""Strategies and temperatures remembered per target; those stored longest ago are dropped."""


class Snapshot(NamedTuple):
    """The counts of a call, kept for later calls.

    Args:
        counts: `[4, k]` trials and successes as *accepted*, then as *proposed*, over all rows.
        exploration: unspent exploration budget, in plain steps.
        speed: tokens per row and time in plain steps of recent drafted steps.
    """

    counts: Array
    exploration: float = 0.0
    speed: tuple[float, float] = (0.0, 0.0)


class ObservedSpeed:
    """Speedup of the steps with a draft over plain ones, for strategies that size their trees themselves.

    The size of such a tree follows the drafter's confidence in every step, so averages of acceptance and of size by
    depth say little about how fast the steps are.

    Example:
        >>> speed = ObservedSpeed()
        >>> speed.add(tokens=4.0, cost=4.0)
        >>> round(speed.speedup, 2)  # a prior of 1.2 weighs as much as 8 plain steps
        1.13
    """

    def __init__(self) -> None:
        self._tokens = self._cost = 0.0

    def add(self, tokens: float, cost: float) -> None:
        """Count a step with a draft: its tokens per row, and its time in plain steps."""
        self._scale(SPEED_FORGETTING)
        self._tokens += tokens
        self._cost += cost

    def add_plain(self) -> None:
        """Count a plain step: what was observed before it counts less, as the text may have changed."""
        self._scale(SPEED_FORGETTING_PLAIN)

    @property
    def speedup(self) -> float:
        """Tokens per plain step, shrunk towards the prior."""
        return (SPEED_PRIOR_WEIGHT * SPEED_PRIOR + self._tokens) / (SPEED_PRIOR_WEIGHT + self._cost)

    def snapshot(self) -> tuple[float, float]:
        """The sums of tokens and of cost."""
        return self._tokens, self._cost

    def restore(self, snapshot: tuple[float, float]) -> None:
        """Start from the sums of another call, with the weight of a few steps: texts differ from call to call."""
        self._tokens, self._cost = snapshot
        self._scale(min(1.0, SHRINKAGE / max(self._cost, 1e-9)))

    def _scale(self, factor: float) -> None:
        self._tokens, self._cost = factor * self._tokens, factor * self._cost


class AcceptanceEstimator:
    """Estimates of acceptance by row and position, with exponential forgetting and shrinkage.

    A position is shrunk towards the one before it, a row towards the mean over rows.

    Args:
        rows: rows of the batch.
        k: number of draft positions.
        proposed: probability that a draft has a first token, before any observation.

    Example:
        >>> from hf_specgen.counters import StepRecord
        >>> from hf_specgen.counters import RowStep
        >>> estimator = AcceptanceEstimator(rows=1, k=3)
        >>> estimator.accepted().round(2).tolist()
        [[0.7, 0.49, 0.34]]
        >>> estimator.observe([StepRecord([3], [RowStep(drafted=3, depth=3, accepted=1, emitted=2)], 4)])
        >>> estimator.accepted().round(2).tolist()  # accepted, rejected, not verified
        [[0.81, 0.4, 0.24]]
    """

    def __init__(self, rows: int, k: int, proposed: float = 1.0):
        self._counts: Array = np.zeros((rows, 4, k))
        self._prior: Array = np.zeros((4, k))
        self._prior[:, 0] = SHRINKAGE * np.array([1.0, PRIOR_ACCEPTANCE * proposed, 1.0, proposed])
        self._positions = np.arange(k)

    def observe(self, steps: Sequence[StepRecord]) -> None:
        """Count the outcomes of consecutive steps; the result does not depend on how they are split over calls."""
        outcomes = np.array([[_counts(*pair) for pair in zip(s.requested, s.rows, strict=True)] for s in steps])
        reached = self._positions < outcomes[..., None]  # [steps, rows, requested and the four counts, k]
        requested = reached[:, :, :1]
        later = requested[::-1].cumsum(axis=0)[::-1]  # requests from this step on
        new = (FORGETTING ** (later - requested) * reached[:, :, 1:]).sum(axis=0)
        self._counts = FORGETTING ** later[0] * self._counts + new
        self._prior = FORGETTING ** requested.any(axis=1).sum(axis=0) * self._prior

    def accepted(self) -> Array:
        """`[rows, k]` probability that each position and all before it are proposed and accepted."""
        return self._cumulative(0)

    def proposed(self) -> Array:
        """`[rows, k]` probability that a draft reaches each position."""
        return self._cumulative(2)

    def _cumulative(self, first: int) -> Array:
        """`[rows, k]` running product of the success rates; `first` is the index of the trials in `Snapshot.counts`."""
        trials, successes = self._counts[:, first], self._counts[:, first + 1]
        all_trials, all_successes = self.snapshot().counts[first : first + 2].tolist()
        if all_trials == all_successes:  # no failure yet, as for strategies that propose every position
            return np.ones_like(trials)
        mean, pooled = all_successes[0] / all_trials[0], []
        for succeeded, tried in zip(all_successes, all_trials, strict=True):
            mean = (succeeded + SHRINKAGE * mean) / (tried + SHRINKAGE)
            pooled.append(mean)
        shares: Array = (successes + SHRINKAGE * np.array(pooled)) / (trials + SHRINKAGE)
        return np.multiply.accumulate(shares, axis=1)

    def snapshot(self) -> Snapshot:
        """The counts over all rows, for `restore` in another call."""
        return Snapshot(self._prior + self._counts.sum(axis=0))

    def restore(self, snapshot: Snapshot, weight: float) -> None:
        """Start from a snapshot, of any k, with a weight of at most `weight` trials per position.

        Positions beyond the snapshot's k have no trials, so they are shrunk towards the ones before them.
        """
        k, known = len(self._positions), snapshot.counts
        scale = min(1.0, weight / max(1e-9, float(known.max())))
        if (known[::2, 0] > 0).all():
            self._prior = scale * np.pad(known, ((0, 0), (0, max(0, k - known.shape[1]))))[:, :k]


def _counts(requested: int, row: RowStep | None) -> tuple[int, int, int, int, int]:
    """Positions requested; tried and succeeded as *accepted*; tried and succeeded as *proposed*.

    A row that emitted no bonus token has ended: the position after its last accepted token was not verified.
    """
    if row is None or requested == 0:
        return 0, 0, 0, 0, 0
    judged = row.accepted + (row.emitted > row.accepted)
    return requested, min(requested, judged), row.accepted, min(requested, row.depth + 1), row.depth


_memory: WeakKeyDictionary[Any, OrderedDict[Any, Snapshot]] = WeakKeyDictionary()
_memory_lock = Lock()


def remember(model: Any, key: Any, snapshot: Snapshot) -> None:
    """Keep a snapshot for later calls with this target, for the target's lifetime.

    Args:
        model: the target; nothing is kept if None.
        key: the strategy's `profile_key`, and the temperature.
    """
    if model is not None:
        with _memory_lock:
            known = _memory.setdefault(model, OrderedDict())
            known.pop(key, None)
            known[key] = snapshot
            if len(known) > MAX_SNAPSHOTS:
                known.popitem(last=False)


def recall(model: Any, key: Any) -> Snapshot | None:
    """The snapshot that was last kept for this target and key."""
    with _memory_lock:
        return None if model is None else _memory.get(model, {}).get(key)
