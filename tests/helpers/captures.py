"""Stands in for CUDA graphs on a CPU."""

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from hf_specgen.candidates import draft_heads
from hf_specgen.targets import graphs, requirements


def graphs_on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Capture passes on a CPU: a replay computes from the captured inputs into the captured outputs."""
    found: list[Any] = []

    def capture(run: Any, memory: Any) -> Any:
        outputs = run()
        found.append(outputs)

        def replay() -> None:
            for own, new in zip(pytree.tree_leaves(outputs), pytree.tree_leaves(run()), strict=True):
                if isinstance(own, torch.Tensor):
                    own.copy_(new)

        return replay, outputs

    monkeypatch.setattr(graphs, "capture", capture)
    for module in (requirements, draft_heads):
        monkeypatch.setattr(module, "GRAPH_DEVICES", ("cpu",))
    return found
