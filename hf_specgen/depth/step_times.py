"""T(q) of a target on a CPU from the steps of its calls, so that measuring takes no pass.

The first step of the first adaptive call has no draft and gives T(1); every other size is timed by the first steps that
have it. The speed of a machine may change by a factor of two from one second to the next, with its clock rate or with
other processes. So each time is divided by the slowdown, the median of the last steps' seconds over T(q). Times are
thus kept at the speed of the first step, and their ratios are right whenever they were taken.

Rows of a batch end at different steps. T(q) of 8 rows begins at 8 tokens, so it cannot tell what drafts cost once a
single row is left. So T(q) is timed for each number of present rows up to a power of two; like the first step of all,
the first step with so few rows has no draft.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, sqrt
from statistics import median, median_low
from typing import Any

from hf_specgen import compat, saved_results
from hf_specgen.call import Call, memory
from hf_specgen.call_statistics import StepRecord
from hf_specgen.depth.calibrate import QUERIES, curve_key, lockstep_group, rows_key, shared_curve_key
from hf_specgen.depth.latency import CostCurve, interpolate

SAMPLES = 25
"""Steps of a size that time it; later ones leave T(q) as it is, so that decisions depend on the texts alone. With
fewer, the sizes whose times happen to be short are preferred for ever."""
SIZE_MULTIPLE = 8
"""Sizes above 16 are rounded up to a multiple of 8: trees of all sizes are verified, so that a single size rarely comes
twice."""
COMPUTE_BOUND_TOKENS = 64  # tokens of a pass from which on its time is assumed to grow in proportion
NUM_CONTRADICTIONS = 3
"""Later steps in a row that take less than half of the median and replace it: other processes delayed the first ones.
A change of the machine's speed does not cause them, since the slowdown includes it after two steps."""
SAVED = "latency"  # the kind of `saved_results`
THREAD = "thread"
"""In the seconds of a step: the time of the thread in the pass of the target, which other processes do not prolong."""


def learns_from_steps(model: Any) -> bool:
    """Whether the steps of a call time its passes: on a CPU, where they are not asynchronous, and on one rank."""
    return model is not None and compat.input_device(model).type == "cpu" and lockstep_group(model) is None


