"""A key/value cache with a separate length for each row.

Each layer is a buffer with some spare slots, and a number of filled slots per row. A step appends its tokens; the next
one overwrites those that were rejected. Sliding-window layers drop the slots that are outside the window of every row.
What layers cache beside keys and values, the keys of an indexer, convolutions and recurrent states, is in parts of its
own, which are made when a model first writes to them.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from hf_specgen.compat import CACHE
from hf_specgen.targets.model_parts import WITHOUT_ATTENTION
from hf_specgen.targets.state_cache import MAX_ROLLBACK, LayerStates

MIN_SPARE_SLOTS = 64
"""A buffer that grows gets so many spare slots, or a 32nd of its length: peak memory then is at most 1.05 times that of
a cache without spare slots from 2,000 tokens on, and a slot is copied 32 times at most."""
MAX_DRAFT_SLOTS = 64
"""Slots for draft tokens beyond the maximum length of the text."""


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
            raise ValueError(
                f"the cache holds {len(self.lengths)} rows, got keys for {key_states.shape[0]}; leave {CACHE} "
                "out, or give it to a call with as many rows as the one that returned it"
            )
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
            rows, slots = _slots(starts, new, self.device)
            self.keys[rows, :, slots] = key_states.transpose(1, 2)
            self.values[rows, :, slots] = value_states.transpose(1, 2)
        self.lengths = tuple(length + new for length in self.lengths)
        keys, values = self.keys[:, :, :width], self.values[:, :, :width]
        self._drop_invisible(min(self.lengths) if self.committed is None else self.committed)
        return keys, values

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
        """Copy slots within rows; all three are `[moved, slots]`, on the layer's device."""
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

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.keys, self.values = self.keys[indices], self.values[indices]
        self.lengths = tuple(self.lengths[row] for row in indices.tolist())

    def append_rows(self, other: RaggedLayer) -> None:
        """Add the rows of another layer; slots that either has dropped become zeros, which its mask hides."""
        capacity = max(self.get_seq_length(), other.get_seq_length()) + MIN_SPARE_SLOTS

        def joined(states: Any, more: Any) -> torch.Tensor:
            parts = (states, self.first), (more, other.first)
            return torch.cat([pad(part, (0, 0, first, capacity))[:, :, :capacity] for part, first in parts])

        self.keys, self.values, self.first = joined(self.keys, other.keys), joined(self.values, other.values), 0
        self.set_lengths(self.lengths + other.lengths)


