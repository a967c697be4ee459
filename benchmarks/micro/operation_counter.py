"""Counter of operations, host reads and tensors from host data outside of the calls of modules.

The counts are made on a CPU, where a tensor that stays on the host cannot be told from one of the device: reads of both
count. Tensors say meanwhile that they are not on a CPU, so that the code for an accelerator is what runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from time import perf_counter
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_specgen.decoding import DecodingLoop
from hf_specgen.heads.block import BlockHead
from hf_specgen.heads.eagle import Eagle3Head
from hf_specgen.heads.medusa import MedusaHeads
from hf_specgen.targets.graphs import CallGraphs
from hf_specgen.targets.passes import CompactAcceptedPath

T = TypeVar("T")
KINDS = ("operations", "without views", "host reads", "from host data", "index lists")
OPERATIONS, COMPUTING, READS, BUILT, INDEXED = KINDS
READING = ("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__")
"""Methods of a tensor that give the host its values; `cpu` is one more."""
BUILDING = ((torch, "tensor"), (torch, "as_tensor"), (torch, "from_numpy"), (torch.Tensor, "new_tensor"))
"""Functions that make a tensor of host data."""
PASSES: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Module: ("__call__",),
    Eagle3Head: ("combine",),
    BlockHead: ("extend",),
    MedusaHeads: ("head_state", "scores"),
}
"""Methods that are a forward pass, or a part of a head's pass."""
_AS_TENSOR, _CPU = torch.as_tensor, torch.Tensor.cpu


class Passes:
    """The forward passes so far: outermost calls of modules, and of captured functions.

    Args:
        clock: gives the time in seconds.

    Attributes:
        is_inside: whether a pass runs.
        seconds: in the passes of each module; the output matrix and embedding that a head shares count for themselves.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.is_inside, self._clock = False, clock
        self.seconds: dict[nn.Module, float] = {}

    @property
    def modules(self) -> list[nn.Module]:
        """Those that have run."""
        return list(self.seconds)

    def recognised(
        self, call: Callable[..., Any], module_of: Callable[[Any], Any] = lambda module: module
    ) -> Callable[..., Any]:
        """A function as a pass of a module, which is its first argument or follows from it, unless inside of a pass."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.is_inside:
                return call(*args, **kwargs)
            self.is_inside, begin = True, self._clock()
            try:
                return call(*args, **kwargs)
            finally:
                module = module_of(args[0])
                self.seconds[module] = self.seconds.get(module, 0.0) + self._clock() - begin
                self.is_inside = False

        return run


@contextmanager
def recognised_passes(clock: Callable[[], float] = perf_counter) -> Iterator[Passes]:
    """Recognise calls of modules and captured functions, and parts of a head's pass that are methods of their own."""
    passes = Passes(clock)
    run_captured = CallGraphs.run
    timed = passes.recognised(run_captured, lambda graphs: graphs.module)

    def replay(graphs: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        run = run_captured if isinstance(function, CompactAcceptedPath) else timed
        return run(graphs, function, *args, **kwargs)

    with ExitStack() as stack:
        for module, methods in PASSES.items():
            for method in methods:
                stack.enter_context(patch.object(module, method, passes.recognised(getattr(module, method))))
        stack.enter_context(patch.object(CallGraphs, "run", replay))
        yield passes


class _OperationCounter(TorchDispatchMode):
    """Counts dispatched operations, and calls of wrapped functions, while no pass runs."""

    def __init__(self, passes: Passes):
        super().__init__()
        self.counts: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        self._passes, self._is_inside_call, self._is_paused = passes, False, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (self._passes.is_inside or self._is_paused):
            name = func.overloadpacket.__name__
            self.counts[OPERATIONS] += 1
            self.counts[COMPUTING] += not _is_view(func)
            if not self._is_inside_call:
                self.counts[READS] += name == "_local_scalar_dense"  # a read without a method, as in `x[:tensor]`
                # Indexing with a list makes a tensor of it; one without dimensions is a number that is assigned.
                self.counts[INDEXED] += name == "lift_fresh" and args[0].dim() > 0
        return func(*args, **(kwargs or {}))

    def read(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method that reads a tensor, counted; reads of what `cpu` returned belong to that one."""

        def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            is_host_copy = getattr(tensor, "_is_host_copy", False)
            return self._counted(READS, not is_host_copy, partial(method, tensor, *args, **kwargs))

        return run

    def cpu(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """`tensor.cpu()`, counted, as another object even if the tensor is on the CPU."""
        copy = self._counted(READS, not hasattr(tensor, "_is_host_copy"), partial(_CPU, tensor, *args, **kwargs))
        self._is_paused = True
        copy = torch.ops.aten.alias(copy)
        self._is_paused, copy._is_host_copy = False, True
        return copy

    def built(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that makes a tensor, counted unless its data is a tensor."""

        def run(*args: Any, **kwargs: Any) -> Any:
            data = args[0] if args else kwargs.get("data")
            is_new = function is not _AS_TENSOR or not isinstance(data, torch.Tensor)
            return self._counted(BUILT, is_new, partial(function, *args, **kwargs))

        return run

    def _counted(self, kind: str, is_new: bool, call: Callable[[], T]) -> T:
        """The result of a call, in which nothing else is counted but operations."""
        if self._is_inside_call or self._passes.is_inside:
            return call()
        self.counts[kind] += is_new
        self._is_inside_call = True
        try:
            return call()
        finally:
            self._is_inside_call = False


def _is_view(operation: Any) -> bool:
    """Whether an operation computes nothing: its result shares the memory of an argument, which is not written to."""
    returned = [result.alias_info for result in operation._schema.returns]
    is_shared = bool(returned) and returned[0] is not None and not returned[0].is_write
    return is_shared or operation.overloadpacket.__name__ == "_unsafe_view"


@contextmanager
def counting() -> Iterator[tuple[Counter[str], Passes]]:
    """Count, by kind, what happens outside of forward passes."""
    with recognised_passes() as passes, ExitStack() as stack:
        counter = _OperationCounter(passes)
        for name in READING:
            stack.enter_context(patch.object(torch.Tensor, name, counter.read(getattr(torch.Tensor, name))))
        stack.enter_context(patch.object(torch.Tensor, "cpu", lambda *args, **kwargs: counter.cpu(*args, **kwargs)))
        for owner, name in BUILDING:
            stack.enter_context(patch.object(owner, name, counter.built(getattr(owner, name))))
        stack.enter_context(patch.object(torch.Tensor, "is_cpu", False))
        with counter:
            yield counter.counts, passes


@contextmanager
def each_step(read: Callable[[], T]) -> Iterator[list[T]]:
    """What `read` returns when the prefill of a call is over, then after each step."""
    marks: list[T] = []
    decode, end_step = DecodingLoop.decode, DecodingLoop.end_step

    def decode_from_here(loop: DecodingLoop) -> None:
        marks[:] = [read()]
        decode(loop)

    def end_step_and_mark(loop: DecodingLoop, *args: Any) -> None:
        end_step(loop, *args)
        marks.append(read())

    with (
        patch.object(DecodingLoop, "decode", decode_from_here),
        patch.object(DecodingLoop, "end_step", end_step_and_mark),
    ):
        yield marks
