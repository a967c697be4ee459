"""Bootstrap confidence intervals of a speedup (a ratio of sums)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Interval:
    """A ratio and its confidence interval.

    Args:
        value: the ratio over all samples.
        low, high: ends of the confidence interval.

    Example:
        >>> str(Interval(1.32, 1.21, 1.40)), str(Interval(1.02, 0.97, 1.08))
        ('1.32x (1.21-1.40)', 'no difference (0.97-1.08)')
    """

    value: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """False if the interval includes 1: the measurement shows no difference."""
        return not self.low <= 1 <= self.high

    def __str__(self) -> str:
        ratio = f"{self.value:.2f}x" if self.differs else "no difference"
        return f"{ratio} ({self.low:.2f}-{self.high:.2f})"


def speedup_interval(
    tokens: Sequence[float],
    seconds: Sequence[float],
    plain_tokens: Sequence[float],
    plain_seconds: Sequence[float],
    *,
    resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Ratio of two throughputs, each the sum of tokens divided by the sum of time, with its confidence interval.

    The bootstrap is paired: it resamples requests with the times of both sides together. Both ran on the same prompts
    at the same time, so variation that affects both sides alike does not widen the interval.

    Args:
        tokens, seconds: of each request.
        plain_tokens, plain_seconds: of the same requests with plain decoding.
        resamples: number of bootstrap samples.
        confidence: level of the interval, between 0 and 1.
        seed: of the resampling.

    Raises:
        ValueError: if the lists are empty, differ in length, contain a time of 0, or a number is out of range.

    Example:
        >>> speedup_interval([10, 10], [1, 1], [10, 10], [2, 2])
        Interval(value=2.0, low=2.0, high=2.0)

    Source: Efron & Tibshirani, "An Introduction to the Bootstrap" (1993), section 13.3 (the percentile interval).
    """
    columns = [np.asarray(column, dtype=float) for column in (tokens, seconds, plain_tokens, plain_seconds)]
    sizes = {len(column) for column in columns}
    if len(sizes) != 1 or sizes == {0}:
        raise ValueError(f"need the same number of requests on both sides, at least 1, got {sorted(sizes)}")
    if min(columns[1].min(), columns[3].min()) <= 0:
        raise ValueError("the time of a request must be positive")
    if not 0 < confidence < 1 or resamples < 1:
        raise ValueError(f"confidence must be between 0 and 1 and resamples positive, got {confidence}, {resamples}")
    (count,) = sizes
    drawn = np.random.default_rng(seed).integers(count, size=(resamples, count))
    ratios = _ratio([column[drawn].sum(axis=1) for column in columns])
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(ratios, [tail, 100 - tail])
    return Interval(float(_ratio([column.sum() for column in columns])), float(low), float(high))


def _ratio(sums: Sequence[np.ndarray]) -> np.ndarray:
    tokens, seconds, plain_tokens, plain_seconds = sums
    return (tokens / seconds) / (plain_tokens / plain_seconds)
