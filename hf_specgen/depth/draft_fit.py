"""Fits the latency of drafting to measured drafts: so much for a draft, for each pass, and for each further token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import median_low
from typing import Any

import numpy as np
from numpy.typing import NDArray

ITERATIONS = 12
"""Reweightings of the least squares, after which the deviations are within 4% of the least ones."""
PRIOR_WEIGHT = 1.0
"""Weight, in drafts, of the assumption that only passes take time; it decides where drafts do not differ enough. With 2
the latencies fitted to 12 simulated drafts are further from the true ones."""
SMALLEST_DEVIATION = 0.02
"""Deviation, relative to a pass, below which squares are minimised instead: weights stay finite."""

Floats = NDArray[np.floating[Any]]


def fit_draft(passes: Sequence[int], tokens: Sequence[int], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Fit `draft + pass * passes + token * (tokens - passes)` to the seconds of drafts; no part is negative.

    Absolute deviations by pass are minimised, so a few outliers, as on a shared machine, have little influence.

    Args:
        passes: of the drafter in each draft, at least one; or none in all of them.
        tokens: of all its passes.
        seconds: that it took.

    Returns:
        seconds of a draft, of a pass over one token, and of each further token of a pass.

    Example:
        >>> measured = [0.3 + 2.0 * passes + 0.1 * (tokens - passes) for passes, tokens in ((1, 1), (1, 9), (4, 4))]
        >>> [round(part, 1) for part in fit_draft([1, 1, 4] * 9, [1, 9, 4] * 9, measured * 9)]
        [0.3, 2.0, 0.1]
    """
    if not any(passes):
        return median_low(seconds), 0.0, 0.0
    count = np.asarray(passes, dtype=float)
    further = np.asarray(tokens) / count - 1
    second = np.sort(further)[-2:][0]  # no single draft of many tokens decides what a token takes
    terms = np.stack([1 / count, np.ones_like(count), np.minimum(further, second)], axis=1)
    times = np.asarray(seconds) / count
    unit = max(float(np.median(times)), 1e-12)
    # The drafts, and the assumption that a draft and a further token take no time of their own.
    terms = np.concatenate([terms, PRIOR_WEIGHT * np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])])
    times = np.concatenate([times / unit, [0.0, 0.0]])
    parts: Floats = np.array([0.0, 1.0, 0.0])
    for _ in range(ITERATIONS):
        weights = 1 / np.sqrt(np.maximum(np.abs(times - terms @ parts), SMALLEST_DEVIATION))
        parts = _non_negative(terms * weights[:, None], times * weights)
    draft, one_pass, token = (unit * parts).tolist()
    return draft, one_pass, token


def _non_negative(terms: Floats, values: Floats) -> Floats:
    """The least squares solution in which no part is negative: the best of those with some parts left out."""
    found, *_ = np.linalg.lstsq(terms, values, rcond=None)
    if (found >= 0).all():
        return found
    best, least = np.zeros(terms.shape[1]), float(values @ values)
    for size in range(1, terms.shape[1]):
        for kept in combinations(range(terms.shape[1]), size):
            parts = np.zeros(terms.shape[1])
            parts[list(kept)], *_ = np.linalg.lstsq(terms[:, kept], values, rcond=None)
            error = float(((terms @ parts - values) ** 2).sum())
            if (parts >= 0).all() and error < least:
                best, least = parts, error
    return best
