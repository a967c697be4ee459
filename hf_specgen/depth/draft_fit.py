"""Fits the latency of drafting to measured drafts: so much for a draft, for each pass, and for each further token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

ITERATIONS = 12
"""Reweightings of the least squares, after which the least absolute deviations are found to about 1%."""
PRIOR_WEIGHT = 2.0
"""Weight, in drafts, of the assumption that only passes take time; it decides where drafts do not differ enough. If a
draft without passes was measured, it is not assumed that such a draft takes no time."""
SMALLEST_DEVIATION = 0.02
"""Deviation, relative to a pass, below which a draft counts no more than others."""


def fit_draft(passes: Sequence[int], tokens: Sequence[int], seconds: Sequence[float]) -> tuple[float, float, float]:
    """The least absolute deviations of `draft + pass * passes + token * (tokens - passes)` from the seconds.

    So a few outliers, as on a shared machine, have little influence.

    Args:
        passes: of the drafter in each draft.
        tokens: of all its passes.
        seconds: that it took.

    Returns:
        seconds of a draft, of a pass over one token, and of each further token of a pass.

    Example:
        >>> measured = [0.3 + 2.0 * passes + 0.1 * (tokens - passes) for passes, tokens in ((1, 1), (1, 9), (4, 4))]
        >>> [round(part, 1) for part in fit_draft([1, 1, 4] * 9, [1, 9, 4] * 9, measured * 9)]
        [0.3, 2.0, 0.1]
    """
    count = np.asarray(passes, dtype=float)
    each = np.maximum(count, 1)
    further = (np.asarray(tokens) - count) / each
    second = np.sort(further)[-2:][0]  # no single draft of many tokens decides what a token takes
    # By pass, as errors are larger where there are more of them.
    terms = np.stack([1 / each, count / each, np.minimum(further, second)], axis=1)
    unit = max(float(np.median(np.asarray(seconds) / each)), 1e-12)
    times = np.asarray(seconds) / each / unit
    # The drafts, and the assumption that a draft and a further token take no time of their own.
    prior = PRIOR_WEIGHT * np.array([[float(count.all()), 0.0, 0.0], [0.0, 0.0, 1.0]])
    terms, times = np.concatenate([terms, prior]), np.concatenate([times, [0.0, 0.0]])
    parts: NDArray[Any] = np.array([0.0, 1.0, 0.0])
    for _ in range(ITERATIONS):
        weights = 1 / np.sqrt(np.maximum(np.abs(times - terms @ parts), SMALLEST_DEVIATION))
        found, *_ = np.linalg.lstsq(terms * weights[:, None], times * weights, rcond=None)
        parts = np.maximum(found, 0.0)
    draft, one_pass, token = (unit * parts).tolist()
    return draft, one_pass, token
