"""Monitors of running calls: statistics over a window of steps and over all calls, Prometheus counters, plots."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import numpy as np

from hf_specgen.call import Call, checked_count
from hf_specgen.call_statistics import RowStep, Statistics, StepRecord

PREFIX = "spec_decode_num_"  # beginning of the names of Prometheus counters, as in vLLM
Latency = Callable[[float], float] | None

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


@dataclass(frozen=True)
class AcceptanceRates:
    """The distribution of the acceptance rates of single drafts: accepted over drafted tokens. 0 without drafts."""

    drafts: int
    mean: float
    std: float
    min: float
    max: float
    p50: float
    p95: float

    @classmethod
    def of(cls, counts: Mapping[tuple[int, int], int]) -> AcceptanceRates:
        """From the number of drafts by their numbers of (drafted, accepted) tokens."""
        rates = np.repeat([accepted / drafted for drafted, accepted in counts] or 0.0, [*counts.values()] or 1)
        median, percentile_95 = np.percentile(rates, [50, 95])
        return cls(
            drafts=sum(counts.values()),
            mean=float(rates.mean()),
            std=float(rates.std()),
            min=float(rates.min()),
            max=float(rates.max()),
            p50=float(median),
            p95=float(percentile_95),
        )


class SpeculationMonitor(Monitor):
    """Statistics over a window of row steps (one row in one step) and over all calls; may be shared by threads.

    Logs one line per call at level INFO to the logger "hf_specgen". Subclass it and extend `record` for more.

    Args:
        window: number of row steps in the window.
        prometheus: count in `prometheus_client` under vLLM's names: `spec_decode_num_drafts`,
            `spec_decode_num_draft_tokens`, `spec_decode_num_accepted_tokens` and the last one per position. None counts
            if the package is installed, True raises an `ImportError` if it is not.
    """

    def __init__(self, window: int = 100, *, prometheus: bool | None = None):
        super().__init__()
        window = checked_count("window", window, 1, "steps")
        self.window: deque[RowStep] = deque(maxlen=window)
        """The last row steps."""
        self.drafts: Counter[tuple[int, int]] = Counter()
        """Number of drafts by their numbers of (drafted, accepted) tokens, over all calls."""
        self.calls = 0
        """Number of calls that were started."""
        self._counts = prometheus is not False and bool(prometheus_counters())
        if prometheus and not self._counts:
            raise ImportError("counters need prometheus_client: pip install 'hf-specgen[monitor]'")
        self._lock = threading.Lock()

    def start(self, call: Call) -> MonitorSession:
        with self._lock:
            self.calls += 1
        return _SpeculationMonitorSession(self, call)

    def record(self, call: Call, step: StepRecord) -> None:
        """Record a step of any call, in the thread of that call; subclass and extend it to do more with each step."""
        rows = [row for row in step.rows if row is not None]
        with self._lock:
            self.window.extend(rows)
            self.drafts.update((row.drafted, row.accepted) for row in rows if row.drafted)
        if self._counts:
            count_in_prometheus(Statistics([rows]))

    def acceptance(self, over: Literal["window", "total"] = "window") -> AcceptanceRates:
        """Mean, standard deviation, minimum, maximum, median and 95th percentile of the drafts' acceptance rates."""
        if over not in ("window", "total"):
            raise ValueError(f'over must be "window" or "total", got {over!r}')
        with self._lock:  # other threads may append
            newest = Counter((row.drafted, row.accepted) for row in self.window if row.drafted)
            return AcceptanceRates.of(newest if over == "window" else self.drafts)

    @property
    def statistics(self) -> Statistics:
        """The row steps of the window, as statistics of one row."""
        with self._lock:
            return Statistics([list(self.window)])

    def summary(self) -> str:
        """One line about the window."""
        counts = self.statistics
        rates = self.acceptance()
        figures = (
            f"{counts.tokens_per_step:.2f} tokens per step, {counts.acceptance_rate:.0%} of draft tokens accepted; "
            f"by draft {rates.mean:.0%} ± {rates.std:.0%}, median {rates.p50:.0%}"
        )
        return f"last {counts.steps} row steps: {figures if counts.drafted else 'nothing was drafted'}"