@dataclass(frozen=True)
class StepTimes:
    """Seconds of passes by tokens per row, all at one speed of the machine.

    The samples of a size are in the order of the steps: the first `SAMPLES` of them time it, further ones contradict
    these. Size 1 has one at least.
    """

    samples: Mapping[int, tuple[float, ...]]
    context: int  # cached tokens in each row
    batch: int  # rows

    def with_sample(self, size: int, seconds: float) -> StepTimes:
        """With another time of a size, where it has fewer than `SAMPLES`.

        Later times count only if `NUM_CONTRADICTIONS` in a row are less than half of the median.
        """
        earlier = self.samples.get(size, ())
        times = (*earlier, seconds)
        is_settled = len(earlier) >= SAMPLES
        if is_settled and 2 * seconds >= self.medians[size]:  # no contradiction: forget those before
            times = earlier[:SAMPLES]
        elif len(times) == SAMPLES + NUM_CONTRADICTIONS:  # begin anew with the contradictions
            times = times[SAMPLES:]
        return self if times == earlier else replace(self, samples={**self.samples, size: times})

    @classmethod
    def from_saved(cls, saved: Any) -> StepTimes | None:
        """The times of an earlier process; None if there are none that can be used."""
        try:
            samples = {int(size): tuple(map(float, times)) for size, times in saved["samples"].items()}
            times = cls(samples, int(saved["context"]), int(saved["batch"]))
            is_valid = all(0 < len(one) <= SAMPLES and 0 < min(one) <= max(one) < inf for one in samples.values())
            is_valid = is_valid and bool(times.curve)
        except (TypeError, KeyError, ValueError, AttributeError, OverflowError):
            return None
        return times if is_valid else None

    @cached_property
    def medians(self) -> dict[int, float]:
        """The lower median of each size that was timed more than once, and of size 1."""
        return {
            size: median_low(times[:SAMPLES]) for size, times in self.samples.items() if size == 1 or len(times) > 1
        }

    @cached_property
    def curve(self) -> CostCurve:
        """T(q): for each size the mean of its n samples' median, n times, and the time interpolated from others.

        A size with one time may have been delayed in it, and would not be tried again if it were taken for too slow:
        the time counts only if it is less than expected.
        """
        assumed = self._curve(self.medians)
        points = {1: self.medians[1]}
        for size in self.samples.keys() - {1}:
            times = self.samples[size][:SAMPLES]
            if size in self.medians:
                expected = self._expected(size)
                points[size] = (len(times) * self.medians[size] + expected) / (len(times) + 1)
            else:
                expected = assumed(size)
                points[size] = (min(times[0], expected) + expected) / 2
        return self._curve(points)

    def _expected(self, size: int) -> float:
        """The time of a size by the medians of the others: on the line between its neighbours, or as assumed."""
        others = sorted(self.medians.keys() - {size})
        if size > others[-1]:
            return self._curve({other: self.medians[other] for other in others})(size)
        return interpolate(size, others, [self.medians[other] for other in others])

    def _curve(self, points: Mapping[int, float]) -> CostCurve:
        """The curve through timed sizes; larger ones are assumed to be as fast as is plausible, so that they are tried.

        Before any other size than 1 is timed, 8 tokens take ⁴√8 times T(1). Sizes beyond the largest timed one lie on
        the line through T(1) and that size, but below √q, and from 64 tokens of all rows together on below q: passes
        over so many tokens are limited by arithmetic.
        """
        points = dict(points)
        largest = max(points)
        if largest == 1:
            largest = 8
            points[8] = points[1] * 8**0.25
        slope = max(0.0, points[largest] - points[1]) / (largest - 1)
        for size in sorted(QUERIES):
            if size > largest:
                on_line = points[largest] + slope * (size - largest)
                tokens, timed_tokens = self.batch * size, self.batch * largest
                growth = sqrt(min(tokens, COMPUTE_BOUND_TOKENS) / min(timed_tokens, COMPUTE_BOUND_TOKENS))
                growth *= max(tokens, COMPUTE_BOUND_TOKENS) / max(timed_tokens, COMPUTE_BOUND_TOKENS)
                points[size] = min(on_line, points[largest] * growth)
        sizes = tuple(sorted(points))
        return CostCurve(sizes, tuple(points[size] for size in sizes), self.context, self.batch)


class PassTimer:
    """Times passes of a target by the steps of one call, and keeps the times for later calls."""

    def __init__(self, call: Call, times: StepTimes):
        self._call = call
        self.times = times
        self._slowdowns = deque[float](maxlen=3)
        self._steps_at_unknown_speed = 0
        self._key = _key(call, times.batch)

    @cached_property
    def _shared_key(self) -> tuple[Hashable, ...]:
        """The key for all models of the architecture; it takes milliseconds, as it has the text of the config."""
        return _shared_key(self._call, self.times.batch)

    @classmethod
    def of_earlier_calls(cls, call: Call, rows: int) -> PassTimer | None:
        """A timer with the times of earlier calls of the model, or of its architecture; None if there are none."""
        times: StepTimes | None = memory.recall(call.model, _key(call, rows), lambda: None)
        if times is None:
            key = _shared_key(call, rows)
            times = memory.recall(type(call.model), key, lambda: None)
            times = times or StepTimes.from_saved(saved_results.load(SAVED, key))
        return None if times is None else cls(call, times)

    @classmethod
    def of_first_step(cls, call: Call, step: StepRecord) -> PassTimer | None:
        """A timer that starts with T(1) at the rows of the step; None if that is not a plain step."""
        if (timed := _timed(call, step, step.pass_rows)) is None or timed[0] != 1:
            return None
        timer = cls(call, StepTimes({1: (timed[1],)}, call.context_length, step.pass_rows))
        timer._slowdowns.append(1.0)
        timer._keep(1)
        return timer

    def observe(self, step: StepRecord) -> bool:
        """Use the time of a step for its size; returns whether T(q) has changed by it.

        The first step of a later call is of no use for T(q), but tells the slowdown if its size is timed already. If
        the first three have sizes that are not, the speed of the first call is assumed.
        """
        if (timed := _timed(self._call, step, self.times.batch)) is None:
            return False
        size, seconds = timed
        before = self.times
        if self._slowdowns:  # seconds at the speed of the first step
            self.times = before.with_sample(size, seconds / median(self._slowdowns))
        if size in self.times.medians:  # what was timed, not `curve`, which is shifted towards the time expected
            self._slowdowns.append(seconds / self.times.medians[size])
        elif not self._slowdowns:
            self._steps_at_unknown_speed += 1
            if self._steps_at_unknown_speed == self._slowdowns.maxlen:  # perhaps no step of the call has a timed size
                self._slowdowns.append(1.0)
        if self.times is before:
            return False
        self._keep(size)
        return True

    def _keep(self, size: int) -> None:
        """Keep the times for later calls, now and then for later processes."""
        memory.store(self._call.model, self._key, self.times)
        memory.store(type(self._call.model), self._shared_key, self.times)
        if len(self.times.samples[size]) in (3, SAMPLES):  # saved twice for each size
            samples = {number: times[:SAMPLES] for number, times in self.times.samples.items()}
            saved = {"samples": samples, "context": self.times.context, "batch": self.times.batch}
            saved_results.save(SAVED, self._shared_key, saved)


