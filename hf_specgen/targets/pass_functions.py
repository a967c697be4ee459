"""Makes the functions that compiled passes run: compiled by `torch.compile`, or captured as CUDA graphs alone."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hf_specgen.targets.attention import grouped_attention
from hf_specgen.targets.captured import Buffers, CapturedPass, GraphMemory
from hf_specgen.targets.packable import is_packable
from hf_specgen.targets.packed_graphs import with_packed_linears
from hf_specgen.targets.step_cache import step


@dataclass(frozen=True)
class PassFunction:
    """A function with the arguments of `step`, and how many query heads share a mask row in it (0: not folded)."""

    run: Callable[..., Any]
    groups: int


def compiled_function(model: Any, backend: Any, captures_graphs: bool, groups: set[int]) -> PassFunction:
    """A function that `torch.compile` compiles in its first call.

    Args:
        model: the model that it will run.
        backend: of `torch.compile`.
        captures_graphs: whether it is captured as a CUDA graph too.
        groups: the numbers of query heads per key/value head for which an ordinary pass folds masks.
    """
    if any(map(is_packable, model.modules())):
        backend = with_packed_linears(torch._dynamo.lookup_backend(backend))
    options: dict[str, Any] = {"dynamic": False, "mode": "reduce-overhead"} if captures_graphs else {}
    run = torch.compile(_own_copy(step), fullgraph=True, backend=backend, **options)
    return PassFunction(run, next(iter(groups)) if len(groups) == 1 else 0)


def captured_function(taps: tuple[int, ...], memory: GraphMemory) -> PassFunction:
    """A function that is captured in its first call, and not compiled.

    Args:
        taps: which hidden states it returns.
        memory: where it is captured.
    """

    def captured_step(model: Any, inputs: tuple[dict[str, Any], torch.Tensor], buffers: Buffers) -> Any:
        with grouped_attention():
            return step(model, inputs[0], buffers, inputs[1], taps)

    captured = CapturedPass(captured_step, memory)

    def run(model: Any, arguments: dict[str, Any], buffers: Buffers, slots: torch.Tensor, _: tuple[int, ...]) -> Any:
        return captured(model, (arguments, slots), buffers)

    return PassFunction(run, 0)


def _own_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a code object of its own: `torch.compile` limits the number of compilations of one."""
    assert isinstance(function, types.FunctionType)
    return types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
