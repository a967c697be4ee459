"""The counter of `micro step-operations`."""

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.micro.operation_counter import BUILT, KINDS, READS, counting
from hf_specgen import DraftModelCandidates, NgramCandidates
from tests.helpers import perturbed_copy, prompts
from tests.helpers.models import fresh_model


def known_operations(module: nn.Module) -> None:
    """Four operations that compute, four reads, four tensors from host data, one list as index."""
    values = torch.ones(2, 4)  # computes
    module(values)
    result = values[0] * 2  # a view, and computes
    result.cpu().numpy()  # one read, of which `numpy` makes a view
    result.tolist()
    if bool(result[0] > 1):  # a view, computes, and is read by `_local_scalar_dense`
        np.asarray(result)
    torch.tensor([1, 2])
    torch.as_tensor([1, 2])
    torch.as_tensor(result)  # of a tensor
    torch.from_numpy(np.ones(2))
    result.new_tensor([1.0])
    values[[0]]  # computes


class Reading(nn.Module):
    """A module that does everything that is counted."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.tensor((values + values).tolist())


def test_counting_leaves_out_modules_and_counts_a_read_once() -> None:
    """Would catch: what passes do, views among operations, a read that is counted by each function it goes through."""
    before = torch.tensor, torch.Tensor.cpu, torch.Tensor.__bool__, nn.Module.__call__
    with counting() as (counts, passes):
        known_operations(Reading())
    assert [counts[kind] for kind in KINDS[1:]] == [5, 4, 4, 1]  # `_local_scalar_dense` is an operation, too
    assert counts["operations"] > counts["without views"] and len(passes.modules) == 1
    assert before == (torch.tensor, torch.Tensor.cpu, torch.Tensor.__bool__, nn.Module.__call__)


# Host reads and tensors from host data of a step: on a GPU each of them waits for the device


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
