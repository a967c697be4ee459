"""Projected speedups: by hand, and against a simulation of the steps of a real call."""

import pytest

from benchmarks.harness.projection import latency_for, project
from hf_specgen import DraftModelCandidates, LayerSkipCandidates, NgramCandidates
from hf_specgen.counters import RowStep, Statistics, StepRecord
from hf_specgen.depth import CostCurve, LatencyModel
from hf_specgen.depth.latency import Bucket, DraftLatency
from tests.helpers import prompts, tiny_model

CURVE = CostCurve((1, 11), (1.0, 1.2), context=512, batch=1)
LATENCY = LatencyModel.from_curves(CURVE, draft_token=0.05, draft_step=0.01)


def test_projection_by_hand() -> None:
    """A plain step of 1.0, a step of 6 tokens with five drafter passes of 1.1 + 0.25 + 0.01, an empty draft of 1.01."""
    steps = [RowStep(0, 0, 0, 1), RowStep(5, 5, 4, 5), RowStep(0, 0, 0, 1)]
    passes = [
        StepRecord([0], [steps[0]], 1, context=9),
        StepRecord([5], [steps[1]], 6, {}, (1,) * 5, context=14),
        StepRecord([5], [steps[2]], 1, {}, (), context=15),
    ]
    found = project(Statistics([steps], [8], {}, passes), LATENCY)
    assert found.seconds == pytest.approx(1.0 + 1.36 + 1.01) and found.plain_seconds == pytest.approx(7.0)
    assert found.speedup == pytest.approx(7.0 / 3.37)


def test_real_call_projects_to_its_tokens_per_step_on_a_flat_curve() -> None:
    flat = LatencyModel.from_curves(CostCurve((1, 64), (1.0, 1.0), context=512, batch=1))
    model, candidates = tiny_model("llama"), DraftModelCandidates(tiny_model("llama"), k=4)
    model.generate(**prompts(1), max_new_tokens=20, candidate_generator=candidates)
    statistics = candidates.speculation
    assert statistics is not None and statistics.accepted > 0
    assert project(statistics, flat).speedup == pytest.approx(statistics.tokens_per_step)


def test_latency_of_a_strategy_is_that_of_its_drafter() -> None:
    kinds = {"layer_skip": DraftLatency(seconds=(0.5,))}
    profile = LatencyModel((Bucket(CURVE, kinds),))
    assert latency_for(LayerSkipCandidates(2, k=1), profile).at(1, 9).drafter.draft([1, 1]) == 1.0
    assert latency_for(NgramCandidates(k=1), profile).at(1, 9).drafter.draft([]) == 0.0
    with pytest.raises(ValueError, match="no drafter 'draft_model'; it has"):
        latency_for(DraftModelCandidates("folder", k=1), profile)
