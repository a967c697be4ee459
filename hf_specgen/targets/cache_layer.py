"""The keys and values of one layer in a cache with a separate length for each row."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from hf_specgen.compat import CACHE
from hf_specgen.targets.state_cache import MAX_ROLLBACK

MIN_SPARE_SLOTS = 64
"""Spare slots of a buffer that grows, or a 32nd of its length: peak memory then is at most 1.05 times that of
a cache without spare slots from 2,000 tokens on, and a slot is copied 32 times at most."""


MAX_PASS = 1024
"""Slots beyond twice the text that no pass reaches."""


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer: buffers `[batch, heads, capacity, head_dim]` and filled slots per row, `lengths`.

    `first` slots at the beginning have been dropped (sliding windows only). Later steps roll back to `committed` slots
    at least, up to `MAX_ROLLBACK`.
    """

    keys: Any
    values: Any

    def __init__(self, window: int | None = None, has_attention: bool = True) -> None:
        super().__init__()
        self.window, self.is_sliding, self.has_attention = window, window is not None, has_attention
        self.committed: int | None = None
        self.lengths: tuple[int, ...] = ()
        self.first = 0
        self.index: RaggedLayer | None = None
        """The keys of the layer's indexer."""
        self._positions: torch.Tensor | None = None
        self._written_buffers: tuple[Any, ...] = ()  # references to the buffers that the last pass wrote to
        self._is_replaced = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads, _, head_dim = key_states.shape
        self.keys = key_states.new_empty(batch, heads, 0, head_dim)
        self.values = value_states.new_empty(batch, value_states.shape[1], 0, value_states.shape[3])
        self.lengths = (0,) * batch
        self.is_initialized = True

    @property
    def max_pass_tokens(self) -> float:
        """How many tokens of a row a pass may add."""
        return math.inf

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `[batch, heads, new, head_dim]` states to each row; returns all slots up to the longest row."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != len(self.lengths):
            raise ValueError(
                f"the cache holds {len(self.lengths)} rows, got keys for {key_states.shape[0]}; leave {CACHE} "
                "out, or give it to a call with as many rows as the one that returned it"
            )
        self._is_replaced = self.was_replaced()  # by a chunk of the prompt before this one
        starts, new = tuple(length - self.first for length in self.lengths), key_states.shape[2]
        width = max(starts) + new
        self.reserve(width)
        self._leave_inference_mode()
        self.keys, key_states = _promoted(self.keys, key_states)
        self.values, value_states = _promoted(self.values, value_states)
        if len(set(starts)) == 1:
            self.keys[:, :, starts[0] : width] = key_states
            self.values[:, :, starts[0] : width] = value_states
        else:
            rows, slots = _slots(starts, new, self.keys.device)
            self.keys[rows, :, slots] = key_states.transpose(1, 2)
            self.values[rows, :, slots] = value_states.transpose(1, 2)
        self.lengths = tuple(length + new for length in self.lengths)
        keys, values = self.keys[:, :, :width], self.values[:, :, :width]
        self._drop_invisible(min(self.lengths) if self.committed is None else self.committed)
        self._written_buffers = weakref.ref(self.keys), weakref.ref(self.values)
        return keys, values

    def was_replaced(self) -> bool:
        """Whether something has put other tensors in place of the buffers since a pass wrote to them; asked once."""
        written, self._written_buffers = self._written_buffers, ()
        is_replaced = bool(written) and (written[0]() is not self.keys or written[1]() is not self.values)
        is_replaced, self._is_replaced = is_replaced or self._is_replaced, False
        return is_replaced

    def update_index(self, keys: torch.Tensor) -> torch.Tensor:
        """Append the keys of an indexer, `[batch, heads, new, head_dim]`; returns all slots up to the longest row."""
        if self.index is None:
            self.index = RaggedLayer()
        return self.index.update(keys, keys[..., :0])[0]

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """`[axes, batch, slots]` the positions of cached keys, after which an indexer appends those of its queries.

        After the prompt each slot has the next position. Slots that a pass may write to are included, more than as many
        again: rows of different lengths write to different ones.
        """
        if self._positions is None or self.committed is None:
            return self._positions
        missing = 2 * self.get_seq_length() + MAX_PASS - self._positions.shape[-1]
        following = self._positions[..., -1:] + torch.arange(1, missing + 1, device=self._positions.device)
        return torch.cat([self._positions, following], dim=-1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: torch.Tensor | None) -> None:
        if self.committed is None:  # those of the prompt
            self._positions = positions

    def take_over_index(self, layer: Any) -> None:
        """Take over what the indexer of a layer of Transformers has cached."""
        if getattr(layer, "is_indexer_initialized", False):
            self.update_index(layer.indexer_keys[:, None])
            self.indexer_position_ids = layer.indexer_position_ids
        elif getattr(layer, "idx_keys", None) is not None:
            self.update_index(layer.idx_keys)

    def hand_over_index(self, layer: Any) -> None:
        """Write the keys of the indexer, of rows that are equally long, to a layer of Transformers."""
        if self.index is None:
            return
        keys = self.index.keys[:, :, : self.index.get_seq_length()]
        if hasattr(layer, "update_index"):
            layer.update_index(keys)
        else:
            layer.update_indexer(keys[:, 0])
        if (positions := self.indexer_position_ids) is not None:
            layer.indexer_position_ids = positions[..., : keys.shape[2]]

    def reserve(self, width: int) -> None:
        """Make the buffer at least `width` slots long."""
        if width > self.keys.shape[2]:
            capacity = width + max(MIN_SPARE_SLOTS, width // 32)
            self.keys = _resized(self.keys, 0, capacity)
            self.values = _resized(self.values, 0, capacity)

    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers themselves, for captured passes, which write to given slots."""
        self._leave_inference_mode()
        return self.keys, self.values

    def _drop_invisible(self, committed: int) -> None:
        """Drop slots outside the sliding window of every later query, if each row keeps at least `committed` slots."""
        if self.window is None:
            return
        invisible = committed - MAX_ROLLBACK - self.window - self.first
        if invisible > max(MIN_SPARE_SLOTS, self.window // 2):  # rarely true, so that copying the window is negligible
            filled = max(self.lengths) - self.first - invisible
            self.keys, self.values = _resized(self.keys, invisible, filled), _resized(self.values, invisible, filled)
            self.first += invisible

    def _leave_inference_mode(self) -> None:
        """A cache made under `torch.inference_mode()` cannot be written to outside of it; a copy can."""
        if self.keys is not None and self.keys.is_inference() and not torch.is_inference_mode_enabled():
            self.keys, self.values = self.keys.clone(), self.values.clone()

    def move(self, rows: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy slots within rows; all three are `[moved, slots]`, on the device of the keys."""
        if self.first:
            source, destination = source - self.first, destination - self.first
        for states in (self.keys, self.values):
            states[rows, :, destination] = states[rows, :, source]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length - self.first, self.first

    def get_seq_length(self) -> int:
        return max(self.lengths, default=0)

    def get_max_length(self) -> int:
        return -1

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths[b]` slots of row b; the others will be overwritten. Raises if a window is gone."""
        shortest = min(lengths, default=0)
        if not any(lengths):
            self.first = 0
        elif self.first and self.first > shortest + 1 - (self.window or 0):
            raise RuntimeError(f"{shortest} tokens cannot be kept: the sliding window before them has been dropped")
        self.lengths, self.committed = tuple(lengths), shortest

    def take_over(self, layer: Any, slots: int) -> None:
        """Take over the contents of a layer of Transformers, with capacity for `slots` slots.

        A dynamic layer then is a view of these buffers, which changes nothing of what it shows, so that the memory is
        not needed twice. Slots before its sliding window count as dropped.
        """
        length = int(layer.get_seq_length())
        if not length:
            return
        held = min(length, layer.keys.shape[2])
        states = layer.keys[:, :, :held], layer.values[:, :, :held]
        self.lazy_initialization(*states)
        self.reserve(held if self.is_sliding else slots)
        self.update(*states)
        if isinstance(layer, DynamicLayer):
            layer.keys, layer.values = self.keys[:, :, :held], self.values[:, :, :held]
        self.lengths = (length,) * len(self.lengths)
        self.first = length - held

    def hand_over(self, layer: Any) -> None:
        """Write the contents, whose rows are equally long, to a layer of Transformers."""
        length = self.get_seq_length()
        window = layer.max_cache_len if isinstance(layer, StaticLayer) else getattr(layer, "sliding_window", length)
        start, stop = max(0, length - self.first - window), length - self.first
        layer.reset()
        layer.update(self.keys[:, :, start:stop], self.values[:, :, start:stop])
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = length
        elif isinstance(layer, StaticSlidingWindowLayer):
            layer.cumulative_length_int = length

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.keys, self.values = self.keys[indices], self.values[indices]
        self._positions = None if self._positions is None else self._positions[:, indices.to(self._positions.device)]
        self.lengths = tuple(self.lengths[row] for row in indices.tolist())

    def append_rows(self, other: RaggedLayer) -> None:
        """Add the rows of another layer; slots that either has dropped become zeros, which its mask hides."""
        capacity = max(self.get_seq_length(), other.get_seq_length()) + MIN_SPARE_SLOTS

        def joined(states: Any, more: Any) -> torch.Tensor:
            parts = (states, self.first), (more, other.first)
            return torch.cat([pad(part, (0, 0, first, capacity))[:, :, :capacity] for part, first in parts])

        self.keys, self.values, self.first = joined(self.keys, other.keys), joined(self.values, other.values), 0
        self.set_lengths(self.lengths + other.lengths)


class ImageLayer(RaggedLayer):
    """Keys and values of images that a layer of a decoder attends to, as in Mllama: no rollback of the text cuts them.

    The model reads `keys` and `values` themselves, which therefore have no spare slots; `lengths` of text are empty.
    """

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the states of further images."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.lengths = ()
        self.keys = torch.cat([self.keys, key_states], dim=2)
        self.values = torch.cat([self.values, value_states], dim=2)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.keys.shape[2] if self.is_initialized else 0

    def take_over(self, layer: Any, slots: int) -> None:
        if layer.get_seq_length():
            self.update(layer.keys, layer.values)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.keys, self.values = self.keys[indices], self.values[indices]

    def append_rows(self, other: RaggedLayer) -> None:
        self.keys, self.values = torch.cat([self.keys, other.keys]), torch.cat([self.values, other.values])

    def reserve(self, width: int) -> None:
        """Do nothing, as the following methods: this is no text."""

    def set_lengths(self, lengths: Sequence[int]) -> None:
        pass

    def move(self, rows: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
        pass


def _resized(buffer: torch.Tensor, dropped: int, capacity: int) -> torch.Tensor:
    """The slots of a buffer from `dropped` on, in a new buffer of `capacity` slots."""
    batch, heads, slots, head_dim = buffer.shape
    kept = min(slots - dropped, capacity)
    # Zeros: unwritten slots are masked, but a weight of 0 times NaN is NaN.
    resized = buffer.new_zeros(batch, heads, capacity, head_dim)
    resized[:, :, :kept] = buffer[:, :, dropped : dropped + kept]
    return resized


def _promoted(buffer: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in the dtype that a `DynamicCache` has after joining them; they differ where autocast begins or ends."""
    dtype = torch.promote_types(buffer.dtype, states.dtype)
    return buffer.to(dtype), states.to(dtype)


@lru_cache(maxsize=8)
def _slots(starts: tuple[int, ...], new: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Index tensors `[batch, 1]` and `[batch, new]` of the slots after each row; shared by all layers of a step."""
    slots = torch.tensor(starts, device=device)[:, None] + torch.arange(new, device=device)
    return torch.arange(len(starts), device=device)[:, None], slots