class _SpeculationMonitorSession(MonitorSession):
    """Passes the steps of a call on to its monitor, and logs their sums at the end."""

    def __init__(self, monitor: SpeculationMonitor, call: Call):
        super().__init__()
        self._monitor = monitor
        self._call = call
        self._started = perf_counter()
        self._rows: list[RowStep] = []

    def observe(self, step: StepRecord) -> None:
        self._rows += [row for row in step.rows if row is not None]
        self._monitor.record(self._call, step)

    def end(self) -> None:
        counts = Statistics([self._rows])
        tokens = sum(map(len, self._call.state.generated))
        logger.info(
            f"{self._call.drafting.name}: {tokens} tokens, {counts.tokens_per_step:.2f} tokens per step, drafted "
            f"{counts.drafted}, accepted {counts.accepted} ({counts.acceptance_rate:.0%}), "
            f"{perf_counter() - self._started:.2f} s"
        )


def count_in_prometheus(counts: Statistics) -> None:
    """Add to the counters of this process, if prometheus_client is installed."""
    if counters := prometheus_counters():
        *totals, by_position = counters
        for counter, count in zip(totals, (counts.drafts, counts.drafted, counts.accepted), strict=True):
            counter.inc(count)
        for position, count in enumerate(counts.accepted_per_position):
            by_position.labels(position=str(position)).inc(count)


@cache
def prometheus_counters() -> tuple[Any, ...]:
    """The counters of this process in the default registry, which takes each name once; none without the package."""
    try:
        from prometheus_client import Counter
    except ImportError:
        return ()
    return (
        Counter(f"{PREFIX}drafts", "Drafts that the target verified."),
        Counter(f"{PREFIX}draft_tokens", "Draft tokens that the target verified."),
        Counter(f"{PREFIX}accepted_tokens", "Draft tokens that were accepted."),
        Counter(f"{PREFIX}accepted_tokens_per_pos", "Drafts in which this position was accepted.", ["position"]),
    )


def plot_monitor(monitor: SpeculationMonitor, path: str | Path) -> None:
    """Plot the drafts of the last row steps, and the number of drafts by accepted tokens.

    The suffix of the path chooses the format (PNG, SVG, PDF).
    """
    steps = list(monitor.window)
    if not steps:
        raise ValueError("the monitor has no steps yet; pass it to generate(…, monitor=monitor)")
    figure, (newest, histogram) = _figure(2)
    numbers = range(1, len(steps) + 1)
    newest.bar(numbers, [step.depth for step in steps], color="lightgray", label="depth of the draft")
    newest.bar(numbers, [step.accepted for step in steps], color="seagreen", label="accepted")
    newest.set(title=monitor.summary(), xlabel="step of a row", ylabel="tokens")
    newest.legend()
    accepted = [accepted for _, accepted in monitor.drafts]
    histogram.hist(accepted, range(max(accepted, default=0) + 2), weights=monitor.drafts.values(), color="seagreen")
    histogram.set(xlabel="accepted tokens of a draft, over all calls", ylabel="drafts")
    figure.savefig(path)


def speedup(acceptance: float, k: int, latency: Latency = None, draft_pass: float = 0.0) -> float:
    """Expected speedup of chains of k draft tokens over plain decoding, if each is accepted with this probability.

    A step yields 1 + a + a² + … + a^k tokens and takes T(1 + k) / T(1) plus k passes of the drafter.

    Args:
        acceptance: a, between 0 and 1.
        latency: T(q) / T(1) of the target, such as `CostCurve.relative`; 1 for any q if left out.
        draft_pass: time of a drafter's pass over T(1).

    Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), theorem 3.8.

    Example:
        >>> round(speedup(0.8, k=5, draft_pass=0.05), 2)
        2.95
    """
    tokens = sum(acceptance**depth for depth in range(k + 1))
    return tokens / ((latency(1 + k) if latency else 1.0) + k * draft_pass)


def plot_speedup(
    path: str | Path, *, latency: Latency = None, draft_pass: float = 0.05, depths: Sequence[int] = (1, 2, 3, 5, 8, 12)
) -> None:
    """Plot `speedup` over the acceptance rate, a line for each k; where it is below 1, drafting loses."""
    figure, axes = _figure(1)
    rates = np.linspace(0, 1, 101)
    for k in depths:
        axes.plot(rates, [speedup(rate, k, latency, draft_pass) for rate in rates], label=f"k = {k}")
    axes.axhline(1, color="lightgray")
    axes.set(xlabel="acceptance rate of a draft token", ylabel="speedup over plain decoding", xlim=(0, 1), ylim=0)
    axes.legend()
    figure.savefig(path)


def _figure(plots: int) -> tuple[Any, Any]:
    """A figure of `plots` plots, and their axes."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'hf-specgen[plot]'") from error
    figure = Figure(figsize=(9, 5.5), dpi=150, layout="constrained")
    return figure, figure.subplots(plots)
