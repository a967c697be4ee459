"""Buffers of keys and values that keep their addresses from call to call, as captured CUDA graphs require.

A graph reads and writes the memory that it was captured with. So a call uses the buffers of an earlier call of the same
shape again, once that call has ended, and copies its prompt's keys and values there once.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from hf_specgen.targets.cache import RaggedCache

Buffers = list[tuple[torch.Tensor, torch.Tensor]]

CAPACITY_BLOCK = 256
"""Capacities, in slots, are multiples of it, so that calls of similar lengths share graphs; from 2,048 on there are
four between a length and its double."""


@dataclass
class _Entry:
    """Buffers of the pool, and the cache that uses them, if any."""

    buffers: Buffers
    cache: weakref.ref[RaggedCache] | None = None

    @property
    def is_free(self) -> bool:
        return self.cache is None or self.cache() is None


class GraphBuffers:
    """A pool of buffers for the calls of one model; buffers are never freed, since captured graphs use them."""

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
        wanted = [(_kind(keys, capacity), _kind(values, capacity)) for keys, values in own]
        entry = next((entry for entry in self._entries if entry.is_free and _kinds(entry.buffers) == wanted), None)
        if entry is None:
            entry = _Entry([(_static(keys, capacity), _static(values, capacity)) for keys, values in own])
            self._entries.append(entry)
        for pair, static_pair in zip(own, entry.buffers, strict=True):
            for source, static in zip(pair, static_pair, strict=True):
                static.zero_()  # unwritten slots are masked, but a weight of 0 times NaN is NaN
                static[:, :, : source.shape[2]] = source
        entry.cache = weakref.ref(cache)
        cache.use_buffers(entry.buffers)


def _kind(buffer: torch.Tensor, capacity: int) -> tuple[Any, ...]:
    """Shape with this capacity, dtype and device: buffers that agree in them are interchangeable."""
    batch, heads, _, size = buffer.shape
    return batch, heads, capacity, size, buffer.dtype, buffer.device


def _kinds(buffers: Buffers) -> list[tuple[Any, Any]]:
    return [(_kind(keys, keys.shape[2]), _kind(values, values.shape[2])) for keys, values in buffers]


def _static(buffer: torch.Tensor, capacity: int) -> torch.Tensor:
    """A new buffer of the same kind, at an address that graphs may rely on."""
    batch, heads, _, size = buffer.shape
    with torch.inference_mode(False):  # a later call may run outside of inference mode
        static = torch.zeros(batch, heads, capacity, size, dtype=buffer.dtype, device=buffer.device)
    torch._dynamo.mark_static_address(static)
    return static
