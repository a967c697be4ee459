"""One layer of the cache: a buffer of keys and values with spare slots, and a number of filled slots per row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

MIN_SPARE_SLOTS, SPARE_SHARE = 64, 1 / 32
"""A buffer that grows gets the larger of this many spare slots and this share of its length: from 2,000 tokens on, peak
memory is at most 1.05 times that of a cache without spare slots, and a slot is copied 32 times at most."""
MAX_PREFILL_DRAFT, MAX_ROLLBACK = 256, 64
"""Tokens that may be removed again: drafted ones in the prefill pass; in later steps, besides their own, accepted ones
that a stopping criterion cuts off."""


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer: buffers `[batch, heads, capacity, head_dim]` and a length per row.

    Args:
        window: sliding window of the layer, in tokens; None for full attention.
        max_slots: the number of slots that the call can fill, if known: the buffer does not grow beyond it.

    Attributes:
        lengths: filled slots of each row, dropped ones included.
        first: how many slots at the beginning have been dropped (sliding windows only).
    """

    is_croppable = True

    def __init__(self, window: int | None = None, max_slots: int | None = None) -> None:
        super().__init__()
        self.window, self.max_slots = window, max_slots
        self.is_sliding = window is not None
        self.committed: int | None = None
        """The length that later steps roll back to at least, up to `MAX_ROLLBACK`; None while the prompt is read."""
        self.protected: int | None = None
        """A length that the layer must be able to roll back to, if a user owns the cache."""
        self.lengths: tuple[int, ...] = ()
        self.first = 0

    @property
    def parts(self) -> tuple[Any, ...]:
        """The parts that are rolled back separately: the layer, and any states beside its keys and values."""
        return (self,)

    @property
    def batch_size(self) -> int:
        return len(self.lengths)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads, _, head_dim = key_states.shape
        self.keys = key_states.new_empty(batch, heads, 0, head_dim)
        self.values = value_states.new_empty(batch, value_states.shape[1], 0, value_states.shape[3])
        self.lengths = (0,) * batch
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `[batch, heads, new, head_dim]` states to each row; returns all slots up to the longest row."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != len(self.lengths):
            raise ValueError(f"the cache holds {len(self.lengths)} rows, got keys for {key_states.shape[0]}")
        starts, new = tuple(length - self.first for length in self.lengths), key_states.shape[2]
        width = max(starts) + new
        self.reserve(width)
        self._leave_inference_mode()
        assert self.keys is not None and self.values is not None
        if len(set(starts)) == 1:
            self.keys[:, :, starts[0] : width] = key_states
            self.values[:, :, starts[0] : width] = value_states
        else:
            rows, slots = _slots(starts, new, self.device)
            self.keys[rows, :, slots] = key_states.transpose(1, 2)
            self.values[rows, :, slots] = value_states.transpose(1, 2)
        self.lengths = tuple(length + new for length in self.lengths)
        keys, values = self.keys[:, :, :width], self.values[:, :, :width]
        self._drop_invisible(min(self.lengths) - MAX_PREFILL_DRAFT if self.committed is None else self.committed)
        return keys, values

    def reserve(self, width: int) -> None:
        """Make the buffer at least `width` slots long."""
        assert self.keys is not None and self.values is not None
        if width > self.keys.shape[2]:
            capacity = width + max(MIN_SPARE_SLOTS, int(SPARE_SHARE * width))
            if self.max_slots is not None and self.max_slots - self.first >= width:
                capacity = min(capacity, self.max_slots - self.first)
            self.keys = _resized(self.keys, 0, capacity)
            self.values = _resized(self.values, 0, capacity)

    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers themselves, for passes that write to given slots, see `hf_specgen.targets.step_cache`."""
        self._leave_inference_mode()
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def _drop_invisible(self, committed: int) -> None:
        """Drop slots outside the sliding window of every later query, if each row keeps at least `committed` slots."""
        if self.window is None or self.keys is None or self.values is None:
            return
        reachable = (
            committed - MAX_ROLLBACK if self.protected is None else min(self.protected, committed - MAX_ROLLBACK)
        )
        invisible = reachable - self.window - self.first
        if invisible > max(MIN_SPARE_SLOTS, self.window // 2):  # rarely true, so that copying the window is negligible
            filled = max(self.lengths) - self.first - invisible
            self.keys, self.values = _resized(self.keys, invisible, filled), _resized(self.values, invisible, filled)
            self.first += invisible

    def _leave_inference_mode(self) -> None:
        """A cache made under `torch.inference_mode()` cannot be written to outside of it; a copy can."""
        if self.keys is not None and self.keys.is_inference() and not torch.is_inference_mode_enabled():
            assert self.values is not None
            self.keys, self.values = self.keys.clone(), self.values.clone()

    def move(self, rows: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy slots within rows; all three are `[moved, slots]`, on the layer's device."""
        assert self.keys is not None and self.values is not None
        if self.first:
            source, destination = source - self.first, destination - self.first
        self.keys[rows, :, destination] = self.keys[rows, :, source]
        self.values[rows, :, destination] = self.values[rows, :, source]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length - self.first, self.first

    def get_seq_length(self) -> int:
        return max(self.lengths, default=0)

    def get_max_length(self) -> int:
        return -1

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths[b]` slots of row b; the others will be overwritten."""
        self.lengths, self.committed = tuple(lengths), min(lengths, default=0)
        if not any(lengths):
            self.first = 0

    def reset(self) -> None:
        self.lengths = (0,) * len(self.lengths)
        self.first = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` slots of every row."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as a negative number, got {tokens_to_remove}")
        self.lengths = tuple(max(length - abs(tokens_to_remove), 0) for length in self.lengths)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(len(self.lengths)).repeat_interleave(repeats))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[indices], self.values[indices]
            self.lengths = tuple(self.lengths[row] for row in indices.tolist())


def _resized(buffer: torch.Tensor, dropped: int, capacity: int) -> torch.Tensor:
    """The slots of a buffer from `dropped` on, in a new buffer of `capacity` slots."""
    batch, heads, slots, head_dim = buffer.shape
    kept = min(slots - dropped, capacity)
    # Zeros: unwritten slots are masked, but a weight of 0 times NaN is NaN.
    resized = buffer.new_zeros(batch, heads, capacity, head_dim)
    resized[:, :, :kept] = buffer[:, :, dropped : dropped + kept]
    return resized


@lru_cache(maxsize=8)
def _slots(starts: tuple[int, ...], new: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Index tensors `[batch, 1]` and `[batch, new]` of the slots after each row; shared by all layers of a step."""
    slots = torch.tensor(starts, device=device)[:, None] + torch.arange(new, device=device)
    return torch.arange(len(starts), device=device)[:, None], slots
