"""Monitors of running calls: statistics over a window of steps, a histogram, Prometheus counters."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from functools import lru_cache
from time import perf_counter

from hf_specgen.call import Call
from hf_specgen.counters import RowStep, Statistics, StepRecord

PREFIX = "spec_decode_num_"
"""Of the names of counters for Prometheus, as in vLLM."""

logger = logging.getLogger("hf_specgen")


class MonitorSession(ABC):
    """Receives the steps of one `generate` call."""

    @abstractmethod
    def observe(self, step: StepRecord) -> None:
        """Receive a step."""

    def end(self) -> None:
        """End the call, possibly after an exception."""


class Monitor(ABC):
    """Receives the steps of the calls that it is passed to: `generate(…, candidate_generator=…, monitor=monitor)`."""

    @abstractmethod
    def start(self, call: Call) -> MonitorSession:
        """Return the session of a call."""


class SpeculationMonitor(Monitor):
    """Statistics over a window of steps, a histogram and a timeline, over all calls; may be shared by threads.

    Logs one line per call at level INFO to the logger "hf_specgen". Subclass it and extend `record` for more.

    Args:
        window: number of row steps (one row in one step) in the window.
        timeline: number of steps kept for the plot.
        prometheus: count in `prometheus_client` under vLLM's names: `spec_decode_num_drafts`,
            `spec_decode_num_draft_tokens`, `spec_decode_num_accepted_tokens` and the last one per position. None counts
            if the package is installed.

    Raises:
        ValueError: if a size is not positive.
        ImportError: with `prometheus=True`, if `prometheus_client` is not installed.

    Example:
        >>> monitor = SpeculationMonitor(window=50, prometheus=False)
        >>> # model.generate(**inputs, candidate_generator=NgramCandidates(k="auto"), monitor=monitor)
        >>> monitor.summary()
        'last 0 row steps: nothing was drafted'
    """

    def __init__(self, window: int = 100, *, timeline: int = 2000, prometheus: bool | None = None):
        for name, value in (("window", window), ("timeline", timeline)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.window: deque[tuple[int, int, int, int]] = deque(maxlen=window)
        """(maximum depth, drafted, accepted and emitted tokens) of the last row steps."""
        self.timeline: deque[tuple[float, float, float, float]] = deque(maxlen=timeline)
        """(maximum depth, drafted and accepted tokens: means over rows; seconds) of the last steps."""
        self.histogram: Counter[int] = Counter()
        """Number of drafts of which 0, 1, 2, … tokens were accepted, over all calls."""
        self.calls = 0
        """Number of calls that were started."""
        self._counters = _counters(prometheus)
        self._lock = threading.Lock()

    def start(self, call: Call) -> MonitorSession:
        with self._lock:
            self.calls += 1
        return _SpeculationMonitorSession(self, call)

    def record(self, call: Call, step: StepRecord) -> None:
        """Record a step of any call, in the thread of that call; subclass and extend it to do more with each step."""
        taken = [(depth, row) for depth, row in zip(step.requested, step.rows, strict=True) if row is not None]
        with self._lock:
            for depth, row in taken:
                self.window.append((depth, row.drafted, row.accepted, row.emitted))
                if row.drafted:
                    self.histogram[row.accepted] += 1
            columns = zip(*((depth, row.drafted, row.accepted) for depth, row in taken), strict=True)
            depth, drafted, accepted = (sum(column) / len(taken) for column in columns)
            self.timeline.append((depth, drafted, accepted, sum(step.seconds.values())))
        if self._counters is not None:
            for _, row in taken:
                if row.drafted:
                    self._counters.add(row.drafted, row.accepted)

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted, in the window."""
        _, drafted, accepted, _ = self._means()
        return accepted / drafted if drafted else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens per row step, in the window."""
        return self._means()[3]

    @property
    def mean_depth(self) -> float:
        """Mean of the maximum depth, in the window; 0 if nothing is drafted."""
        return self._means()[0]

    def summary(self) -> str:
        """One line about the window."""
        if not self._means()[1]:
            return f"last {len(self.window)} row steps: nothing was drafted"
        return (
            f"last {len(self.window)} row steps: {self.tokens_per_step:.2f} tokens per step, "
            f"{self.acceptance_rate:.0%} of draft tokens accepted, mean depth {self.mean_depth:.1f}"
        )

    def _means(self) -> list[float]:
        """Means over the window: maximum depth, drafted, accepted and emitted tokens; 0 if it is empty."""
        with self._lock:  # other threads may append to it
            return [sum(column) / len(self.window) for column in zip(*self.window, strict=True)] or [0.0] * 4


class _SpeculationMonitorSession(MonitorSession):
    """Passes the steps of a call on to its monitor, and logs their sums at the end."""

    def __init__(self, monitor: SpeculationMonitor, call: Call):
        self._monitor, self._call, self._started = monitor, call, perf_counter()
        self._steps, self._rows = 0, list[RowStep]()

    def observe(self, step: StepRecord) -> None:
        self._steps += 1
        self._rows += [row for row in step.rows if row is not None]
        self._monitor.record(self._call, step)

    def end(self) -> None:
        counts = Statistics([self._rows])
        logger.info(
            "%s: %d tokens, %d steps, %.2f tokens per step, drafted %d, accepted %d (%.0f%%), %.2f s",
            self._call.drafting.name,
            sum(map(len, self._call.state.generated)),
            self._steps,
            counts.tokens_per_step,
            counts.drafted,
            counts.accepted,
            100 * counts.acceptance_rate,
            perf_counter() - self._started,
        )


class Counters:
    """Prometheus counters of this process in the default registry, which appends `_total` to each name."""

    def __init__(self) -> None:
        from prometheus_client import Counter

        self._drafts = Counter(f"{PREFIX}drafts", "Drafts that the target verified.")
        self._drafted = Counter(f"{PREFIX}draft_tokens", "Draft tokens that the target verified.")
        self._accepted = Counter(f"{PREFIX}accepted_tokens", "Draft tokens that were accepted.")
        self._by_position = Counter(
            f"{PREFIX}accepted_tokens_per_pos", "Drafts in which this position was accepted.", ["position"]
        )

    def add(self, drafted: int, accepted: int) -> None:
        """Count one draft of one row."""
        self._drafts.inc()
        self._drafted.inc(drafted)
        self._accepted.inc(accepted)
        for position in range(accepted):
            self._by_position.labels(position=str(position)).inc()


@lru_cache(maxsize=1)
def _process_counters() -> Counters:
    """The counters of this process: Prometheus registers each name once."""
    return Counters()


def _counters(wanted: bool | None) -> Counters | None:
    if wanted is False:
        return None
    try:
        return _process_counters()
    except ImportError as error:
        if wanted is None:
            return None
        raise ImportError("counters need prometheus_client: pip install 'hf-specgen[monitor]'") from error
