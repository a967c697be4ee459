"""Stands in for CUDA graphs on a CPU."""

from collections.abc import Callable
from typing import Any, ClassVar, Self

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hf_specgen.targets.cuda_graphs import CAPTURES
from tests.helpers.models import width

FORBIDDEN = (
    "aten._local_scalar_dense",
    "aten.is_nonzero",
    "aten.nonzero",
    "aten.lift_fresh",
    "aten.equal",
    "aten.masked_select",
)
"""Operations that a CUDA graph cannot hold: the host would read a tensor, or make one from its own data."""


class CapturedRun:
    """A run of a captured function: its capture, or a replay."""

    current: ClassVar["CapturedRun | None"] = None
    """The run that goes on, if any."""

    def __enter__(self) -> Self:
        CapturedRun.current = self
        return self

    def __exit__(self, *exception: Any) -> None:
        CapturedRun.current = None


class NoHostReads(TorchDispatchMode):
    """Raises as a capture does. A replay of a graph runs the recorded operations alone, which need no other check."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(function).startswith(FORBIDDEN):
            raise RuntimeError(f"{function}: operation not permitted when stream is capturing")
        return function(*args, **(kwargs or {}))


def is_capturing() -> bool:
    """Whether a captured function runs, as `torch.cuda.is_current_stream_capturing` and its replays would say."""
    return CapturedRun.current is not None


def graphs_on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Capture functions on a CPU: a replay computes from the captured inputs into the captured outputs."""
    found: list[Any] = []

    def capture(run: Any, memory: Any) -> Any:
        with CapturedRun(), NoHostReads():
            outputs = run()
        found.append(outputs)

        def replay() -> None:
            with CapturedRun():
                new = run()
            for own, value in zip(pytree.tree_leaves(outputs), pytree.tree_leaves(new), strict=True):
                if isinstance(own, torch.Tensor):
                    own.copy_(value)

        return replay, outputs

    monkeypatch.setitem(CAPTURES, "cpu", capture)
    return found


def failing_captures(monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], bool]) -> list[Any]:
    """Captures fail, as CUDA's do after some work, if `fails` is true of their number; returns the memories of all.

    `fails` is called when the function has run.
    """
    stand_in, memories = CAPTURES["cpu"], list[Any]()

    def capture(run: Any, memory: Any) -> Any:
        memories.append(memory)
        with CapturedRun(), NoHostReads():
            run()  # what was written before the failure must not stay
        if not fails(len(memories)):
            return stand_in(run, memory)
        memory.is_broken = True
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setitem(CAPTURES, "cpu", capture)
    return memories


def captured_passes(module: Any) -> list[list[int]]:
    """For each run of a captured function that runs a module, how many tokens each of its passes reads."""
    runs, last = list[list[int]](), [CapturedRun.current]

    def record(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if CapturedRun.current is None:
            return
        if CapturedRun.current is not last[0]:
            runs.append([])
            last[0] = CapturedRun.current
        runs[-1].append(width(args[0] if args else kwargs["input_ids"]))

    module.register_forward_pre_hook(record, with_kwargs=True)
    return runs
