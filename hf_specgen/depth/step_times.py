"""Estimates T(q), the seconds of a target's pass over q tokens per row, on a CPU, from decoding steps, without passes.

The speed of a machine may change by a factor of two from one second to the next, with its clock rate or with other
processes, so that the times of two sizes are not comparable as they are. The logarithm of a step's time is the sum of
three terms: log T(1) at the speed that the machine has in this step, log(T(q) / T(1)), and noise. The first is a random
walk over the steps, the second is constant for each size. Every step updates the normal distribution of these two,
as in a Kalman filter. So each size is compared with the steps before and after it, and a size that has had few steps
remains uncertain, instead of being taken for as fast as the machine was in them.

The first step of the first adaptive call has no draft and gives T(1). If it was delayed, drafts seem to take no time,
so that no other step would be without one. So the steps after 8, 16 and 32 steps have no draft either, and so on.

Rows of a batch end at different steps. T(q) of 8 rows begins at 8 tokens, so it does not have the cost of drafts once
a single row is left. So T(q) is timed for each number of present rows up to a power of two; like the first step of all,
the first step with at most half as many rows has no draft.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, log, pi, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np

from hf_specgen import compat, saved_results
from hf_specgen.call import Call, memory
from hf_specgen.call_statistics import StepRecord
from hf_specgen.depth.calibrate import QUERIES, curve_key, lockstep_group, rows_key, shared_curve_key
from hf_specgen.depth.latency import CostCurve
from hf_specgen.device_tree import Floats

SIZES = (*range(1, 17), *range(24, 65, 8))
"""Tokens per row that are distinguished: trees of all sizes are verified, so that a large one rarely comes twice."""

# Standard deviations of logarithms of seconds, before any step; half or twice of each gives nearly the same T(q).
STEP_NOISE = 0.08  # of a step's time
SPEED_CHANGE = 0.05  # of the machine's speed from a step to the next
CALL_SPEED_CHANGE = 0.3  # of the machine's speed from a call to the next
FIRST_NOISE = 0.3  # of the time of the first step, which has no earlier steps to compare it with
DOUBLING = 0.2  # of T(2q) / T(q), whose mean is 2^GROWTH
GROWTH = 0.25
DEGREES_OF_FREEDOM = 3.0  # of Student's t-distribution of the noise: few, as some steps are delayed

SETTLED = 25
"""Steps of a size after which its further steps alone cause no update: decisions then depend on the texts alone."""
STEPS_PER_UPDATE = 8
"""Steps by which T(q) is updated at once; fewer if an eighth of all is new, or a size has had two at most."""
FIRST_STEPS = 8  # after which a second step has no draft, and another one whenever there are twice as many steps
COMPUTE_BOUND_TOKENS = 64  # tokens of a pass from which on its time is assumed to grow in proportion
MAX_SAVED = 20.0  # of logarithms and their covariances in files
SAVED = "latency"  # the kind of `saved_results`
THREAD = "thread"
"""In the seconds of a step: the time of the thread in the pass of the target, which other processes do not prolong."""


def learns_from_steps(model: Any) -> bool:
    """Whether the steps of a call time its passes: on a CPU, where they are not asynchronous, and on one rank."""
    return model is not None and compat.input_device(model).type == "cpu" and lockstep_group(model) is None


def _prior_covariance() -> Floats:
    """`[sizes, sizes]` of log(T(q) / T(1)): independent changes from each doubling of q to the next."""
    doublings = np.log2(SIZES)
    return DOUBLING**2 * np.minimum.outer(doublings, doublings)


@dataclass(frozen=True, eq=False)
class CurvePosterior:
    """The posterior distribution of T(q) / T(1) by tokens per row, and of T(1) at the machine's present speed.

    Entry 0 of `means` and `covariance` is log T(1), whose ratio to itself needs none; entry i > 0 is log(T(q) / T(1))
    for q = `SIZES[i]`.
    """

    means: Floats  # [sizes]
    covariance: Floats  # [sizes, sizes]
    counts: Mapping[int, int]  # steps of each size; size 1 has one at least
    context: int  # cached tokens in each row
    batch: int  # rows

    @classmethod
    def of_plain_step(cls, seconds: float, context: int, batch: int) -> CurvePosterior:
        """The distribution after the first step."""
        means = GROWTH * np.log(SIZES)
        means[0] = log(seconds)
        covariance = _prior_covariance()
        covariance[0, 0] = FIRST_NOISE**2
        return cls(means, covariance, {1: 1}, context, batch)

    def with_step(self, size: int, seconds: float) -> CurvePosterior:
        """The distribution after another step: the log of its seconds is the sum of one or two entries and noise."""
        covariance = self.covariance.copy()
        covariance[0, 0] += SPEED_CHANGE**2
        terms = [0] if size == 1 else [0, SIZES.index(size)]
        covariance_with_sum = covariance[terms].sum(axis=0)
        variance = covariance_with_sum[terms].sum()
        innovation = log(seconds) - self.means[terms].sum()
        # Noise of Student's t-distribution, as a normal one with a larger variance if the time is far from expected.
        relative = innovation**2 / (variance + STEP_NOISE**2)
        noise = STEP_NOISE**2 * max(1.0, (DEGREES_OF_FREEDOM + relative) / (DEGREES_OF_FREEDOM + 1))
        counts = {**self.counts, size: self.counts.get(size, 0) + 1}
        posterior = CurvePosterior(self.means, covariance, counts, self.context, self.batch)
        return posterior._conditioned_on(innovation, covariance_with_sum, variance + noise)

    def _conditioned_on(self, innovation: float, covariance_with_sum: Floats, variance: float) -> CurvePosterior:
        """The distribution given the observation of a sum of entries and noise.

        Args:
            innovation: the observed value less the mean of the sum.
            covariance_with_sum: `[sizes]` the covariance of each entry with the sum.
            variance: of the observed value.
        """
        gain = covariance_with_sum / variance
        means = self.means + gain * innovation
        covariance = self.covariance - gain[:, None] * covariance_with_sum
        return CurvePosterior(means, covariance, self.counts, self.context, self.batch)

    def with_unknown_speed(self) -> CurvePosterior:
        """The distribution at the first step of another call, when the machine may have another speed."""
        covariance = self.covariance.copy()
        covariance[0, 0] += CALL_SPEED_CHANGE**2
        return replace(self, covariance=covariance)

    def saved(self) -> dict[str, Any]:
        """The distribution as plain values, for `from_saved`."""
        arrays = {"means": self.means.tolist(), "covariance": self.covariance.tolist()}
        return {**arrays, "counts": self.counts, "context": self.context, "batch": self.batch}

    @classmethod
    def from_saved(cls, saved: Any) -> CurvePosterior | None:
        """The distribution that an earlier process has saved; None if it cannot be used."""
        try:
            means = np.array(saved["means"], dtype=float)
            covariance = np.array(saved["covariance"], dtype=float)
            counts = {int(size): int(count) for size, count in saved["counts"].items()}
            posterior = cls(means, covariance, counts, int(saved["context"]), int(saved["batch"]))
            has_shapes = means.shape == (len(SIZES),) and covariance.shape == 2 * (len(SIZES),)
            is_bounded = np.abs(means).max() < MAX_SAVED and np.abs(covariance).max() < MAX_SAVED
            has_steps = 1 in counts and counts.keys() <= set(SIZES) and min(counts.values()) > 0
            # No sum of terms has a negative variance.
            if not (has_shapes and is_bounded and has_steps and np.linalg.eigvalsh(covariance).min() > -1e-9):
                return None
            _ = posterior.curve  # raises a ValueError if T(q) is not finite
            return posterior
        except (TypeError, KeyError, ValueError, AttributeError, OverflowError, np.linalg.LinAlgError):
            return None

    @cached_property
    def curve(self) -> CostCurve:
        """T(q): the means of the sizes that had steps, given that no pass takes less than T(1).

        A size with one step may have been delayed in it, and would not be tried again if it were taken for too slow:
        the step counts only if it took less than expected.
        """
        first = exp(self.means[0])
        seconds = {size: first * exp(self._mean_above_zero(size)) for size in self.counts.keys() - {1}}
        seconds[1] = first
        certain = {size: seconds[size] for size, count in self.counts.items() if count > 1 or size == 1}
        expected = self._curve(certain)
        for size in seconds.keys() - certain.keys():
            seconds[size] = min(seconds[size], expected(size))
        return self._curve(seconds)

    def _mean_above_zero(self, size: int) -> float:
        """The mean of log(T(q) / T(1)), given that it is positive: that of a truncated normal distribution."""
        index = SIZES.index(size)
        deviation = sqrt(self.covariance[index, index])
        relative = self.means[index] / deviation
        if relative < -5:  # the density and the probability vanish
            return 0.0
        density = exp(-(relative**2) / 2) / sqrt(2 * pi)
        return float(self.means[index] + deviation * density / NormalDist().cdf(relative))

    def _curve(self, points: Mapping[int, float]) -> CostCurve:
        """The curve through timed sizes; larger ones are assumed to be as fast as is plausible, so that they are tried.

        Before any other size than 1 is timed, 8 tokens take ⁴√8 times T(1). Sizes beyond the largest timed one lie on
        the line through T(1) and that size, but below √q, and from 64 tokens of all rows together on below q: larger
        passes are limited by arithmetic.
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


