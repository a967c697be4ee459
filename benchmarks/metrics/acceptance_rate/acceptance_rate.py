"""Acceptance rate: accepted draft tokens over verified draft tokens."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate

from benchmarks.metrics.steps import statistics_of_steps

_DESCRIPTION = """Acceptance rate: accepted draft tokens over verified draft tokens."""
_INPUTS = """
Args:
    drafted: draft tokens (tree nodes) of each verification step; 0 for a step without a draft.
    accepted: accepted draft tokens of each step.
Returns:
    drafts (number of steps with a draft), drafted, accepted, acceptance_rate.

Example:
    >>> metric = evaluate.load("benchmarks/metrics/acceptance_rate")
    >>> metric.compute(drafted=[3, 3, 2], accepted=[3, 1, 0])
    {'drafts': 3, 'drafted': 8, 'accepted': 4, 'acceptance_rate': 0.5}
"""
_CITATION = "Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023"


class AcceptanceRate(evaluate.Metric):
    """See `_DESCRIPTION` and `_INPUTS`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({"drafted": datasets.Value("int64"), "accepted": datasets.Value("int64")}),
        )

    def _compute(self, drafted: list[int], accepted: list[int]) -> dict[str, Any]:
        counts = statistics_of_steps(drafted, accepted)
        return {name: getattr(counts, name) for name in ("drafts", "drafted", "accepted", "acceptance_rate")}
