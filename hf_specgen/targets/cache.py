"""A key/value cache with a separate length for each row.

Each layer is a buffer with some spare slots, and a number of filled slots per row. A step appends its tokens; the next
one overwrites those that were rejected. Sliding-window layers drop the slots that are outside the window of every row.
What layers cache beside keys and values, the keys of an indexer, convolutions and recurrent states, is in parts of its
own, which are made when a model first writes to them.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, get_layer_types_and_kwargs

from hf_specgen.call import UnrepeatableError, UnsupportedModelError
from hf_specgen.targets.cache_layer import ImageLayer, RaggedLayer
from hf_specgen.targets.compact_layers import OffloadedLayer, SharedLayer, layer_like
from hf_specgen.targets.compressed_layer import CompressedLayer
from hf_specgen.targets.model_parts import MAKES_ITS_MASK, WITHOUT_ATTENTION, image_layers
from hf_specgen.targets.state_cache import LayerStates

MAX_DRAFT_SLOTS = 64
"""Slots for draft tokens beyond the maximum length of the text."""


class RaggedCache(Cache):
    """The cache of a call, whose rows differ in length; callers of `generate` receive one of Transformers.

    `max_slots` are those of the whole call. Layers beyond `layers` have full attention.
    """

    layers: list[Any]

    def __init__(self, max_slots: int | None = None, layers: Sequence[RaggedLayer] = ()) -> None:
        super().__init__(layers=list(layers))
        self.layer_class_to_replicate = RaggedLayer
        self._max_slots = max_slots or 0
        self._states: dict[int, LayerStates] = defaultdict(LayerStates)

    @classmethod
    def for_model(cls, config: Any, max_slots: int | None = None) -> RaggedCache:
        """The cache of a model with this config: layers with a sliding window drop what is outside of it."""
        if config.model_type in MAKES_ITS_MASK:
            return cls(max_slots, list(map(CompressedLayer, DynamicCache(config=config).layers)))
        types, settings = get_layer_types_and_kwargs(config)
        attends = [layer_type not in WITHOUT_ATTENTION for layer_type in types]
        layers = list(map(RaggedLayer, [one.get("sliding_window") for one in settings], attends))
        for index in image_layers(config):
            layers[index] = ImageLayer()
        return cls(max_slots, layers)

    @property
    def first_visible(self) -> int:
        """How many slots the sliding-window layers have dropped."""
        return max((layer.first for layer in self.layers if layer.is_sliding), default=0)

    @property
    def max_pass_tokens(self) -> float:
        """How many tokens of a row the next pass may add."""
        return min((layer.max_pass_tokens for layer in self.layers), default=math.inf)

    @property
    def is_plain(self) -> bool:
        """Whether the buffers of all layers are keys and values on the device of the layer."""
        return all(type(layer) in (RaggedLayer, ImageLayer, SharedLayer) for layer in self.layers) and (
            self.layer_class_to_replicate is RaggedLayer
        )

    def row_copy(self, row: int) -> RaggedCache:
        """A cache with the contents of one row."""
        held = [value for part in self._filled for value in vars(part).values()]
        held += [state for states in held if isinstance(states, dict) for state in states.values()]
        # The copy refers to the same tensors, until the selection of the row copies its part of them.
        cache = copy.deepcopy(self, {id(value): value for value in held if isinstance(value, torch.Tensor)})
        cache.batch_select_indices(torch.tensor([row]))
        return cache

    @property
    def _slotted(self) -> list[RaggedLayer]:
        """The parts that have a slot for each token: keys and values, and the keys of indexers."""
        return [*self.layers, *(layer.index for layer in self.layers if layer.index is not None)]

    @property
    def _filled(self) -> list[Any]:
        """The parts that something has been written to."""
        parts: Iterable[Any] = chain(self._slotted, self._states.values())
        return [part for part in parts if part.is_initialized]

    @property
    def has_recurrent_state(self) -> bool:
        """Whether there is a state that can only be rolled back to the start of the last pass."""
        compresses = any(isinstance(layer, CompressedLayer) for layer in self.layers)
        return compresses or any(state.recurrent for state in self._states.values())

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
        keys: torch.Tensor = self.layers[layer_idx].update_index(indexer_key_states[:, None])
        return keys[:, 0]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """None but for token ids: models then pass all columns to `update_conv_state`, and overwrite no window."""
        return self._states[layer_idx].token_ids(state_idx)

    def layer_states(self, layer_idx: int) -> LayerStates:
        """The convolutions and recurrent states of a layer."""
        return self._states[layer_idx]

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

    def check_pass(self) -> None:
        """Raise if a hook has put other keys or values in place of those that the last pass has written."""
        if any(layer.was_replaced() for layer in self.layers):
            raise UnrepeatableError(
                "a hook or replaced function of the model puts other keys or values into the cache, as to compress it, "
                "from which draft tokens cannot be removed; remove it, or use plain "
                "generate(candidate_generator=None)"
            )

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of filled slots of each row."""
        return next((part.lengths for part in chain(self.layers, self._states.values()) if part.lengths), ())

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths[b]` slots of row b; the others will be overwritten."""
        lengths = tuple(lengths)
        current = self.lengths
        if any(state.lengths != current for state in self._states.values() if state.is_initialized):
            raise UnsupportedModelError(
                "its layers cache other columns of a convolution than one for each token, so that those of rejected "
                "draft tokens cannot be removed"
            )
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
        """Allocate at least `slots` slots in each layer; those of the whole call if they are at most twice as many."""
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
        for part in self._slotted:
            for row, length in enumerate(part.lengths):
                part.keys[row, :, length - part.first :] = part.values[row, :, length - part.first :] = 0

    def move(self, moves: torch.Tensor) -> None:
        """Copy slots within rows, in all layers; see `path_moves`."""
        on_device = {device: moves.to(device).unbind() for device in {_device(part) for part in self._filled}}
        for part in self._filled:
            part.move(*on_device[_device(part)])

    @classmethod
    def from_dynamic(cls, cache: Cache, max_slots: int | None = None, of_images: Collection[int] = ()) -> RaggedCache:
        """Take over the contents of a cache of Transformers, whose rows are equally long, see `RaggedLayer.take_over`.

        The layers are offloaded or quantized as those of that cache are; those at the indices `of_images` hold images.
        """
        result = cls(max_slots)
        layers: list[Any] = list(cache.layers)
        of_text = [layer for index, layer in enumerate(layers) if index not in of_images]
        lengths = [0, *(int(layer.get_seq_length()) for layer in of_text if isinstance(layer, CacheLayerMixin))]
        slots = result._slots_for(max(lengths))
        offloads = getattr(cache, "offloading", False)
        if offloads:
            cache.prefetch_stream.synchronize()
            if not layers:
                result.layer_class_to_replicate = OffloadedLayer
        compresses = any(hasattr(layer, "compressed_kv") for layer in layers)
        for index, layer in enumerate(layers):
            is_offloaded = offloads and not (cache.only_non_sliding and getattr(layer, "is_sliding", False))
            new = ImageLayer() if index in of_images else layer_like(layer, is_offloaded)
            if compresses:
                new = CompressedLayer(layer)
            result.layers.append(new)
            if isinstance(layer, CacheLayerMixin):
                new.take_over(layer, slots)
                new.take_over_index(layer)
            if any(getattr(layer, "has_previous_state", {}).values()):
                result._states[index] = LayerStates.of_layer(layer, max(lengths))
        return result

    def to_dynamic(self, cache: Cache) -> None:
        """Move the contents, whose rows are equally long, to a cache of Transformers, and leave none here."""
        while len(cache.layers) < len(self.layers):
            cache.layers.append(DynamicLayer())
        targets: list[Any] = list(cache.layers)
        offloaded = [index for index, layer in enumerate(self.layers) if isinstance(layer, OffloadedLayer)]
        for index, (layer, source) in enumerate(zip(targets, self.layers, strict=False)):
            if not source.is_initialized:
                layer.reset()
            else:
                source.hand_over(layer)
                source.hand_over_index(layer)
                self.layers[index] = RaggedLayer(source.window, source.has_attention)
            if (states := self._states.pop(index, None)) is not None:
                states.to_layer(layer)
        if offloaded:  # plain decoding expects that the first of them is on its device already
            targets[offloaded[0]].prefetch()


def _device(part: Any) -> torch.device:
    """Where the buffers of a part of the cache are."""
    return part.keys.device if isinstance(part, RaggedLayer) else part.device


def path_moves(starts: Sequence[int], paths: Sequence[Sequence[int] | None]) -> torch.Tensor:
    """`[3, rows, nodes]`: rows, source and destination slots by which accepted paths get into place.

    One tensor, since each transfer is waited for; as many nodes as a power of two, so that there are few shapes. The
    pending token is copied onto itself in place of further ones.
    """
    nodes = padded_tokens(max(len(path or ()) for path in paths))
    sources, destinations = [], []
    for start, path in zip(starts, paths, strict=True):
        kept = path or ()
        padding = [start] * (nodes - len(kept))
        sources.append([start + 1 + node for node in kept] + padding)
        destinations.append([*range(start + 1, start + 1 + len(kept)), *padding])
    return torch.tensor([[[row] * nodes for row in range(len(paths))], sources, destinations])


def padded_tokens(tokens: int) -> int:
    """The number of tokens that a captured pass is padded to: 1, 4, 8, 16, …"""
    return 1 if tokens == 1 else max(4, 1 << (tokens - 1).bit_length())
