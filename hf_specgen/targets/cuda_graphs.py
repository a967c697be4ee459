"""CUDA graphs: the streams that they are captured on, the memory that they share, and a single graph.

Source: PyTorch's documentation, "CUDA semantics", section "CUDA Graphs".
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import torch


class GraphMemory:
    """The stream that graphs are captured on, None on a CPU, and the memory pool that they share.

    Graphs use the cuBLAS workspace of their stream, which PyTorch may free meanwhile, unless it was allocated in a
    capture: such memory stays as long as any graph of the pool exists. So nothing but captures runs on the stream, all
    of them use one pool, and `_keeps_pool`, a graph that is never replayed, keeps the pool.
    """

    def __init__(self, stream: torch.cuda.Stream | None):
        self.stream = stream
        self.pool = None
        self.lock = threading.RLock()
        """Held by captures and replays, but not by warm-ups: there a hook may call `generate` of another module, which
        takes the lock of that module; a thread that holds it may wait for this one."""
        self.device = torch.device("cpu") if stream is None else stream.device
        if stream is not None:
            self.pool = torch.cuda.graph_pool_handle()
            self._keeps_pool = _capture_allocation(stream, self.pool)
        self.is_broken = False
        """Whether a capture has failed, after which the pool cannot be used."""
        self._last_used_on: torch.cuda.Stream | None = None

    def wait(self) -> None:
        """Let the current stream wait for replays on the stream that was used last: graphs of the pool share memory."""
        if self.stream is not None:
            current = torch.cuda.current_stream(self.stream.device)
            if self._last_used_on is not None and self._last_used_on != current:
                current.wait_stream(self._last_used_on)
            self._last_used_on = current


_lock = threading.Lock()
_capturing_lock = threading.Lock()
_memories: dict[int, GraphMemory] = {}
"""By stream. PyTorch returns its 32 streams of high priority in turn, so modules may share a stream and its memory;
hardly anything else uses these streams."""


def graph_memory(device: torch.device) -> GraphMemory:
    """Memory for the graphs of one module on a device."""
    if device.type != "cuda":
        return GraphMemory(None)
    with _lock:
        stream = torch.cuda.Stream(device, priority=-1)
        if stream.cuda_stream not in _memories:
            _memories[stream.cuda_stream] = GraphMemory(stream)
        return _memories[stream.cuda_stream]


def _capture_allocation(stream: torch.cuda.Stream, pool: Any) -> torch.cuda.CUDAGraph:
    """A graph that allocates once: as long as it exists, PyTorch does not free the memory pool."""
    graph = torch.cuda.CUDAGraph()
    with _capturing_lock, torch.cuda.device(stream.device), _capturing(graph, stream, pool):
        torch.zeros(1, device=stream.device)
    return graph


def _capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any) -> Any:
    """The context in which a graph is captured, one at a time; other threads may launch kernels meanwhile."""
    return torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local")


def capture(run: Callable[[], Any], memory: GraphMemory) -> tuple[Callable[[], None], Any]:
    """Capture a function on a CUDA device; returns the replay function and the outputs, which replays overwrite."""
    assert memory.stream is not None
    with torch.cuda.device(memory.stream.device):
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
    """End the capture mode of the device's allocator and random generator, in which a failed capture leaves them."""
    assert memory.stream is not None and memory.pool is not None
    memory.is_broken = True
    with _lock:
        _memories.pop(memory.stream.cuda_stream, None)
    with suppress(RuntimeError, AttributeError):  # raised if the allocator is no longer capturing
        torch._C._cuda_endAllocateToPool(memory.stream.device_index, memory.pool)
    _capture_allocation(torch.cuda.Stream(), torch.cuda.graph_pool_handle())  # its end resets the random generator


def leaves_of(value: Any) -> Iterator[Any]:
    """The tensors and plain values in nested tuples, lists and dictionaries."""
    if isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from leaves_of(item)
    else:
        yield value


def signature(value: Any) -> Any:
    """What a graph cannot change in its inputs: structure, names, shapes and types of tensors, and plain values.

    Example:
        >>> signature({"a": torch.zeros(2), "b": 3})
        (('a', (torch.Size([2]), torch.float32)), ('b', '3'))
    """
    if isinstance(value, dict):
        return tuple((name, signature(item)) for name, item in value.items())
    if isinstance(value, tuple | list):
        return tuple(map(signature, value))
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else repr(value)


def _mapped(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Nested tuples, lists and dictionaries of the same structure, with the function applied to each tensor."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {name: _mapped(function, item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_mapped(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


class Graph:
    """A captured graph with its static inputs and outputs.

    `function` is not called again: it keeps constants alive that the graph reads.
    """

    def __init__(self, run: Callable[[Any], Any], inputs: Any, memory: GraphMemory, function: Any):
        self.function = function
        self._memory = memory
        static = _mapped(lambda tensor: tensor.to(memory.device, copy=True), inputs)
        self._inputs = list(leaves_of(static))
        # Warm-up: libraries allocate their workspaces and choose kernels, constants are made.
        with torch.cuda.device(memory.device) if memory.stream is not None else nullcontext():
            run(static)
        with memory.lock:
            memory.wait()
            self._replay, self._outputs = CAPTURES[memory.device.type](lambda: run(static), memory)

    def replay(self, inputs: Any) -> Any:
        """The outputs for other inputs of the same shapes.

        They are copies, as the next replay of any graph of the pool may overwrite the static outputs.
        """
        with self._memory.lock:
            self._memory.wait()
            for static, leaf in zip(self._inputs, leaves_of(inputs), strict=True):
                if isinstance(static, torch.Tensor):
                    static.copy_(leaf, non_blocking=True)
            self._replay()
            return _mapped(torch.clone, self._outputs)