def _with_lower_bound(curve: CostCurve, largest: int, of_more_rows: CostCurve) -> CostCurve:
    """T(q) in which sizes beyond the largest timed one take at least T(1) plus what their tokens add at more rows."""
    first = curve.seconds[0]
    seconds = tuple(
        time if q <= largest else max(time, first + of_more_rows.seconds_of(q * curve.batch) - of_more_rows.seconds[0])
        for q, time in zip(curve.queries, curve.seconds, strict=True)
    )
    return replace(curve, seconds=seconds)


def _timed(call: Call, step: StepRecord, batch: int) -> tuple[int, float] | None:
    """Tokens per row of a step's pass and the thread's seconds in it, or None if they tell nothing of T(q)."""
    seconds = step.seconds.get(THREAD, 0.0)
    size = 1
    if step.tokens_per_row > 1:  # a few rows less than at first make a size smaller, but never that of a plain step
        size = max(2, round(step.pass_rows * step.tokens_per_row / batch))
    if size > 2 * SIZE_MULTIPLE:
        size = -(-size // SIZE_MULTIPLE) * SIZE_MULTIPLE
    is_timed = seconds > 0 and size <= max(QUERIES) and not call.state.other_rows
    return (size, seconds) if is_timed else None


def _key(call: Call, rows: int) -> tuple[Hashable, ...]:
    return "step times", *curve_key(call, rows)


def _shared_key(call: Call, rows: int) -> tuple[Hashable, ...]:
    return "step times", *shared_curve_key(call, rows)


class PassTimers:
    """The timers of a call, for each number of present rows up to a power of two."""

    def __init__(self, call: Call):
        self._call = call
        self._timers: dict[int, PassTimer] = {}
        self._rows = call.state.batch  # of the last step's pass
        self._recall()

    @property
    def needs_plain_step(self) -> bool:
        """Whether no step with so many rows as the last one has been timed."""
        return rows_key(self._rows) not in self._timers

    @property
    def curves(self) -> tuple[CostCurve, ...]:
        """T(q) by the number of rows, largest first, as if all were timed at the call's own context."""
        curves: list[CostCurve] = []
        for _, timer in sorted(self._timers.items(), reverse=True):
            curve = replace(timer.times.curve, context=max(1, self._call.context_length))
            curves.append(_with_lower_bound(curve, max(timer.times.samples), curves[-1]) if curves else curve)
        return tuple(curves)

    def observe(self, step: StepRecord) -> bool:
        """Use the time of a step for its number of rows; returns whether a T(q) has changed or was added by it."""
        self._rows = step.pass_rows
        timer = self._timers.get(rows_key(self._rows))
        if timer is not None:
            return timer.observe(step)
        if self._recall():
            return True
        timer = PassTimer.of_first_step(self._call, step)
        if timer is not None:
            self._timers[rows_key(self._rows)] = timer
        return timer is not None

    def _recall(self) -> bool:
        """Continue with the times that earlier calls have taken with so many rows; returns whether there are any."""
        timer = PassTimer.of_earlier_calls(self._call, self._rows)
        if timer is not None:
            self._timers[rows_key(self._rows)] = timer
        return timer is not None
