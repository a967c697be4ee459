"""Whether two ways of computing logits agree up to rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

MAX_ERROR = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Largest difference between two logits that counts as rounding, in standard deviations of the logits. A token at a
wrong position or a wrong mask was off by 0.03 and more on random models of 189 types."""
MAX_MEDIAN_ERROR = 0.1
"""The same in half precision, for the median over positions: single positions may differ where a router of experts has
a near-tie."""


def difference(reference: torch.Tensor, logits: torch.Tensor) -> float:
    """The largest difference, in standard deviations of the reference; entries that are not finite in both agree."""
    finite = reference.isfinite()
    if not torch.equal(reference.nan_to_num()[~finite], logits.nan_to_num()[~finite]):
        return math.inf
    if not bool(logits[finite].isfinite().all()):
        return math.inf
    if not bool(finite.any()):
        return 0.0
    deviation = reference[finite].std().clamp(min=1e-6)
    return float(((reference - logits)[finite].abs().amax() / deviation).item())


def is_rounding(differences: Sequence[float], dtype: torch.dtype) -> bool:
    """Whether differences of logits at several positions are within rounding.

    Args:
        differences: of each position.
        dtype: in which the model computes.
    """
    limit = MAX_ERROR.get(dtype)
    if limit is None:
        return sorted(differences)[len(differences) // 2] <= MAX_MEDIAN_ERROR
    return max(differences) <= limit
