"""Acceptance of drafts as a metric of `evaluate`: `evaluate.load("benchmarks/acceptance.py")`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate

from hf_specgen import Statistics
from hf_specgen.call_statistics import RowStep

INPUTS = """
Args:
    drafted: draft tokens (tree nodes) of each verification step; 0 for a step without a draft.
    accepted: accepted draft tokens of each step.
    emitted: tokens that each step added to the output; accepted + 1 if left out (fewer where a stop cut the step).
    depths: depth of each draft, for trees; `drafted` if left out.
Returns:
    drafts, drafted, accepted: number of steps with a draft, and of tokens.
    acceptance_rate: accepted / drafted.
    mean_acceptance_length: 1 + accepted / drafts, over the steps with a draft (vLLM).
    tokens_per_step: tokens / steps, including the steps without a draft (Spec-Bench's mean accepted length).
    acceptance_rate_per_position: of the drafts that reach a position, the fraction in which it was accepted.

Example:
    >>> found = evaluate.load("benchmarks/acceptance.py").compute(drafted=[3, 3, 2], accepted=[3, 1, 0])
    >>> found["acceptance_rate"], found["acceptance_rate_per_position"]
    (0.5, [0.6666666666666666, 0.3333333333333333, 0.5])
"""
CITATION = "Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023; Spec-Bench, 2024"
RESULTS = ("drafts", "drafted", "accepted", "acceptance_rate", "mean_acceptance_length", "tokens_per_step")
PER_POSITION = "acceptance_rate_per_position"


class Acceptance(evaluate.Metric):
    """See `INPUTS`."""

    def _info(self) -> evaluate.MetricInfo:
        features = {"drafted": datasets.Value("int64"), "accepted": datasets.Value("int64")}
        return evaluate.MetricInfo(
            description=str(__doc__), citation=CITATION, inputs_description=INPUTS, features=datasets.Features(features)
        )

    def _compute(
        self,
        drafted: Sequence[int],
        accepted: Sequence[int],
        emitted: Sequence[int] | None = None,
        depths: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        emitted = [count + 1 for count in accepted] if emitted is None else emitted
        depths = drafted if depths is None else depths
        steps = [RowStep(*map(int, step)) for step in zip(drafted, depths, accepted, emitted, strict=True)]
        for step in steps:
            if not 0 <= step.accepted <= step.depth <= step.drafted:
                raise ValueError(f"need 0 <= accepted <= depth <= drafted, got {step}")
        counts = Statistics([steps])
        return {name: getattr(counts, name) for name in (*RESULTS, PER_POSITION)}
