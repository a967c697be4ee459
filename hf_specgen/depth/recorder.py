"""Estimates latencies from step times: those of the target by the median for each number of tokens per row, shrunk
towards a line through all medians, and those of drafting by a fit to the newest drafts.

The speed of a machine changes within seconds: other programs use its memory, its clock follows its temperature. So the
times of steps with a draft, and of drafting, are compared with those of the plain steps next to them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import log2
from statistics import median_low
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hf_specgen.depth.cost import CostCurve
from hf_specgen.depth.draft_fit import fit_draft
from hf_specgen.depth.latency import DraftLatency, StepLatency
from hf_specgen.depth.medians import MIN_MEASURED, median_line, medians_by_size

if TYPE_CHECKING:
    from hf_specgen.counters import StepRecord

GRID = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)
"""Sizes (tokens per row) that times are binned by. Small ones have a bin each, as kernels differ: on a CPU with AVX2,
a step of 3 or 7 tokens in float32 takes 1.4 times as long as one of 4 or 8."""
MEDIAN_WINDOW = 15
"""Newest measurements that a median is taken over: seven of them may be outliers."""
DRAFT_WINDOW = 48
"""Newest drafts that the latency of drafting is fitted to."""
PLAIN_WINDOW = 32
"""Newest plain steps that are kept, for the comparison with steps next to them."""
LINE_WEIGHT = 3.0
"""The line counts as this many measurements when a median is shrunk towards it. Where step times vary as on a shared
machine, simulated decisions lose 1.2% of the tokens per second of those by the true latencies, 1.7% without the line,
and 2.3% if times are not compared with those of plain steps either."""
PRIOR_SPREAD = 8.0
"""Weight of the prior in the slope of a regression: as much as that of two sizes four tokens apart."""
LATENCY_ERROR = 0.05
"""Error of the latency of two tokens, in plain steps, that its slope allows for; less for more tokens. Otherwise a step
of two tokens that was measured to be as fast as a plain one makes the next tree as large as possible."""
PLAIN_NEEDED, DRAFTED_NEEDED = 8, 48
"""Measured plain steps, and steps with a draft, after which a slice is fixed. On two shared cores, T(8) was then 1.1 to
1.4 T(1) in ten of eleven processes, and the latencies of a drafter's further token differed by a factor of 4. After 5
and 12 steps they differed by a factor of 8."""
STEPS_NEEDED, SELDOM_DRAFTED = 96, 12
"""Where drafts are rare, so many steps with so many drafts are enough."""
PLAIN_NEEDED_AGAIN = 2
"""Plain steps where the prior was measured: a plain step takes the time of up to a dozen tokens of copied text."""
REFIT_SHARE = 1 / 8
"""New steps, as a share of all, after which latencies that are still being learnt are estimated anew: it takes 1 ms."""
PLAIN_EVERY = 16
"""One step in this many is plain until enough plain steps are measured."""
MAX_CATCH_UP_TOKENS = 16
"""Unread tokens that a drafter processes in about the time of one pass; more are measured as its prefill."""


class _Measured(NamedTuple):
    """A time, and the number of the step it was measured in; of a draft also its passes and their tokens."""

    step: int
    seconds: float
    passes: int = 0
    tokens: int = 0


class LatencyRecorder:
    """Estimates the latencies of one slice: a number of rows and a context length. Not thread-safe by itself.

    Args:
        rows, context: number of rows and context length of the slice.
        prior: latencies of a similar slice, or the default of the device.
        measured: whether the prior was measured on this machine.
    """

    def __init__(self, rows: int, context: int, prior: StepLatency, measured: bool):
        self.rows, self.context, self._prior, self._measured = rows, context, prior, measured
        self._target: dict[int, deque[_Measured]] = {}  # steps less the time of drafting, by size in `GRID`
        self._drafts: deque[_Measured] = deque(maxlen=DRAFT_WINDOW)
        self._steps = self._drafted = 0
        self._has_drafted = False
        self._latest: tuple[int, StepLatency] | None = None
        self._prefills: deque[float] = deque(maxlen=MEDIAN_WINDOW)  # seconds for each token of a prompt

    def add(self, step: StepRecord, unread: int) -> None:
        """Add a step before which the drafter had not processed the last `unread` tokens of each row."""
        self._steps += 1
        draft = step.seconds.get("draft", 0.0)
        if "forward" in step.seconds:
            tokens = step.batch * step.tokens_per_row / self.rows  # the slice stands for as many rows or more
            sizes = GRID[1:] if step.tokens_per_row > 1 else GRID[:1]
            size = min(sizes, key=lambda size: abs(log2(size / tokens)))
            if size in self._target:  # the first step of each size, a warm-up, is dropped
                self._target[size].append(_Measured(self._steps, sum(step.seconds.values()) - draft))
                self._drafted += step.tokens_per_row > 1
            self._target.setdefault(size, deque(maxlen=PLAIN_WINDOW if size == 1 else MEDIAN_WINDOW))
        if any(step.requested):
            if self._has_drafted:  # the first draft is dropped too
                self._add_draft(step.passes, draft, unread, step.batch)
            self._has_drafted = True

    def _add_draft(self, passes: Sequence[int], seconds: float, unread: int, rows: int) -> None:
        if unread > MAX_CATCH_UP_TOKENS:
            usual = self._drafter(self._prior.drafter.scaled(0.0)).draft(passes)
            self._prefills.append(max(0.0, seconds - usual) / (unread * rows))
        else:
            # A pass over no tokens is one that the drafter left out.
            made = [tokens for tokens in passes if tokens]
            self._drafts.append(_Measured(self._steps, seconds, len(made), sum(made)))

    @property
    def wants_plain_step(self) -> bool:
        """Whether the next step should be plain, to measure its latency."""
        measured = len(self._plain)
        at_once = not self._measured and measured < 2
        return at_once or (measured < self._plain_needed and self._steps % PLAIN_EVERY == 0)

    @property
    def complete(self) -> bool:
        """Whether enough was measured to fix the slice."""
        needed = SELDOM_DRAFTED if self._steps >= STEPS_NEEDED else DRAFTED_NEEDED
        return len(self._plain) >= self._plain_needed and self._drafted >= needed

    @property
    def _plain_needed(self) -> int:
        return PLAIN_NEEDED_AGAIN if self._measured else PLAIN_NEEDED

    @property
    def _plain(self) -> Sequence[_Measured]:
        return self._target.get(1, ())

    def latest(self) -> StepLatency:
        """An estimate that is not older than `REFIT_SHARE` of the steps."""
        if self._latest is None or self._steps - self._latest[0] >= max(1, self._steps * REFIT_SHARE):
            self._latest = self._steps, self.estimate()
        return self._latest[1]

    def estimate(self, final: bool = False) -> StepLatency:
        """Latencies from the measurements so far: linear between sizes, and extrapolated by `_slope`.

        Args:
            final: whether sizes beyond the measured ones are assumed to be at least as expensive as in the prior: they
                will not be measured any more, and errors at small sizes may make large trees seem nearly free.
        """
        drafted = {size: self._relative(times) for size, times in self._target.items() if size > 1}
        seconds = medians_by_size(drafted)
        if self._plain:
            seconds = {1: median_low(one.seconds for one in self._plain), **seconds}
        if not seconds:
            return self._prior
        first, most = min(seconds), max(seconds)
        plain, reference = self._prior.target.by_tokens(self.rows * np.array([1.0, first])).tolist()
        seconds.setdefault(1, seconds[first] * plain / reference)
        seconds = self._shrunk(seconds)
        slope = max(self._slope(seconds), self._prior_slope(seconds) if final else 0.0)
        seconds.setdefault(GRID[-1], seconds[most] + slope * (GRID[-1] - most))
        # Some kernels are slower for fewer tokens; a step with a draft is never assumed to be faster than a plain one.
        points = {size: max(seconds[1], seconds[size]) for size in sorted(seconds)}
        curve = CostCurve(tuple(points), tuple(points.values()), self.context, self.rows)
        return StepLatency(curve, self._drafter(self._prior.drafter.scaled(seconds[1] / plain)))

    def _relative(self, measured: Iterable[_Measured]) -> list[float]:
        """Seconds of each, scaled to a machine on which the plain steps next to it would take the median plain time.

        Of the two nearest plain steps the faster one counts: other load only adds time.
        """
        if not self._plain:
            return [one.seconds for one in measured]
        usual = median_low(one.seconds for one in self._plain)

        def plain_seconds(step: int) -> float:
            nearest = sorted(self._plain, key=lambda plain: abs(plain.step - step))[:2]
            return min(plain.seconds for plain in nearest)

        return [usual * one.seconds / plain_seconds(one.step) for one in measured]

    def _shrunk(self, seconds: Mapping[int, float]) -> dict[int, float]:
        """The latencies; those of steps with a draft are shrunk towards a line through all of them, rising or level."""
        drafted = sorted((size, time) for size, time in seconds.items() if size > 1)
        if len(drafted) < 2:
            return dict(seconds)
        slope, at_zero = median_line(drafted)

        def shrink(size: int, time: float) -> float:
            weight = max(MIN_MEASURED, len(self._target.get(size, ())))
            return (weight * time + LINE_WEIGHT * (at_zero + slope * size)) / (weight + LINE_WEIGHT)

        return {size: time if size == 1 else shrink(size, time) for size, time in seconds.items()}

    def _slope(self, seconds: Mapping[int, float]) -> float:
        """Seconds of one more token per row beyond the largest measured size: a regression over the sizes of drafts.

        It is shrunk towards the prior, as kernels of neighbouring sizes may differ by more than sizes do. The slope
        from the plain step to the largest size is an upper bound only: a kernel for one token may be much faster.
        """
        prior = self._prior_slope(seconds)
        drafted = np.array([(size, time) for size, time in seconds.items() if size > 1]).T
        if not drafted.size:
            return prior
        sizes, times = drafted - drafted.mean(axis=1, keepdims=True)
        slope = (sizes @ times + PRIOR_SPREAD * prior) / (sizes @ sizes + PRIOR_SPREAD)
        most = max(seconds)
        steepest = (max(0.0, seconds[most] - seconds[1]) + LATENCY_ERROR * seconds[1] / (most - 1)) / (most - 1)
        return float(np.clip(slope, 0.0, steepest))

    def _prior_slope(self, seconds: Mapping[int, float]) -> float:
        """Seconds of one more token per row by the prior, from the second token on."""
        plain, second, largest = self._prior.target.by_tokens(self.rows * np.array([1.0, 2.0, GRID[-1]])).tolist()
        return float(max(0.0, (largest - second) / (GRID[-1] - 2) * seconds[1] / plain))

    def _drafter(self, latency: DraftLatency) -> DraftLatency:
        """The given latency of drafting, with measured values where there are any."""
        # Where drafts have passes, those without are none of the drafter's, as at the prefill.
        drafts = [one for one in self._drafts if one.passes] or list(self._drafts)
        if drafts:
            overhead, first, further = fit_draft(
                [one.passes for one in drafts], [one.tokens for one in drafts], self._relative(drafts)
            )
            latency = replace(latency, overhead=overhead)
            if drafts[0].passes:
                latency = replace(latency, tokens=(1, 2), seconds=(first, first + further))
        if self._prefills:
            latency = replace(latency, prefill=median_low(self._prefills))
        return latency
