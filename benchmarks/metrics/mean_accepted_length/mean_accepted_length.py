"""Mean accepted length, in both definitions in use, each under its own name."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate

from benchmarks.metrics.steps import statistics_of_steps

_DESCRIPTION = """Mean accepted length, in both definitions in use, each under its own name."""
_INPUTS = """
Args:
    drafted: draft tokens (tree nodes) of each verification step; 0 for a step without a draft.
    accepted: accepted draft tokens of each step.
    emitted: tokens that each step added to the output; accepted + 1 if left out (fewer where a stop cut the step).
Returns:
    mean_acceptance_length: 1 + accepted / drafts, over the steps with a draft (vLLM).
    tokens_per_step: tokens / steps, including the steps without a draft (Spec-Bench).

Example:
    >>> metric = evaluate.load("benchmarks/metrics/mean_accepted_length")
    >>> metric.compute(drafted=[3, 3, 0], accepted=[3, 0, 0])
    {'mean_acceptance_length': 2.5, 'tokens_per_step': 2.0}
"""
_CITATION = "Xia et al., Unlocking Efficiency in LLM Inference (Spec-Bench), 2024, section 6"


class MeanAcceptedLength(evaluate.Metric):
    """See `_DESCRIPTION` and `_INPUTS`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({"drafted": datasets.Value("int64"), "accepted": datasets.Value("int64")}),
        )

    def _compute(self, drafted: list[int], accepted: list[int], emitted: list[int] | None = None) -> dict[str, Any]:
        counts = statistics_of_steps(drafted, accepted, emitted=emitted)
        return {name: getattr(counts, name) for name in ("mean_acceptance_length", "tokens_per_step")}
