"""Speedup: throughput relative to plain decoding, each the sum of tokens divided by the sum of time."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate

from hf_specgen.evaluation.measure import speedup_interval

_DESCRIPTION = """Speedup: throughput relative to plain decoding, each the sum of tokens divided by the sum of time."""
_INPUTS = """
Args:
    tokens, seconds: of each request.
    plain_tokens, plain_seconds: of the same requests with plain decoding.
    resamples, seed: of the bootstrap, which resamples whole requests.
Returns:
    speedup; low and high: the ends of its confidence interval; differs: False if the interval includes 1.

Example:
    >>> metric = evaluate.load("benchmarks/metrics/speedup")
    >>> metric.compute(tokens=[10, 10], seconds=[1, 1], plain_tokens=[10, 10], plain_seconds=[2, 2])
    {'speedup': 2.0, 'low': 2.0, 'high': 2.0, 'differs': True}
"""
_CITATION = "Efron and Tibshirani, An Introduction to the Bootstrap, 1993, section 13.3"
_COLUMNS = ("tokens", "seconds", "plain_tokens", "plain_seconds")


class Speedup(evaluate.Metric):
    """See `_DESCRIPTION` and `_INPUTS`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({name: datasets.Value("float64") for name in _COLUMNS}),
        )

    def _compute(self, **columns: Any) -> dict[str, Any]:
        found = speedup_interval(**columns)
        return {"speedup": found.value, "low": found.low, "high": found.high, "differs": found.differs}
