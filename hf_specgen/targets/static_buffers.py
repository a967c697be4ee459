"""Static buffers of keys and values: captured functions read and write the same addresses, call after call."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from hf_specgen.targets.cache import RaggedCache
from hf_specgen.targets.cache_layer import RaggedLayer

CAPACITY_BLOCK = 1024
"""Capacities of buffers, in slots, are multiples of it, so that calls of similar lengths share graphs; from 8,192 on
there are four between a length and its double. Everything is captured anew for each capacity."""
MAX_IDLE_BUFFERS = 2
"""Sets of buffers, with their graphs, that are kept for a module although no call uses them."""

Buffers = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer."""


class BufferSet:
    """Static buffers for the keys and values of each layer, `tensors`; the cache in them, if any, and their graphs."""

    def __init__(self, buffers: Buffers, capacity: int):
        self.joined: torch.Tensor | None = None
        """`[2 * layers, batch, heads, slots, head_dim]`, if the layers are alike."""
        if len({str(layout) for layout in _layout(buffers, capacity)}) == 1:
            self.joined = _new_buffers(buffers[0][0], capacity, 2 * len(buffers))
            self.tensors = list(zip(self.joined[::2], self.joined[1::2], strict=True))
        else:
            self.tensors = [
                (_new_buffers(keys, capacity)[0], _new_buffers(values, capacity)[0]) for keys, values in buffers
            ]
        self.graphs: dict[tuple[Any, ...], Any] = {}
        """By the keys of runs, the one that was not used for longest first."""
        self.cache: weakref.ref[RaggedCache] | None = None


class GraphBuffers:
    """The buffers for the calls of one module, used again by later calls of the same shape.

    A call copies its prompt's keys and values there once.
    """

    def __init__(self) -> None:
        self.sets: list[BufferSet] = []

    def of_cache(self, cache: RaggedCache) -> BufferSet | None:
        """The buffers that the cache uses; None if it uses none.

        Side effect: buffers that the cache has left, because an eager pass outgrew them, become idle.
        """
        for buffers in self.sets:
            if buffers.cache is not None and buffers.cache() is cache:
                if cache.buffers()[0][0].data_ptr() == buffers.tensors[0][0].data_ptr():
                    return buffers
                buffers.cache = None
        return None

    def adopt(self, cache: RaggedCache) -> int:
        """Move the cache into static buffers, unless it is there; returns their capacity in slots."""
        if self.of_cache(cache) is None:
            tensors = cache.buffers()
            slots = int(tensors[0][0].shape[2])
            # Rounded up to a multiple of a block, which grows with the slots.
            block = max(CAPACITY_BLOCK, 1 << max(0, slots.bit_length() - 3))
            buffers = self._idle_buffers(tensors, -(-slots // block) * block)
            for pair, static_pair in zip(tensors, buffers.tensors, strict=True):
                for source, static in zip(pair, static_pair, strict=True):
                    static.zero_()  # unwritten slots are masked, but a weight of 0 times NaN is NaN
                    static[:, :, : source.shape[2]] = source
            buffers.cache = weakref.ref(cache)
            cache.use_buffers(buffers.tensors)
        return int(cache.buffers()[0][0].shape[2])

    def release(self, cache: RaggedCache) -> None:
        """Let other calls use the buffers of a cache, which needs them no longer."""
        for buffers in self.sets:
            if buffers.cache is not None and buffers.cache() is cache:
                buffers.cache = None

    def _idle_buffers(self, tensors: Buffers, capacity: int) -> BufferSet:
        """Idle buffers like these tensors, with this capacity, or new ones; drops the sets that were idle longest."""
        layout = _layout(tensors, capacity)
        idle = [buffers for buffers in self.sets if buffers.cache is None or buffers.cache() is None]
        for buffers in idle:
            if _layout(buffers.tensors, buffers.tensors[0][0].shape[2]) == layout:
                # To the end of the list, as the last one to be dropped.
                self.sets.remove(buffers)
                self.sets.append(buffers)
                return buffers
        for buffers in idle[: max(0, len(idle) - MAX_IDLE_BUFFERS)]:
            self.sets.remove(buffers)
        self.sets.append(BufferSet(tensors, capacity))
        return self.sets[-1]


def _layout(buffers: Buffers, capacity: int) -> list[tuple[Any, ...]]:
    """Shapes with this capacity, dtypes and devices: buffers that agree in them are interchangeable."""
    tensors = [tensor for pair in buffers for tensor in pair]
    return [(tensor.shape[:2], capacity, tensor.shape[3], tensor.dtype, tensor.device) for tensor in tensors]


def _new_buffers(buffer: torch.Tensor, capacity: int, count: int = 1) -> torch.Tensor:
    """`[count, …]` new buffers of the same layout, at addresses that graphs may rely on."""
    batch, heads, _, size = buffer.shape
    with torch.inference_mode(False):  # a later call may run outside of inference mode
        return torch.zeros(count, batch, heads, capacity, size, dtype=buffer.dtype, device=buffer.device)


class GraphLayer(RaggedLayer):
    """Keys and values of one layer in a captured function, written to buffers at `slots` `[batch, new]`, in order.

    Attention reads the whole buffers; the mask leaves out the unfilled slots.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        super().__init__()
        self.keys = keys
        self.values = values
        self.slots = slots
        self._written = 0
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


class GraphCache(Cache):
    """The cache of a captured function; `joined` `[2 * layers, batch, …]` are all buffers, if they are alike."""

    def __init__(self, layers: list[Any], joined: torch.Tensor | None):
        super().__init__(layers=layers)
        self.joined = joined
