"""The counter of `micro step-operations`."""

import numpy as np
import torch
from torch import nn

from benchmarks.micro.operation_counter import KINDS, counting


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