class CurveEstimator:
    """Estimates T(q) at one number of rows from the steps of a call, and keeps the posterior for later calls."""

    def __init__(self, call: Call, posterior: CurvePosterior):
        self._call = call
        self.posterior = posterior
        self._new_steps: list[tuple[int, float]] = []  # sizes and seconds that the posterior does not have yet
        self._counts = Counter(posterior.counts)  # steps of each size, the new ones included
        self._key = _posterior_key(call, posterior.batch)

    @cached_property
    def _shared_key(self) -> tuple[Hashable, ...]:
        """The key for other models and later processes; made when it is first needed, as that takes milliseconds."""
        return _shared_posterior_key(self._call, self.posterior.batch)

    @classmethod
    def of_earlier_calls(cls, call: Call, rows: int) -> CurveEstimator | None:
        """An estimator with what earlier calls of the model or its architecture have kept; None without these."""
        posterior: CurvePosterior | None = memory.recall(call.model, _posterior_key(call, rows), lambda: None)
        if posterior is None:
            key = _shared_posterior_key(call, rows)
            posterior = memory.recall(type(call.model), key, lambda: None)
            posterior = posterior or CurvePosterior.from_saved(saved_results.load(SAVED, key))
        return None if posterior is None else cls(call, posterior.with_unknown_speed())

    @classmethod
    def of_first_step(cls, call: Call, step: StepRecord) -> CurveEstimator | None:
        """An estimator that starts with T(1) at the rows of the step; None if that is not a plain step."""
        if (timed := _size_and_seconds(call, step, step.pass_rows)) is None or timed[0] != 1:
            return None
        estimator = cls(call, CurvePosterior.of_plain_step(timed[1], call.context_length, step.pass_rows))
        estimator._keep()
        return estimator

    @property
    def needs_plain_step(self) -> bool:
        """Whether the next step should have no draft, since few of the steps so far had none."""
        plain = self._counts[1]
        return plain < SETTLED and self._counts.total() >= FIRST_STEPS * 2 ** (plain - 1)

    def observe(self, step: StepRecord) -> bool:
        """Use the time of a step for its size; returns whether T(q) has changed by it."""
        if (timed := _size_and_seconds(self._call, step, self.posterior.batch)) is None:
            return False
        size, _ = timed
        self._new_steps.append(timed)
        self._counts[size] += 1
        steps_per_update = min(STEPS_PER_UPDATE, self._counts.total() / 8)
        if self._counts[size] > 2 and len(self._new_steps) < steps_per_update:
            return False
        # Use all new steps: the machine's speed is learned from them even if all of their sizes are settled.
        is_settled = True
        for size, seconds in self._new_steps:
            self.posterior = self.posterior.with_step(size, seconds)
            is_settled = is_settled and self.posterior.counts[size] > SETTLED
        self._new_steps.clear()
        if not is_settled:
            self._keep()
        return not is_settled

    def _keep(self) -> None:
        """Keep the posterior for later calls, other models of the architecture, and later processes."""
        memory.store(self._call.model, self._key, self.posterior)
        memory.store(type(self._call.model), self._shared_key, self.posterior)
        saved_results.save(SAVED, self._shared_key, self.posterior.saved())


