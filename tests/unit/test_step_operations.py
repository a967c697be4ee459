"""The counter of `micro step-operations`."""

import torch
from torch import nn

from benchmarks.micro.step_operations import counting


def test_counting_outside_of_modules_after_the_first_pass_of_the_model() -> None:
    """Would catch: operations inside of passes, views counted as operations, a read that is counted twice."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    values = torch.ones(2, 4)
    with counting(model) as counts:  # type: ignore[arg-type]
        values + values  # before the first pass
        model(values)
        result = (values[0] * 2).add(1)
        result.cpu().numpy()
        result.tolist()
        torch.tensor([1, 2])
        model(values)
    assert counts["without views"] == 2 and counts["operations"] >= 3
    assert counts["host reads"] == 2 and counts["from host data"] == 1
    assert torch.tensor(3).item() == 3 and counts["from host data"] == 1, "what was replaced is restored"
