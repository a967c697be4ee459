"""Projects the speedup of a call from its forward passes and a latency profile, without measuring any time.

The projection is deterministic and the same on every machine: the speedup to expect on a machine with the latencies of
the profile. Only decoding counts; the prefill is left out for both speculative and plain decoding. A prefill in which
draft tokens were verified counts as one step of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from hf_specgen.call_statistics import Statistics, StepRecord
from hf_specgen.candidates.base import Candidates
from hf_specgen.depth import LatencyModel

GPU_LIKE = Path(__file__).parents[1] / "profiles" / "gpu_like.json"
"""Latencies as assumed for a GPU: where depths are decided by them, counts are the same on every machine."""


@dataclass(frozen=True)
class Projection:
    """Decoding time by a latency profile, in its unit: with drafts, and of plain decoding of the same tokens."""

    seconds: float = 0.0
    plain_seconds: float = 0.0

    @property
    def speedup(self) -> float:
        """Projected throughput relative to plain decoding."""
        return self.plain_seconds / self.seconds if self.seconds else 1.0

    def __add__(self, other: Projection) -> Projection:
        return Projection(self.seconds + other.seconds, self.plain_seconds + other.plain_seconds)


def project(statistics: Statistics, latency: LatencyModel) -> Projection:
    """Project the decoding time of one call, or of several single-row calls whose statistics were added.

    `latency` has the drafter selected, see `latency_for`.

    Example:
        >>> from hf_specgen.depth import CostCurve
        >>> from hf_specgen.call_statistics import RowStep
        >>> steps = [RowStep(5, 5, 3, 4), RowStep(5, 5, 1, 2)]
        >>> passes = [StepRecord([5], [step], 6, {}, (1,) * 5, context=40) for step in steps]
        >>> curve = CostCurve((1, 6), (1.0, 1.05), context=512, batch=1)
        >>> latency = LatencyModel.from_curves(curve, draft_token=0.05)
        >>> found = project(Statistics([steps], [7], {}, passes), latency)  # 6 tokens in 2 steps of 1.3
        >>> round(found.seconds, 3), found.plain_seconds, round(found.speedup, 2)
        (2.6, 6.0, 2.31)
    """
    if not statistics.batch_steps:
        return Projection()
    seconds = sum(step_seconds(step, latency) for step in statistics.batch_steps)
    # Plain decoding takes as many steps as the longest row has tokens, and runs all rows in each of them.
    tokens = [sum(step.emitted for step in row) for row in statistics.rows]
    rows = max(step.batch for step in statistics.batch_steps)
    plain_steps = max(tokens) if rows > 1 else sum(tokens)
    plain_step = mean(latency.at(rows, step.context).target.seconds_of(rows) for step in statistics.batch_steps)
    return Projection(seconds, plain_steps * plain_step)


def step_seconds(step: StepRecord, latency: LatencyModel) -> float:
    """The latency of one step, computed from its forward passes."""
    at = latency.at(step.batch, step.context)
    drafting = at.draft.draft_seconds(step.tokens_per_pass) if step.has_draft else 0.0
    return at.target.seconds_of(step.batch * step.tokens_per_row) + drafting


def latency_for(candidates: Candidates, profile: LatencyModel) -> LatencyModel:
    """The profile with the drafter of a strategy; raises if it has none, unless the draft cost is negligible."""
    return profile.for_drafter(str(candidates.profile_key()[0]), candidates.negligible_draft_cost)