def _with_lower_bound(curve: CostCurve, largest: int, of_more_rows: CostCurve) -> CostCurve:
    """T(q) in which sizes beyond the largest timed one take at least T(1) plus what their tokens add at more rows."""
    first = curve.seconds[0]
    seconds = tuple(
        time if q <= largest else max(time, first + of_more_rows.seconds_of(q * curve.batch) - of_more_rows.seconds[0])
        for q, time in zip(curve.queries, curve.seconds, strict=True)
    )
    return replace(curve, seconds=seconds)


def _size_and_seconds(call: Call, step: StepRecord, batch: int) -> tuple[int, float] | None:
    """Tokens per row of a step's pass and the thread's seconds in it, or None if T(q) cannot be learned from them."""
    seconds = step.seconds.get(THREAD, 0.0)
    size = 1
    if step.tokens_per_row > 1:  # a few rows less than at first make a size smaller, but never that of a plain step
        size = max(2, round(step.pass_rows * step.tokens_per_row / batch))
    if seconds <= 0 or size > SIZES[-1] or call.state.other_rows:
        return None
    return next(larger for larger in SIZES if larger >= size), seconds


def _posterior_key(call: Call, rows: int) -> tuple[Hashable, ...]:
    """The key of a posterior for calls of the same model."""
    return "step times", *curve_key(call, rows)


