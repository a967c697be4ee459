"""Buffers of keys and values at lasting addresses, which captured functions read and write, call after call."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from hf_specgen.targets.cache import RaggedCache, RaggedLayer

CAPACITY_BLOCK = 1024
"""Capacities of buffers, in slots, are multiples of it, so that calls of similar lengths share graphs; from 8,192 on
there are four between a length and its double. Everything is captured anew for each capacity."""
MAX_IDLE_BUFFERS = 2
"""Sets of buffers, with their graphs, that are kept for a module although no call uses them."""

Buffers = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer."""


class BufferSet:
    """Keys and values of each layer at lasting addresses; the cache that uses them, if any, and the graphs that do."""

    def __init__(self, buffers: Buffers, capacity: int):
        self.joined: torch.Tensor | None = None
        """`[2 * layers, batch, heads, slots, head_dim]`, if the layers are alike."""
        if len({str(one) for one in _layout(buffers, capacity)}) == 1:
            self.joined = _static(buffers[0][0], capacity, 2 * len(buffers))
            self.buffers = list(zip(self.joined[::2], self.joined[1::2], strict=True))
        else:
            self.buffers = [(_static(keys, capacity)[0], _static(values, capacity)[0]) for keys, values in buffers]
        self.graphs: dict[tuple[Any, ...], Any] = {}
        self.cache: weakref.ref[RaggedCache] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no call uses the buffers."""
        return self.cache is None or self.cache() is None


class GraphBuffers:
    """The buffers for the calls of one module, used again by later calls of the same shape.

    A call copies its prompt's keys and values there once.
    """

    def __init__(self) -> None:
        self.sets: list[BufferSet] = []

    def of_cache(self, cache: RaggedCache) -> BufferSet | None:
        """The buffers that the cache uses; those that it has left, because an eager pass outgrew them, become idle."""
        for lasting in self.sets:
            if lasting.cache is not None and lasting.cache() is cache:
                if cache.buffers()[0][0].data_ptr() == lasting.buffers[0][0].data_ptr():
                    return lasting
                lasting.cache = None
        return None

    def adopt(self, cache: RaggedCache) -> int:
        """Move the cache into lasting buffers, unless it is there; returns their capacity in slots."""
        if self.of_cache(cache) is None:
            own = cache.buffers()
            slots = int(own[0][0].shape[2])
            block = max(CAPACITY_BLOCK, 1 << max(0, slots.bit_length() - 3))
            lasting = self._idle_buffers(own, -(-slots // block) * block)
            for pair, static_pair in zip(own, lasting.buffers, strict=True):
                for source, static in zip(pair, static_pair, strict=True):
                    static.zero_()  # unwritten slots are masked, but a weight of 0 times NaN is NaN
                    static[:, :, : source.shape[2]] = source
            lasting.cache = weakref.ref(cache)
            cache.use_buffers(lasting.buffers)
        return int(cache.buffers()[0][0].shape[2])

    def release(self, cache: RaggedCache) -> None:
        """Let other calls use the buffers of a cache, which needs them no longer."""
        for lasting in self.sets:
            if lasting.cache is not None and lasting.cache() is cache:
                lasting.cache = None

    def _idle_buffers(self, buffers: Buffers, capacity: int) -> BufferSet:
        """Idle buffers like these, with this capacity, or new ones; drops those that were idle longest."""
        idle, layout = [one for one in self.sets if one.is_idle], _layout(buffers, capacity)
        found = next((one for one in idle if _layout(one.buffers, one.buffers[0][0].shape[2]) == layout), None)
        for old in [found] if found else idle[: max(0, len(idle) - MAX_IDLE_BUFFERS)]:
            self.sets.remove(old)
        self.sets.append(found or BufferSet(buffers, capacity))
        return self.sets[-1]


def _layout(buffers: Buffers, capacity: int) -> list[tuple[Any, ...]]:
    """Shapes with this capacity, dtypes and devices: buffers that agree in them are interchangeable."""
    return [(one.shape[:2], capacity, one.shape[3], one.dtype, one.device) for pair in buffers for one in pair]


def _static(buffer: torch.Tensor, capacity: int, count: int = 1) -> torch.Tensor:
    """So many new buffers of the same layout, at addresses that graphs may rely on."""
    batch, heads, _, size = buffer.shape
    with torch.inference_mode(False):  # a later call may run outside of inference mode
        return torch.zeros(count, batch, heads, capacity, size, dtype=buffer.dtype, device=buffer.device)


class StepLayer(RaggedLayer):
    """Keys and values of one layer in a captured function, written to buffers at `slots` `[batch, new]`, in order.

    Attention reads the whole buffers; the mask leaves out the unfilled slots.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.slots, self._written = keys, values, slots, 0
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `[batch, heads, new, head_dim]` states to the next slots; returns all slots."""
        assert self.keys is not None and self.values is not None
        rows = torch.arange(self.slots.shape[0], device=self.slots.device)[:, None]
        slots = self.slots[:, self._written : self._written + key_states.shape[2]]
        self._written += key_states.shape[2]
        self.keys[rows, :, slots] = key_states.transpose(1, 2)
        self.values[rows, :, slots] = value_states.transpose(1, 2)
        return self.keys, self.values

    @property
    def next_slots(self) -> torch.Tensor:
        """`[batch, 1]` where the next token of each row is written."""
        return self.slots[:, self._written : self._written + 1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        assert self.keys is not None
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        """Slots before the pass, at most: models that place tokens by `position_ids` do not compute with it."""
        return self.get_mask_sizes(0)[0] - int(self.slots.shape[1])


class StepCache(Cache):
    """The cache of a captured function; `joined` `[2 * layers, batch, …]` are all buffers, if they are alike."""

    def __init__(self, layers: list[Any], joined: torch.Tensor | None):
        super().__init__(layers=layers)
        self.joined = joined


def move_captured(module: torch.nn.Module, moves: torch.Tensor, cache: Any) -> None:
    """Copy slots of all layers, see `path_moves`: the function that commits accepted paths."""
    buffers, (rows, source, destination) = cache.joined, moves.unbind()
    if buffers is None:
        for layer in cache.layers:
            layer.move(rows, source, destination)
        return
    sizes = len(buffers), -1, buffers.shape[2], -1, buffers.shape[4]
    source, destination = (slots[None, :, None, :, None].expand(sizes) for slots in (source, destination))
    buffers.scatter_(3, destination, buffers.gather(3, source))
