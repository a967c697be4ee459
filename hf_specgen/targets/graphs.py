"""Functions captured as CUDA graphs and replayed in one launch: passes of targets, draft models and heads.

Launching the kernels of a pass of 32 layers one by one takes 24 ms on an H100, which computes for 11 ms of them. A
graph repeats the same kernels on the same addresses: inputs are copied to where they were in the capture, and keys and
values stay in buffers that later calls use again. There is one graph for each function and shape of its inputs; a pass
over n tokens is padded to the next of the widths 1, 4, 8, 16, 32, … All are captured anew when the module has changed.

Source: PyTorch's documentation, "CUDA semantics", section "CUDA Graphs".
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from hf_specgen.call import Compile
from hf_specgen.targets.cache import RaggedCache
from hf_specgen.targets.fingerprint import graph_fingerprint
from hf_specgen.targets.lasting_buffers import BufferSet, GraphBuffers, StepCache, StepLayer

logger = logging.getLogger("hf_specgen")
EAGER_PASSES = 4
"""With compile="auto" a shape is captured when it is used once more than this, so that short calls capture nothing. A
capture costs as much time as four or five replays save."""
MAX_GRAPHS = 64
"""Graphs that are kept for a set of buffers: each setting of a sampled call has some of its own."""


class GraphMemory:
    """The stream that graphs are captured on, None on a CPU, and the memory that they share.

    PyTorch may free cuBLAS's workspace of a stream, which graphs use without owning it. What is allocated in a capture
    stays as long as any graph of its pool. So a stream runs captures only, and has one pool,
    which a graph that is never replayed keeps.
    """

    def __init__(self, stream: torch.cuda.Stream | None):
        self.stream, self.pool, self.lock = stream, None, threading.Lock()
        self.device = torch.device("cpu") if stream is None else stream.device
        if stream is not None:
            self.pool = torch.cuda.graph_pool_handle()
            self._keeps_pool = _capture_nothing(stream, self.pool)
        self.is_broken = False
        """Whether a capture has failed, after which the pool cannot be used."""
        self._used_on: torch.cuda.Stream | None = None

    def wait(self) -> None:
        """Let the current stream wait for the replays that other streams have started."""
        if self.stream is not None:
            current = torch.cuda.current_stream(self.stream.device)
            if self._used_on is not None and self._used_on != current:
                current.wait_stream(self._used_on)
            self._used_on = current


_lock, _capturing_lock = threading.Lock(), threading.Lock()
_memories: dict[int, GraphMemory] = {}
"""By stream: PyTorch has 32 streams of high priority, which take turns, and which hardly anything else uses."""


def graph_memory(device: torch.device) -> GraphMemory:
    """Memory for the graphs of one module on a device."""
    if device.type != "cuda":
        return GraphMemory(None)
    with _lock:
        stream = torch.cuda.Stream(device, priority=-1)
        if stream.cuda_stream not in _memories:
            _memories[stream.cuda_stream] = GraphMemory(stream)
        return _memories[stream.cuda_stream]


def _capture_nothing(stream: torch.cuda.Stream, pool: Any) -> torch.cuda.CUDAGraph:
    """A graph with a single allocation."""
    graph = torch.cuda.CUDAGraph()
    with _capturing_lock, torch.cuda.device(stream.device), _capturing(graph, stream, pool):
        torch.zeros(1, device=stream.device)
    return graph


def _capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any) -> Any:
    """The context in which a graph is captured, one at a time; other threads may launch kernels meanwhile."""
    return torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local")


def capture(run: Callable[[], Any], memory: GraphMemory) -> tuple[Callable[[], None], Any]:
    """Capture what a function does on a CUDA device: a function that does it again, and its outputs."""
    assert memory.stream is not None
    with torch.cuda.device(memory.stream.device):
        run()  # libraries allocate their workspaces and choose kernels, constants are made
        graph = torch.cuda.CUDAGraph()
        try:
            with _capturing_lock, _capturing(graph, memory.stream, memory.pool):
                outputs = run()
        except Exception:
            _repair(memory)
            raise
    return graph.replay, outputs


CAPTURES: dict[str, Callable[[Callable[[], Any], GraphMemory], tuple[Callable[[], None], Any]]] = {"cuda": capture}
"""How a function is captured on each type of device that has graphs."""


def _repair(memory: GraphMemory) -> None:
    """After a failed capture, which leaves the random generator and the allocator of the device capturing."""
    assert memory.stream is not None and memory.pool is not None
    memory.is_broken = True
    with _lock:
        _memories.pop(memory.stream.cuda_stream, None)
    with suppress(RuntimeError, AttributeError):  # raised if the allocator is no longer capturing
        torch._C._cuda_endAllocateToPool(memory.stream.device_index, memory.pool)
    _capture_nothing(torch.cuda.Stream(), torch.cuda.graph_pool_handle())


class _Graph:
    """One captured graph: where its inputs lie, and its outputs; `function` keeps constants that it reads."""

    def __init__(self, run: Callable[[Any], Any], inputs: Any, memory: GraphMemory, function: Any = None):
        self.function, self._memory = function, memory
        static = _mapped(lambda tensor: tensor.to(memory.device, copy=True), inputs)
        self._inputs = list(_leaves(static))
        with memory.lock:
            memory.wait()
            self._replay, self._outputs = CAPTURES[memory.device.type](lambda: run(static), memory)

    def replay(self, leaves: Sequence[Any]) -> Any:
        """The outputs for other inputs, copied: the next replay of any graph of this memory overwrites them."""
        with self._memory.lock:
            self._memory.wait()
            for static, leaf in zip(self._inputs, leaves, strict=True):
                if isinstance(static, torch.Tensor):
                    static.copy_(leaf, non_blocking=True)
            self._replay()
            return _mapped(torch.clone, self._outputs)


def _leaves(value: Any) -> Iterator[Any]:
    """The tensors and plain values in nested tuples, lists and dictionaries."""
    if isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _leaves(part)
    else:
        yield value


def _mapped(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Nested tuples, lists and dictionaries with a function of each tensor in its place."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {name: _mapped(function, part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [_mapped(function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


class CapturedFunctions:
    """Functions of one module as CUDA graphs, shared by all calls; used by one thread at a time.

    A function receives the module, its inputs (nested tensors and plain values) and a cache: that of the call when it
    runs eagerly, one of lasting buffers in a graph.

    Attributes:
        failure: why nothing is captured any more, unless the module changes; None if nothing has failed.
    """

    def __init__(self) -> None:
        self.failure: str | None = None
        self._fingerprint: int | None = None
        self._memory: GraphMemory | None = None
        self._passes: Counter[tuple[Any, ...]] = Counter()
        self._refused: set[tuple[Any, ...]] = set()
        self.buffers, self._lock = GraphBuffers(), threading.Lock()

    def begin_call(self, module: nn.Module) -> None:
        """Forget the graphs of a module that has changed."""
        if (current := graph_fingerprint(module)) != self._fingerprint:
            with self._lock:
                self._memory, self.failure, self._fingerprint = None, None, current
                self._refused.clear()
                self._passes.clear()
                for lasting in self.buffers.sets:
                    lasting.graphs.clear()

    def capacity(self, module: nn.Module, cache: RaggedCache, tokens: int, mode: Compile) -> int:
        """Move a cache into lasting buffers, with slots for so many more tokens; returns how many slots they have.

        0 if there is no memory for them, with "auto"; then nothing is captured any more.
        """
        with self._lock:
            try:
                cache.reserve(max(cache.lengths) + tokens)
                return self.buffers.adopt(cache)
            except torch.OutOfMemoryError as error:
                self._give_up(module, error, mode)
                return 0

    def run(
        self,
        function: Callable[[Any, Any, Any], Any],
        module: nn.Module,
        inputs: Any,
        cache: RaggedCache,
        columns: int,
        *,
        mode: Compile,
        eagerly: Callable[[], Any],
        agree: Callable[[Any, Any], bool] = lambda eager, captured: True,
        at_once: bool = False,
        rehearsal: Callable[[], Any] | None = None,
        is_optional: bool = False,
    ) -> Any:
        """The outputs of a function that appends so many columns to a cache.

        Args:
            inputs: of fixed shapes: masks have a column for each slot of `capacity`.
            mode: "graphs" captures a shape when it is used first, and raises if that fails; "auto" captures it after
                `EAGER_PASSES`, and goes on eagerly if that fails, as does any mode if `is_optional`.
            eagerly: called where there is no graph, to run the function on the cache of the call; returned.
            agree: whether the outputs of both differ by rounding alone; checked once for each graph.
            at_once: whether "auto" does not wait either.
            rehearsal: makes inputs with which the function changes nothing, to capture it with; only functions that can
                run several times in a row, such as passes, need none.
            is_optional: whether only this function is given up if it cannot be captured.

        Raises:
            ValueError: with "graphs", if the function cannot be captured, or a graph computes something else.
        """
        leaves, lengths = list(_leaves(inputs)), cache.lengths
        shapes = tuple((one.shape, one.dtype) if isinstance(one, torch.Tensor) else repr(one) for one in leaves)
        key, starts = (function, shapes, torch.is_inference_mode_enabled()), torch.tensor(lengths)
        with self._lock:
            lasting = self.buffers.of_cache(cache)
            if lasting is not None and (graph := lasting.graphs.pop(key, None)) is not None:
                lasting.graphs[key] = graph  # the last to be dropped
                outputs = graph.replay([*leaves, starts])
                cache.set_lengths([length + columns for length in lengths])
                return outputs
            self._passes[key] += 1
            is_due = at_once or mode == "graphs" or self._passes[key] > EAGER_PASSES
            if lasting is None or self.failure is not None or not is_due or key in self._refused:
                return eagerly()
            eager = eagerly() if rehearsal is None else None  # an error of the function itself is the caller's
            try:
                cache.set_lengths(lengths)
                first = inputs if rehearsal is None else rehearsal()
                graph = self._capture(function, module, (first, starts), columns, lasting)
                outputs = graph.replay([*leaves, starts])
                if rehearsal is None and not agree(eager, outputs):
                    raise ValueError("its results differ from those of an ordinary pass")
                if not is_captured(module):  # the first pass may have installed hooks
                    self._fingerprint = graph_fingerprint(module)
                lasting.graphs[key] = graph
                if len(lasting.graphs) > MAX_GRAPHS:
                    del lasting.graphs[next(iter(lasting.graphs))]
            except Exception as error:
                cache.set_lengths(lengths)
                if is_optional:
                    self._refused.add(key)
                    logger.info("%s runs eagerly, as it cannot be captured: %s", type(function).__name__, error)
                else:
                    self._give_up(module, error, mode)
                return eagerly()  # a graph may have written something else to the cache
        cache.set_lengths([length + columns for length in lengths])
        return outputs

    def _capture(
        self,
        function: Callable[[Any, Any, Any], Any],
        module: nn.Module,
        inputs: Any,
        columns: int,
        lasting: BufferSet,
    ) -> _Graph:
        """Capture a function that writes to buffers after the slots that its second input names."""
        if self._memory is None or self._memory.is_broken:
            self._memory = graph_memory(lasting.buffers[0][0].device)
        logger.info("capturing %s for %d columns", type(module).__name__, columns)

        def run(static: tuple[Any, torch.Tensor]) -> Any:
            slots = static[1][:, None] + torch.arange(columns, device=static[1].device)
            layers: Any = [StepLayer(keys, values, slots) for keys, values in lasting.buffers]
            return function(module, static[0], StepCache(layers, lasting.joined))

        return _Graph(run, inputs, self._memory, function)

    def _give_up(self, module: nn.Module, error: Exception, mode: Compile) -> None:
        """Capture nothing of this module any more; raises unless graphs are used only where they work."""
        if mode == "graphs" and isinstance(error, torch.OutOfMemoryError):
            raise error
        name, text = type(module).__name__, " ".join(str(error).split())[:400]
        self.failure = f"{name} cannot be captured as a CUDA graph ({type(error).__name__}: {text})"
        if mode == "graphs":
            raise ValueError(f'{self.failure}; leave compile="graphs" out') from error
        logger.warning("%s; it runs eagerly", self.failure)

    def release(self, cache: RaggedCache) -> None:
        """Let other calls use the buffers of a cache, which needs them no longer."""
        with self._lock:
            self.buffers.release(cache)


_functions: weakref.WeakKeyDictionary[nn.Module, CapturedFunctions] = weakref.WeakKeyDictionary()


def captured_functions(module: nn.Module) -> CapturedFunctions:
    """The captured functions of a module for one call; they are shared by all calls."""
    with _lock:
        functions = _functions.setdefault(module, CapturedFunctions())
    functions.begin_call(module)
    return functions


def is_captured(module: nn.Module) -> bool:
    """Whether a function of a module has been captured."""
    functions = _functions.get(module)
    return functions is not None and any(lasting.graphs for lasting in functions.buffers.sets)
