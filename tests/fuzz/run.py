"""Runs a case and says what came of it."""

import time
from dataclasses import replace

import torch

from tests.fuzz.cases import Case
from tests.fuzz.comparison import Comparison, Outcome
from tests.fuzz.threads import compare_threads

BY_ROUNDING = {"tokens", "random state", "stream", "scores", "logits", "cache", "statistics"}
"""Differences that a near-tie of two tokens can make."""


def run(case: Case) -> Outcome:
    """Compare speculation with plain `generate` in one case."""
    started = time.perf_counter()
    if case.threads > 1:
        outcome = compare_threads(case)
    else:
        comparison = Comparison(case)
        outcome = comparison.run()
        if outcome.differences and _is_rounding(comparison):
            outcome.status = "rounding"
    if outcome.differences and outcome.status != "rounding":
        outcome.status = "different"
    outcome.seconds = time.perf_counter() - started
    return outcome


def _is_rounding(comparison: Comparison) -> bool:
    """Whether the differences come from sums in another order: float64 has none, and writes the text of either side.

    Where both implementations of attention exist, by SDPA: eager masks overflow to infinity in float64, and rows of a
    prompt that see nothing are then NaN.
    """
    if not all(difference.kind in BY_ROUNDING for difference in comparison.outcome.differences):
        return False
    exact = Comparison(replace(comparison.case, attention="sdpa"), torch.float64)
    exact.run()
    if exact.outcome.status != "same" or exact.outcome.differences:
        return False
    turns = zip(comparison.texts, exact.texts, strict=False)  # after a difference there are no more turns
    return all(any(torch.equal(exactly, text) for text in sides) for sides, (exactly, _) in turns)