def _shared_posterior_key(call: Call, rows: int) -> tuple[Hashable, ...]:
    """The key of a posterior for all models of the architecture, also in later processes."""
    return "step times", *shared_curve_key(call, rows)


class TargetLatencyEstimator:
    """Estimates T(q) of the target in a call, by a `CurveEstimator` for each number of rows up to a power of two."""

    def __init__(self, call: Call):
        self._call = call
        self._estimators: dict[int, CurveEstimator] = {}
        self._rows = call.state.batch  # of the last step's pass
        self._recall()

    @property
    def needs_plain_step(self) -> bool:
        """Whether few plain steps with as many rows as the last step have been timed, or none."""
        estimator = self._estimators.get(rows_key(self._rows))
        return estimator is None or estimator.needs_plain_step

    @property
    def curves(self) -> tuple[CostCurve, ...]:
        """T(q) by the number of rows, largest first, as if all were timed at the call's own context."""
        curves: list[CostCurve] = []
        for _, estimator in sorted(self._estimators.items(), reverse=True):
            curve = replace(estimator.posterior.curve, context=max(1, self._call.context_length))
            curves.append(_with_lower_bound(curve, max(estimator.posterior.counts), curves[-1]) if curves else curve)
        return tuple(curves)

    def observe(self, step: StepRecord) -> bool:
        """Use the time of a step for its number of rows; returns whether a T(q) has changed or was added by it."""
        self._rows = step.pass_rows
        estimator = self._estimators.get(rows_key(self._rows))
        if estimator is not None:
            return estimator.observe(step)
        if self._recall():
            return True
        estimator = CurveEstimator.of_first_step(self._call, step)
        if estimator is not None:
            self._estimators[rows_key(self._rows)] = estimator
        return estimator is not None

    def _recall(self) -> bool:
        """Continue with what earlier calls have kept for the rows of the last step; returns whether there is any."""
        estimator = CurveEstimator.of_earlier_calls(self._call, self._rows)
        if estimator is not None:
            self._estimators[rows_key(self._rows)] = estimator
        return estimator is not None