class RaggedCache(Cache):
    """The cache of a call, whose rows differ in length; callers of `generate` receive a `DynamicCache`.

    `max_slots` are those of the whole call. Layers beyond `layers` have full attention.
    """

    layers: list[Any]

    def __init__(self, max_slots: int | None = None, layers: Sequence[RaggedLayer] = ()) -> None:
        super().__init__(layers=list(layers))
        self.layer_class_to_replicate, self._max_slots = RaggedLayer, max_slots or 0
        self._indexers: dict[int, RaggedLayer] = defaultdict(RaggedLayer)
        self._states: dict[int, LayerStates] = defaultdict(LayerStates)

    @classmethod
    def for_model(cls, config: Any, max_slots: int | None = None) -> RaggedCache:
        """The cache of a model with this config: layers with a sliding window drop what is outside of it."""
        types, settings = get_layer_types_and_kwargs(config)
        attends = [layer_type not in WITHOUT_ATTENTION for layer_type in types]
        return cls(max_slots, list(map(RaggedLayer, [one.get("sliding_window") for one in settings], attends)))

    @property
    def first_visible(self) -> int:
        """How many slots the sliding-window layers have dropped."""
        return max((layer.first for layer in self.layers), default=0)

    def shared_copy(self) -> RaggedCache:
        """A cache with the same contents, in the same tensors: neither overwrites what the other one holds."""
        held = [value for part in self._filled for value in vars(part).values()]
        held += [state for states in held if isinstance(states, dict) for state in states.values()]
        return copy.deepcopy(self, {id(value): value for value in held if isinstance(value, torch.Tensor)})

    @property
    def _filled(self) -> list[Any]:
        """The parts that something has been written to."""
        parts = chain(self.layers, self._indexers.values(), self._states.values())
        return [part for part in parts if part.is_initialized]

    @property
    def has_recurrent_state(self) -> bool:
        """Whether there is a state that can only be rolled back to the start of the last pass."""
        return any(state.recurrent for state in self._states.values())

    @property
    def is_initialized(self) -> bool:
        return bool(self.lengths)

    @property
    def is_linear(self) -> list[bool]:
        return [not layer.has_attention for layer in self.layers]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The length of the longest row in a layer; of a layer without attention, in the cache."""
        has_attention = layer_idx < len(self.layers) and self.layers[layer_idx].has_attention
        return max(self.layers[layer_idx].lengths if has_attention else self.lengths, default=0)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Append the indexer's keys `[batch, new, head_dim]` to each row; returns all slots up to the longest row."""
        keys = indexer_key_states[:, None]
        return self._indexers[layer_idx].update(keys, keys[..., :0])[0][:, 0]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Always None: models then pass all columns to `update_conv_state`, and overwrite no window in place."""

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        return self._states[layer_idx].append_to_convolution(conv_states, state_idx, **kwargs)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Always: models then leave out kernels that overwrite a window in place."""
        return True

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The state, for one pass, which may overwrite it; the layer keeps a copy for a rollback."""
        return self._states[layer_idx].for_pass(state_idx)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        return self._states[layer_idx].replace(recurrent_states, state_idx)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of filled slots of each row."""
        return next((part.lengths for part in chain(self.layers, self._states.values()) if part.lengths), ())

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths[b]` slots of row b; the others will be overwritten."""
        lengths = tuple(lengths)
        for part in self._filled:
            part.set_lengths(lengths)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        for part in self._filled:
            part.batch_select_indices(indices)

    def append_rows(self, other: RaggedCache) -> None:
        """Add the rows of another cache with the same layers."""
        for part, more in zip(self._filled, other._filled, strict=True):
            part.append_rows(more)

    def reserve(self, slots: int) -> None:
        """Allocate at least so many slots in each layer; those of the whole call if they are at most twice as many."""
        for part in self._filled:
            part.reserve(self._slots_for(slots))

    def _slots_for(self, slots: int) -> int:
        return self._max_slots if slots <= self._max_slots <= 2 * slots else slots

    def buffers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The buffers of keys and values of each layer."""
        return [part.buffers() for part in self._filled]

    def use_buffers(self, buffers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Continue with other buffers, which have the same contents."""
        for part, (keys, values) in zip(self._filled, buffers, strict=True):
            part.keys, part.values = keys, values

    def keep_accepted(
        self,
        starts: Sequence[int],
        paths: Sequence[Sequence[int] | None],
        move: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """Of the step that began at slots `starts`, keep the pending token and the accepted path of each row.

        Node ``i`` of row b lies in slot ``starts[b] + 1 + i``. A row whose path is None keeps nothing. `move` replaces
        the method of that name.
        """
        if any(path and path[-1] != len(path) - 1 for path in paths):
            (move or self.move)(path_moves(starts, paths))
        kept = [0 if path is None else 1 + len(path) for path in paths]
        self.set_lengths([start + count for start, count in zip(starts, kept, strict=True)])

    def erase_rejected(self) -> None:
        """Overwrite the slots after each row, which are masked, by zeros: a weight of 0 times NaN is NaN."""
        for part in [*self.layers, *self._indexers.values()]:
            for row, length in enumerate(part.lengths):
                part.keys[row, :, length - part.first :] = part.values[row, :, length - part.first :] = 0

    def move(self, moves: torch.Tensor) -> None:
        """Copy slots within rows, in all layers; see `path_moves`."""
        on_device = {device: moves.to(device).unbind() for device in {part.device for part in self._filled}}
        for part in self._filled:
            part.move(*on_device[part.device])

    @classmethod
    def from_dynamic(cls, cache: DynamicCache, max_slots: int | None = None) -> RaggedCache:
        """Take over the contents of a `DynamicCache`, whose rows are equally long.

        Its layers then are views of our buffers, which change nothing of what they show, so that the memory is not
        needed twice. Slots before its sliding windows count as dropped.
        """
        result = cls(max_slots)
        layers: list[Any] = list(cache.layers)
        lengths = [layer.get_seq_length() for layer in layers if isinstance(layer, DynamicLayer)]
        slots = result._slots_for(max(lengths, default=0))
        for index, layer in enumerate(layers):
            window = getattr(layer, "sliding_window", None)
            result.layers.append(new := RaggedLayer(window, type(layer) is not LinearAttentionLayer))
            if isinstance(layer, DynamicLayer) and (length := layer.get_seq_length()):
                states: Any = layer.keys, layer.values
                held = states[0].shape[2]
                new.lazy_initialization(*states)
                new.reserve(held if window else slots)
                new.update(*states)
                layer.keys, layer.values = new.keys[:, :, :held], new.values[:, :, :held]
                new.lengths = (length,) * len(states[0])
                new.first = length - held
            if getattr(layer, "is_indexer_initialized", False):
                result.update_indexer(layer.indexer_keys, index)
            if any(getattr(layer, "has_previous_state", {}).values()):
                result._states[index] = LayerStates.of_layer(layer, max(lengths, default=0))
        return result

    def to_dynamic(self, cache: DynamicCache) -> None:
        """Move the contents, whose rows are equally long, to a `DynamicCache` layer by layer, and leave none here."""
        while len(cache.layers) < len(self.layers):
            cache.layers.append(DynamicLayer())
        targets: list[Any] = list(cache.layers)
        for index, (layer, source) in enumerate(zip(targets, self.layers, strict=False)):
            layer.reset()
            if (states := self._states.pop(index, None)) is not None:
                states.to_layer(layer)
            if source.is_initialized:
                length = source.get_seq_length()
                start = max(0, length - source.first - getattr(layer, "sliding_window", length))
                layer.update(*(states[:, :, start : length - source.first] for states in (source.keys, source.values)))
                if isinstance(layer, DynamicSlidingWindowLayer):
                    layer.cumulative_length = length
                self.layers[index] = RaggedLayer(source.window, source.has_attention)
            if (indexer := self._indexers.pop(index, None)) is not None:
                layer.update_indexer(indexer.keys[:, 0, : indexer.get_seq_length()])


def path_moves(starts: Sequence[int], paths: Sequence[Sequence[int] | None]) -> torch.Tensor:
    """`[3, rows, nodes]`: rows, source and destination slots by which accepted paths get into place.

    One tensor, since each transfer is waited for; as many nodes as a power of two, so that there are few shapes. The
    pending token is copied onto itself in place of further ones.
    """
    nodes = padded_width(max(len(path or ()) for path in paths))
    sources, destinations = [], []
    for start, path in zip(starts, paths, strict=True):
        kept = path or ()
        padding = [start] * (nodes - len(kept))
        sources.append([start + 1 + node for node in kept] + padding)
        destinations.append([*range(start + 1, start + 1 + len(kept)), *padding])
    return torch.tensor([[[row] * nodes for row in range(len(paths))], sources, destinations])


def padded_width(tokens: int) -> int:
    """The number of tokens that a captured pass over so many tokens is padded to: 1, 4, 8, 16, …"""
    return 1 if tokens == 1 else max(4, 1 << (tokens - 1).bit_length())


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
