"""Stands in for CUDA graphs on a CPU."""

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hf_specgen.candidates import draft_heads
from hf_specgen.targets import graphs, requirements

FORBIDDEN = (
    "aten._local_scalar_dense",
    "aten.is_nonzero",
    "aten.nonzero",
    "aten.lift_fresh",
    "aten.equal",
    "aten.masked_select",
)
"""Operations that a CUDA graph cannot hold: the host would read a tensor, or make one from its own data."""


class CaptureRules(TorchDispatchMode):
    """Raises as a capture does."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(function).startswith(FORBIDDEN):
            raise RuntimeError(f"{function}: operation not permitted when stream is capturing")
        return function(*args, **(kwargs or {}))


def graphs_on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Capture functions on a CPU: a replay computes from the captured inputs into the captured outputs."""
    found: list[Any] = []

    def capture(run: Any, memory: Any) -> Any:
        run()  # as before a real capture, constants are made
        with CaptureRules():
            outputs = run()
        found.append(outputs)

        def replay() -> None:
            with CaptureRules():
                new = run()
            for own, value in zip(pytree.tree_leaves(outputs), pytree.tree_leaves(new), strict=True):
                if isinstance(own, torch.Tensor):
                    own.copy_(value)

        return replay, outputs

    monkeypatch.setattr(graphs, "capture", capture)
    for module in (requirements, draft_heads):
        monkeypatch.setattr(module, "GRAPH_DEVICES", ("cpu",))
    return found


def failing_captures(monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], bool]) -> list[Any]:
    """Captures fail, as CUDA's do after some work, if `fails` is true of their number; returns the memories of all."""
    stand_in, memories = graphs.capture, list[Any]()

    def capture(run: Any, memory: Any) -> Any:
        memories.append(memory)
        if not fails(len(memories)):
            return stand_in(run, memory)
        run()  # what was written before the failure must not stay
        memory.is_broken = True
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "capture", capture)
    return memories


def is_running(file: str) -> bool:
    """Whether a function of this file is being called."""
    return any(file in frame.filename for frame in traceback.extract_stack())
