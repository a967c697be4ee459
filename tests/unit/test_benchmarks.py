"""Tools of benchmarks: host reads of a step as they are counted, and projected speedups."""

import importlib
from typing import Any

import pytest

from benchmarks.harness.projection import latency_for, project
from benchmarks.micro.operation_counter import BUILT, READS
from hf_specgen import DraftModelCandidates, LayerSkipCandidates, NgramCandidates
from hf_specgen.call_statistics import RowStep, Statistics, StepRecord
from hf_specgen.depth import CostCurve, LatencyModel
from hf_specgen.depth.latency import Bucket, DraftLatency
from tests.helpers import perturbed_copy, prompts
from tests.helpers.models import fresh_model

# Host reads and tensors from host data of a step: on a GPU each of them waits for the device

step_operations = importlib.import_module("benchmarks.micro.step_operations")


@pytest.mark.parametrize("strategy", ["n-grams", "chain", "tree"])
def test_step_makes_few_host_reads(strategy: str) -> None:
    """Would catch: a read for each level of a draft (of up to four), for the accepted path, or for lengths."""
    model = fresh_model("llama", num_hidden_layers=2)
    draft = perturbed_copy(model, 0.02)
    candidates: dict[str, Any] = {
        "n-grams": NgramCandidates(k=4),
        "chain": DraftModelCandidates(draft, k=3),
        "tree": DraftModelCandidates(draft, k=3, tree=8),
    }
    call = {**prompts(1), "max_new_tokens": 40, "candidate_generator": candidates[strategy]}
    call["suppress_tokens"] = [0]  # where it is chosen a step reads once more whether it is the argmax of NaN
    model.generate(**call)  # the checks of a first call
    steps, counts = step_operations._counts(model, call)
    assert steps > 5
    assert steps - 1 <= counts[READS] <= steps + 1  # with the end of the call
    assert 0 < counts[BUILT] <= 3 * steps


# Projected speedups: by hand, and against a simulation of the steps of a real call

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


def test_latency_of_a_strategy_is_that_of_its_drafter() -> None:
    """Would catch: n-grams with the latency of a network, or a drafter that was not measured taken for free."""
    kinds = {"layer_skip": DraftLatency(seconds=(0.5,))}
    profile = LatencyModel((Bucket(CURVE, kinds),))
    assert latency_for(LayerSkipCandidates(2, k=1), profile).at(1, 9).draft.draft_seconds([1, 1]) == 1.0
    assert latency_for(NgramCandidates(k=1), profile).at(1, 9).draft.draft_seconds([]) == 0.0
    with pytest.raises(ValueError, match="no drafter 'draft_model'; it has"):
        latency_for(DraftModelCandidates("folder", k=1), profile)
