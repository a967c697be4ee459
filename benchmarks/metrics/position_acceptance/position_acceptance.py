"""Acceptance by position in the draft: share of the drafts that reach a position in which it was accepted."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate

from benchmarks.metrics.steps import statistics_of_steps

_DESCRIPTION = (
    """Acceptance by position in the draft: share of the drafts that reach a position in which it was accepted."""
)
_INPUTS = """
Args:
    drafted: draft tokens (tree nodes) of each verification step; 0 for a step without a draft.
    accepted: accepted draft tokens of each step.
    depths: depth of each draft, for trees; `drafted` if left out.
Returns:
    drafted_per_position, accepted_per_position, acceptance_rate_per_position: lists, from position 1.

Example:
    >>> metric = evaluate.load("benchmarks/metrics/position_acceptance")
    >>> metric.compute(drafted=[3, 3, 2], accepted=[3, 1, 0])["accepted_per_position"]
    [2, 1, 1]
"""
_CITATION = "Kwon et al., vLLM: spec_decode_num_accepted_tokens_per_pos"


class PositionAcceptance(evaluate.Metric):
    """See `_DESCRIPTION` and `_INPUTS`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({"drafted": datasets.Value("int64"), "accepted": datasets.Value("int64")}),
        )

    def _compute(self, drafted: list[int], accepted: list[int], depths: list[int] | None = None) -> dict[str, Any]:
        counts = statistics_of_steps(drafted, accepted, depths=depths)
        names = ("drafted_per_position", "accepted_per_position", "acceptance_rate_per_position")
        return {name: getattr(counts, name) for name in names}
