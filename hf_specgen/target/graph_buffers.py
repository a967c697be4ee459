"""Buffers of keys and values that keep their addresses from call to call, as captured CUDA graphs require.

A graph reads and writes the memory that it was captured with. So a call borrows the buffers of an earlier call of the
same shape, and copies its prompt's keys and values there once.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from hf_specgen.target.cache import RaggedCache

Buffers = list[tuple[torch.Tensor, torch.Tensor]]

CAPACITY_BLOCK = 256
"""Capacities are multiples of it, so that calls of similar lengths share graphs."""


@dataclass
class _Loan:
    """Buffers, and the cache that uses them, if any."""

    buffers: Buffers
    borrower: weakref.ref[RaggedCache] | None = None

    @property
    def is_free(self) -> bool:
        return self.borrower is None or self.borrower() is None


class GraphBuffers:
    """The buffers of one model."""

    def __init__(self) -> None:
        self._loans: list[_Loan] = []

    def adopt(self, cache: RaggedCache) -> int:
        """Move the cache into lasting buffers, unless it is there; returns their capacity."""
        capacity = -(-cache.buffers()[0][0].shape[2] // CAPACITY_BLOCK) * CAPACITY_BLOCK
        loan = self._loan_of(cache)
        if loan is None or loan.buffers[0][0].shape[2] < capacity:
            self.release(cache)
            self._lend(cache, capacity)
        return int(cache.buffers()[0][0].shape[2])

    def release(self, cache: RaggedCache) -> None:
        """Give the cache buffers of its own again."""
        loan = self._loan_of(cache)
        if loan is not None:
            cache.use_buffers([(keys.clone(), values.clone()) for keys, values in loan.buffers])
            loan.borrower = None

    def _loan_of(self, cache: RaggedCache) -> _Loan | None:
        return next((loan for loan in self._loans if loan.borrower is not None and loan.borrower() is cache), None)

    def _lend(self, cache: RaggedCache, capacity: int) -> None:
        own = cache.buffers()
        wanted = [(_description(keys, capacity), _description(values, capacity)) for keys, values in own]
        loan = next((loan for loan in self._loans if loan.is_free and _describe(loan.buffers) == wanted), None)
        if loan is None:
            loan = _Loan([(_lasting(keys, capacity), _lasting(values, capacity)) for keys, values in own])
            self._loans.append(loan)
        for (keys, values), (lasting_keys, lasting_values) in zip(own, loan.buffers, strict=True):
            for source, lasting in ((keys, lasting_keys), (values, lasting_values)):
                lasting.zero_()  # unwritten slots are masked, but a weight of 0 times NaN is NaN
                lasting[:, :, : source.shape[2]] = source
        loan.borrower = weakref.ref(cache)
        cache.use_buffers(loan.buffers)


def _description(buffer: torch.Tensor, capacity: int) -> tuple[Any, ...]:
    batch, heads, _, size = buffer.shape
    return batch, heads, capacity, size, buffer.dtype, buffer.device


def _describe(buffers: Buffers) -> list[tuple[Any, Any]]:
    return [(_description(keys, keys.shape[2]), _description(values, values.shape[2])) for keys, values in buffers]


def _lasting(buffer: torch.Tensor, capacity: int) -> torch.Tensor:
    batch, heads, _, size = buffer.shape
    lasting = buffer.new_zeros(batch, heads, capacity, size)
    torch._dynamo.mark_static_address(lasting)
    return lasting
