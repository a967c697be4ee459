"""Watching speculation while it runs: a window over the last steps, a histogram, counters for a dashboard."""

from __future__ import annotations

import logging
from collections import Counter, deque
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_specgen.adaptive.policy import State, Step
    from hf_specgen.monitoring.prometheus import Counters

logger = logging.getLogger("hf_specgen")


class SpeculationMonitor:
    """Is told of every step of the calls that it is passed to: `generate(…, candidate_generator=…, monitor=monitor)`.

    Logs one line per call at level INFO to the logger "hf_specgen". Subclass it and extend `step` for more.

    Args:
        window: how many row steps the windowed figures look back on.
        timeline: how many steps are kept for the plot.
        prometheus: count in `prometheus_client` under the names that serving stacks chart: `spec_decode_num_drafts`,
            `spec_decode_num_draft_tokens`, `spec_decode_num_accepted_tokens` and the latter per position. None counts
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
        """(depth asked for, tokens drafted, accepted, emitted) of the last row steps."""
        self.timeline: deque[tuple[float, float, float, float]] = deque(maxlen=timeline)
        """(mean depth asked for, mean drafted, mean accepted, seconds) of the last steps, over the rows of each."""
        self.histogram: Counter[int] = Counter()
        """How many drafts had 0, 1, 2, … tokens accepted, over all calls."""
        self.calls = 0
        self._counters = _counters(prometheus)

    def begin(self, state: State) -> None:
        """A call starts."""
        self.calls += 1

    def step(self, state: State, step: Step) -> None:
        """A step was taken."""
        taken = [(asked, row) for asked, row in zip(step.asked, step.rows, strict=True) if row is not None]
        for asked, row in taken:
            self.window.append((asked, row.drafted, row.accepted, row.emitted))
            if row.drafted:
                self.histogram[row.accepted] += 1
                if self._counters is not None:
                    self._counters.add(row.drafted, row.accepted)
        sums = [sum(asked for asked, _ in taken), sum(r.drafted for _, r in taken), sum(r.accepted for _, r in taken)]
        means = [value / len(taken) for value in sums]
        self.timeline.append((means[0], means[1], means[2], step.total_seconds))

    def end(self, state: State) -> None:
        """A call is over: log what it brought."""
        if not logger.isEnabledFor(logging.INFO):
            return
        s, steps = state.statistics, max(1, max(map(len, state.statistics.rows)))
        logger.info(
            "%s: %d tokens, %d steps, %.2f tokens per step, drafted %d, accepted %d (%.0f%%), %.2f s, policy %.0f us",
            state.strategy,
            s.emitted,
            s.steps,
            s.tokens_per_step,
            s.drafted,
            s.accepted,
            100 * s.acceptance_rate,
            s.seconds["total"],
            1e6 * s.seconds["policy"] / steps,
        )

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted, in the window."""
        drafted = sum(row[1] for row in self.window)
        return sum(row[2] for row in self.window) / drafted if drafted else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens per row step, in the window."""
        return sum(row[3] for row in self.window) / len(self.window) if self.window else 0.0

    @property
    def mean_depth(self) -> float:
        """Mean of the depth that was asked for, in the window; 0 means that speculation is off."""
        return sum(row[0] for row in self.window) / len(self.window) if self.window else 0.0

    def summary(self) -> str:
        """One line about the window."""
        if not any(row[1] for row in self.window):
            return f"last {len(self.window)} row steps: nothing was drafted"
        return (
            f"last {len(self.window)} row steps: {self.tokens_per_step:.2f} tokens per step, "
            f"{self.acceptance_rate:.0%} of guesses accepted, mean depth {self.mean_depth:.1f}"
        )

    def plot(self, path: str | Path) -> None:
        """Draw the timeline and the histogram into an image (PNG, SVG, PDF).

        Raises:
            ImportError: without matplotlib (`pip install hf-specgen[plot]`).
        """
        from hf_specgen.monitoring.plots import plot_monitor

        plot_monitor(self, path)


def _counters(wanted: bool | None) -> Counters | None:
    if wanted is False:
        return None
    try:
        from hf_specgen.monitoring.prometheus import counters
    except ImportError as error:
        if wanted is None:
            return None
        raise ImportError("counters need prometheus_client: pip install 'hf-specgen[monitor]'") from error
    return counters()
