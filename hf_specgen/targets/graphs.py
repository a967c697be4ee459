"""CUDA graphs of forward passes: a pass is replayed in one launch. For targets, draft models and heads.

A pass of 32 layers takes 24 ms on an H100 to launch its kernels one by one, of which the GPU computes 11. A graph
repeats the same kernels on the same addresses: inputs are copied to where they were in the capture, keys and values
stay in buffers that later calls use again, and a graph is captured anew when something else has changed, see
`fingerprint`.

Source: PyTorch's documentation, "CUDA semantics", section "CUDA Graphs".
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers.cache_utils import CacheLayerMixin

from hf_specgen.targets.cache import RaggedCache

GRAPH_DEVICES = ("cuda",)
"""Where passes are captured."""
CAPACITY_BLOCK = 256
"""Capacities of buffers, in slots, are multiples of it, so that calls of similar lengths share graphs; from 2,048 on
there are four between a length and its double."""

Buffers = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer."""


def padded_width(tokens: int) -> int:
    """The number of tokens that a captured pass over so many tokens is padded to: 1, 4, 8, 16, …"""
    return 1 if tokens == 1 else max(4, 1 << (tokens - 1).bit_length())


class StepLayer(CacheLayerMixin):
    """Keys and values of one layer during one captured pass, written to buffers at `slots` `[batch, new]`.

    Attention reads the first `width` slots; the mask leaves out the unfilled ones.
    """

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, width: int) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self._slots, self._width = slots, width
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the buffers are given."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `[batch, heads, new, head_dim]` states to the slots; returns the slots that attention reads."""
        assert self.keys is not None and self.values is not None
        rows = torch.arange(self._slots.shape[0], device=self._slots.device)[:, None]
        self.keys[rows, :, self._slots] = key_states.transpose(1, 2)
        self.values[rows, :, self._slots] = value_states.transpose(1, 2)
        return self.keys[:, :, : self._width], self.values[:, :, : self._width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._width, 0

    def get_seq_length(self) -> int:
        """Slots before the pass, at most: models that place tokens by `position_ids` do not compute with it."""
        return self._width - int(self._slots.shape[1])

    def get_max_length(self) -> int:
        return -1


class GraphMemory:
    """The stream that graphs are captured on, None on a CPU, and the memory that they share.

    PyTorch may free cuBLAS's workspace of a stream, which graphs use without owning it. What is allocated in a capture
    stays as long as any graph of its pool. So a stream has one pool, kept by an empty graph, and runs nothing else.
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
    """Memory for the graphs of one model on a device."""
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


class CapturedPass:
    """`function(model, inputs, buffers)`, captured in its first call for each set of buffers, then replayed."""

    def __init__(self, function: Callable[[Any, Any, Buffers], Any], memory: GraphMemory):
        self._function, self._memory = function, memory
        self._graphs: dict[tuple[Any, ...], _Graph] = {}

    def __call__(self, model: Any, inputs: Any, buffers: Buffers) -> Any:
        """Run the function on nested tensors, which are copied to where they were in the capture, and on buffers."""
        leaves = pytree.tree_leaves(inputs)
        plain = [repr(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        key = buffers[0][0].data_ptr(), len(leaves), *plain
        with self._memory.lock:
            self._memory.wait()
            if key not in self._graphs:
                self._graphs[key] = _Graph(lambda static: self._function(model, static, buffers), inputs, self._memory)
            return self._graphs[key].replay(leaves)


class _Graph:
    """One captured graph: where its inputs lie, and its outputs."""

    def __init__(self, run: Callable[[Any], Any], inputs: Any, memory: GraphMemory):
        leaves, structure = pytree.tree_flatten(inputs)
        device = memory.device
        self._inputs = [leaf.to(device, copy=True) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        static = pytree.tree_unflatten(self._inputs, structure)
        self._replay, self._outputs = capture(lambda: run(static), memory)

    def replay(self, leaves: Sequence[Any]) -> Any:
        """The outputs for other inputs, copied: the next replay of any graph of this memory overwrites them."""
        for static, leaf in zip(self._inputs, leaves, strict=True):
            if isinstance(static, torch.Tensor):
                static.copy_(leaf)
        self._replay()
        return pytree.tree_map(torch.clone, self._outputs)


def capture(run: Callable[[], Any], memory: GraphMemory) -> tuple[Callable[[], None], Any]:
    """Capture what a function does on a CUDA device: a function that does it again, and its outputs."""
    assert memory.stream is not None
    with torch.cuda.device(memory.stream.device):
        warm_up = torch.cuda.Stream()
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            for _ in range(2):  # libraries allocate their workspaces and choose kernels
                run()
        torch.cuda.current_stream().wait_stream(warm_up)
        graph = torch.cuda.CUDAGraph()
        try:
            with _capturing_lock, _capturing(graph, memory.stream, memory.pool):
                outputs = run()
        except Exception:
            _repair(memory)
            raise
    return graph.replay, outputs


def _repair(memory: GraphMemory) -> None:
    """After a failed capture, which leaves the random generator and the allocator of the device capturing."""
    assert memory.stream is not None and memory.pool is not None
    memory.is_broken = True
    with _lock:
        _memories.pop(memory.stream.cuda_stream, None)
    with suppress(RuntimeError, AttributeError):  # raised if the allocator is no longer capturing
        torch._C._cuda_endAllocateToPool(memory.stream.device_index, memory.pool)
    _capture_nothing(torch.cuda.Stream(), torch.cuda.graph_pool_handle())


@dataclass
class _Entry:
    """Buffers of the pool, and the cache that uses them, if any."""

    buffers: Buffers
    cache: weakref.ref[RaggedCache] | None = None

    @property
    def is_free(self) -> bool:
        return self.cache is None or self.cache() is None


class GraphBuffers:
    """A pool of key/value buffers for the calls of one model, used again by later calls of the same shape.

    They are never freed, since captured graphs use their addresses; a call copies its prompt's keys and values there
    once.
    """

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    def adopt(self, cache: RaggedCache) -> int:
        """Move the cache into buffers of the pool, unless it is there; returns their capacity in slots."""
        slots = int(cache.buffers()[0][0].shape[2])
        block = max(CAPACITY_BLOCK, 1 << max(0, slots.bit_length() - 3))
        capacity = -(-slots // block) * block
        entry = self._entry_of(cache)
        if entry is None or entry.buffers[0][0].shape[2] < capacity:
            self.release(cache)
            self._move_in(cache, capacity)
        return int(cache.buffers()[0][0].shape[2])

    def release(self, cache: RaggedCache) -> None:
        """Give the cache buffers of its own again."""
        entry = self._entry_of(cache)
        if entry is not None:
            cache.use_buffers([(keys.clone(), values.clone()) for keys, values in entry.buffers])
            entry.cache = None

    def _entry_of(self, cache: RaggedCache) -> _Entry | None:
        """The buffers that the cache uses; those that it has left, because an eager pass outgrew them, become free."""
        for entry in self._entries:
            if entry.cache is not None and entry.cache() is cache:
                if cache.buffers()[0][0].data_ptr() == entry.buffers[0][0].data_ptr():
                    return entry
                entry.cache = None
        return None

    def _move_in(self, cache: RaggedCache, capacity: int) -> None:
        """Copy the cache into free buffers of the same shapes, or into new ones."""
        own = cache.buffers()
        layout = [(_layout(keys, capacity), _layout(values, capacity)) for keys, values in own]
        entry = next((entry for entry in self._entries if entry.is_free and _layouts(entry.buffers) == layout), None)
        if entry is None:
            entry = _Entry([(_static(keys, capacity), _static(values, capacity)) for keys, values in own])
            self._entries.append(entry)
        for pair, static_pair in zip(own, entry.buffers, strict=True):
            for source, static in zip(pair, static_pair, strict=True):
                static.zero_()  # unwritten slots are masked, but a weight of 0 times NaN is NaN
                static[:, :, : source.shape[2]] = source
        entry.cache = weakref.ref(cache)
        cache.use_buffers(entry.buffers)


def _layout(buffer: torch.Tensor, capacity: int) -> tuple[Any, ...]:
    """Shape with this capacity, dtype and device: buffers that agree in them are interchangeable."""
    batch, heads, _, size = buffer.shape
    return batch, heads, capacity, size, buffer.dtype, buffer.device


def _layouts(buffers: Buffers) -> list[tuple[Any, Any]]:
    return [(_layout(keys, keys.shape[2]), _layout(values, values.shape[2])) for keys, values in buffers]


def _static(buffer: torch.Tensor, capacity: int) -> torch.Tensor:
    """A new buffer of the same layout, at an address that graphs may rely on."""
    batch, heads, _, size = buffer.shape
    with torch.inference_mode(False):  # a later call may run outside of inference mode
        return torch.zeros(batch, heads, capacity, size, dtype=buffer.dtype, device=buffer.device)


def fingerprint(model: nn.Module) -> int:
    """A hash of what a captured pass depends on beside its inputs; not of what a hook or another object refers to.

    These are the addresses of weights and buffers, the precision of matrix products, and of each module the class, the
    hooks and plain attributes, such as which adapters are active.
    """
    tensors = [*model.parameters(), *model.buffers()]
    places = [(tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in tensors]
    precision = torch.get_float32_matmul_precision()
    return hash((precision, tuple(places), tuple(map(_state, model.modules()))))


def _state(module: nn.Module) -> tuple[Any, ...]:
    own = vars(module)
    plain = [(name, repr(value)) for name, value in own.items() if name not in _OF_EVERY_MODULE and _is_plain(value)]
    hooks = [_others(own[name]) for name in ("_forward_hooks", "_forward_pre_hooks")]
    return id(module), type(module), id(own.get("forward")), *hooks, tuple(plain)


def _others(hooks: Mapping[int, Any]) -> tuple[int, ...]:
    """The numbers of hooks that are not this package's, whose own are registered while a prompt is read."""
    own = __name__.split(".")[0]
    return tuple(number for number, hook in hooks.items() if not str(getattr(hook, "__module__", "")).startswith(own))


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str | None)


_OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}
"""Attributes of PyTorch's own: the collections of a module's parts and hooks."""


class CapturedModule:
    """The captured passes of one module, shared by all calls; used by one thread at a time."""

    def __init__(self) -> None:
        self._fingerprint: int | None = None
        self._memory: GraphMemory | None = None
        self._passes: dict[tuple[Any, ...], CapturedPass] = {}
        self._buffers, self._lock = GraphBuffers(), threading.Lock()

    def begin_call(self, module: nn.Module) -> None:
        """Forget the graphs of a module that has changed."""
        if (current := fingerprint(module)) != self._fingerprint:
            with self._lock:
                self._passes, self._fingerprint = {}, current
