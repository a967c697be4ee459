"""Host reads and tensors from host data of a step: on a GPU each of them waits for the device."""

import importlib
from typing import Any

import pytest

from benchmarks.micro.operation_counter import BUILT, READS
from hf_specgen import DraftModelCandidates, NgramCandidates
from tests.helpers import perturbed_copy, prompts
from tests.helpers.models import fresh_model

step_operations = importlib.import_module("benchmarks.micro.step_operations")


@pytest.mark.parametrize("strategy", ["n-grams", "chain", "tree"])
def test_step_makes_few_host_reads(strategy: str) -> None:
    """Would catch: a read for each level of a draft, for the accepted path, or for the lengths of a cache.

    The growth of a tree reads once for four levels, the verification once, and a call a few times at its end.
    """
    model = fresh_model("llama", num_hidden_layers=2)
    draft = perturbed_copy(model, 0.02)
    candidates: dict[str, Any] = {
        "n-grams": NgramCandidates(k=4),
        "chain": DraftModelCandidates(draft, k=3),
        "tree": DraftModelCandidates(draft, k=3, tree=8),
    }
    call = {**prompts(1), "max_new_tokens": 40, "candidate_generator": candidates[strategy]}
    model.generate(**call)  # the checks of a first call
    steps, counts = step_operations._counts(model, call)
    assert steps > 5
    assert counts[READS] <= 3 * steps
    assert counts[BUILT] <= 3 * steps
