"""Learns latencies from the times of steps: those of one number of rows and one context length at a time."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import replace
from math import log2
from statistics import median, median_low
from typing import TYPE_CHECKING

import numpy as np

from hf_specgen.depth.cost import CostCurve
from hf_specgen.depth.latency import DraftLatency, StepLatency

if TYPE_CHECKING:
    from hf_specgen.depth.policy import StepRecord

GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Tokens per row at which times are kept: half octaves, as kernels change at such sizes."""
KEPT = 7
"""Measurements that a median is taken of."""
PLAIN_NEEDED, DRAFTED_NEEDED = 5, 12
"""Measured steps after which a slice is fixed: so many that the median of plain steps survives two disturbed ones."""
PLAIN_EVERY = 8
"""One step in so many is plain until enough plain steps are measured."""
CATCHING_UP = 16
"""Tokens of plain steps that a drafter reads in about the time of one pass; more is measured as prefill."""
CONTRADICTION, CHECKED = 2.0, 33
"""How far measured times may depart from the profile, in the median of so many steps."""
NEGLIGIBLE = 0.05
"""Drafting that takes less than this share of a plain step is not checked: its times are mostly noise."""


class LatencyRecorder:
    """Learns one slice of a latency model.

    Target times are kept relative to a prior curve: where a size was measured its median counts, elsewhere the prior
    scaled to the measured sizes nearby.

    Args:
        rows, context: of the slice.
        prior: latencies under similar conditions, or the default of the device.
        measured: whether the prior was measured on this machine.
    """

    def __init__(self, rows: int, context: int, prior: StepLatency, measured: bool):
        self.rows, self.context, self._prior, self._measured = rows, context, prior, measured
        self._target: dict[int, deque[float]] = {}
        self._drafts: dict[tuple[int, int], deque[float]] = {}
        self._steps = self._drafted = 0
        self._has_drafted = False
        self._prefill_tokens = self._prefill_seconds = 0.0

    def add(self, step: StepRecord, unread: int) -> None:
        """Enter a step before which the drafter had not read the last `unread` tokens of each row."""
        self._steps += 1
        if "forward" in step.seconds:
            self._add_target(step)
        if any(step.requested):
            if self._has_drafted:
                self._add_draft(step, unread)
            self._has_drafted = True  # the first draft, in which kernels are prepared, is dropped

    def _add_target(self, step: StepRecord) -> None:
        size = min(GRID, key=lambda size: abs(log2(size / step.tokens_per_row)))
        if size not in self._target:
            self._target[size] = deque(maxlen=KEPT)  # the first of each size is dropped for the same reason
            return
        seconds = sum(step.seconds.values()) - step.seconds.get("draft", 0.0)
        expected = float(self._prior.target.by_tokens(step.batch * step.tokens_per_row))
        self._target[size].append(seconds / expected)
        self._drafted += step.tokens_per_row > 1

    def _add_draft(self, step: StepRecord, unread: int) -> None:
        seconds, tokens = step.seconds.get("draft", 0.0), sum(step.passes)
        if unread <= CATCHING_UP:
            width = 1 << round(log2(tokens / len(step.passes))) if tokens else 1
            self._drafts.setdefault((len(step.passes), width), deque(maxlen=KEPT)).append(seconds)
        elif self._drafts:
            self._prefill_tokens += unread * step.batch
            self._prefill_seconds += max(0.0, seconds - self._drafter(1.0).draft(step.passes))

    @property
    def wants_plain_step(self) -> bool:
        """Whether the next step should be plain to learn what that takes."""
        known = len(self._target.get(1, ()))
        at_once = not self._measured and known < 2
        return at_once or (known < PLAIN_NEEDED and self._steps % PLAIN_EVERY == 0)

    @property
    def complete(self) -> bool:
        """Whether enough was measured to fix the slice."""
        return len(self._target.get(1, ())) >= PLAIN_NEEDED and self._drafted >= DRAFTED_NEEDED

    def estimate(self) -> StepLatency:
        """Latencies by what was measured so far."""
        sizes = sorted(size for size, ratios in self._target.items() if ratios)
        if not sizes:
            return self._prior
        ratios = np.interp(GRID, sizes, [median_low(self._target[size]) for size in sizes])
        seconds = self._prior.target.by_tokens(self.rows * np.array(GRID)) * ratios
        # Some kernels are slower for few tokens than for more; but no step with a draft is faster than a plain one.
        curve = CostCurve(GRID, tuple(np.maximum(seconds, seconds[0]).tolist()), self.context, self.rows)
        return StepLatency(curve, self._drafter(float(ratios[0])))

    def _drafter(self, scale: float) -> DraftLatency:
        """What drafting takes; what was not measured is `scale` times the prior."""
        latency = self._prior.drafter.scaled(scale)
        if self._prefill_tokens:
            latency = replace(latency, prefill=self._prefill_seconds / self._prefill_tokens)
        if not self._drafts:
            return latency
        medians = {key: median_low(values) for key, values in self._drafts.items()}
        overhead = _overhead([count for count, _ in medians], list(medians.values()))
        by_width: dict[int, list[float]] = defaultdict(list)
        for (count, width), seconds in medians.items():
            if count:
                by_width[width].append(max(0.0, seconds - overhead) / count)
        if not by_width:
            return replace(latency, overhead=overhead)
        widths = sorted(by_width)
        rising = np.maximum.accumulate([median(by_width[width]) for width in widths])  # more tokens take no less
        return replace(latency, tokens=tuple(widths), seconds=tuple(rising.tolist()), overhead=overhead)


def _overhead(passes: list[int], seconds: list[float]) -> float:
    """Seconds of a draft without passes: the intercept of a straight line through the times by number of passes.

    With one number of passes only, all of their time is taken to be in proportion to them.
    """
    if max(passes) == 0:
        return seconds[0]
    if max(passes) == min(passes):
        return 0.0
    slope, intercept = np.polyfit(passes, seconds, 1)
    return float(np.clip(intercept, 0.0, min(seconds))) if slope > 0 else float(np.mean(seconds))


class ProfileCheck:
    """Compares the times of a call's steps with a profile.

    Only the ratios between plain steps, steps with drafts and drafting count: on a machine that is busy or uniformly
    slower, decisions stay right.
    """

    def __init__(self) -> None:
        self._ratios: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=CHECKED))
        self._steps = 0

    def add(self, step: StepRecord, expected: StepLatency, unread: int) -> float:
        """Enter a step; returns the factor by which kinds of steps depart from each other, 1.0 if that is unknown."""
        draft, plain = step.seconds.get("draft", 0.0), float(expected.target.by_tokens(step.batch))
        if "forward" in step.seconds:
            seconds = float(expected.target.by_tokens(step.batch * step.tokens_per_row))
            kind = "plain" if step.tokens_per_row == 1 else "drafted"
            self._ratios[kind].append((sum(step.seconds.values()) - draft) / seconds)
        if any(step.requested) and unread <= CATCHING_UP:
            seconds = expected.drafter.draft(step.passes)
            if max(seconds, draft) > NEGLIGIBLE * plain:
                self._ratios["drafting"].append(draft / max(seconds, NEGLIGIBLE * plain))
        self._steps += 1
        if self._steps % CHECKED:
            return 1.0
        medians = [median(ratios) for ratios in self._ratios.values() if len(ratios) == CHECKED]
        return max(medians) / max(min(medians), 1e-9) if medians else 1.0
