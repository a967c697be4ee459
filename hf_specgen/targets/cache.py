"""A key/value cache with a separate length for each row.

Transformers' `DynamicCache` keeps all rows equally long and copies everything at each step. Here each layer is a buffer
with some spare slots, and a number of filled slots per row. A step appends its tokens; the next step overwrites those
that were rejected, so rows of a batch accept different numbers of tokens without re-alignment. Sliding-window layers
drop the slots that are outside the window of every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from hf_specgen.targets.cache_layer import RaggedLayer


class RaggedCache(Cache):
    """The cache used for speculative decoding; also an ordinary `Cache` for any forward pass of the model.

    Example:
        >>> cache = RaggedCache()
        >>> keys, values = cache.update(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4), layer_idx=0)
        >>> cache.lengths
        (3, 3)
    """

    def __init__(
        self, windows: Sequence[int | None] = (), max_slots: int | None = None, layers: Sequence[Any] | None = None
    ) -> None:
        """
        Args:
            windows: the sliding window of each layer, None for full attention; further layers have full attention.
            max_slots: the number of slots that the call can fill, if known.
            layers: the layers themselves, for models with recurrent states (`hf_specgen.targets.state_layers`).
        """
        given = [RaggedLayer(window, max_slots) for window in windows] if layers is None else list(layers)
        super().__init__(layers=given)
        self.layer_class_to_replicate = partial(RaggedLayer, None, max_slots)  # type: ignore[assignment]

    @property
    def first_visible(self) -> int:
        """How many slots the sliding-window layers have dropped."""
        return max((layer.first for layer in self.layers if isinstance(layer, RaggedLayer)), default=0)

    def protect(self) -> None:
        """Keep all slots that a rollback to the present lengths needs."""
        for part in self._filled:
            part.protected = min(part.lengths)

    @property
    def _filled(self) -> list[Any]:
        """The parts that something has been written to."""
        return [part for layer in self.layers for part in getattr(layer, "parts", ()) if part.is_initialized]

    @property
    def has_recurrent_state(self) -> bool:
        """Whether there is a state that can only be rolled back to the start of the last pass."""
        return any(getattr(part, "has_recurrent_state", False) for part in self._filled)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The length of the longest row in a layer; of a layer without attention, in the cache."""
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        return layer.get_seq_length() if isinstance(layer, RaggedLayer) else max(self.lengths, default=0)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Always None, so that models take the path of their first pass.

        They then pass their columns to `update_conv_state`, which returns the window before them, and leave out kernels
        that overwrite the window in place.
        """

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The state, for one pass, which may overwrite it; the layer keeps a copy for a rollback."""
        if super().get_recurrent_state(layer_idx, state_idx) is None:
            return None
        layer: Any = self.layers[layer_idx]
        state: torch.Tensor = layer.parts[-1].state_for_pass(state_idx)
        return state

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of filled slots of each row."""
        parts = (part for layer in self.layers for part in getattr(layer, "parts", ()))
        return next((part.lengths for part in parts if part.is_initialized and part.lengths), ())

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths[b]` slots of row b; the others will be overwritten."""
        lengths = tuple(lengths)
        for part in self._filled:
            part.set_lengths(lengths)

    def reserve(self, slots: int) -> None:
        """Make room for so many slots in each layer; for those of the whole call, if that is known."""
        for part in self._filled:
            part.reserve(max(slots, part.max_slots or 0))

    def buffers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The buffers of keys and values of each layer."""
        return [part.buffers() for part in self._filled]

    def use_buffers(self, buffers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Continue with other buffers, which have the same contents."""
        for part, (keys, values) in zip(self._filled, buffers, strict=True):
            part.keys, part.values = keys, values

    def keep_accepted(self, starts: Sequence[int], paths: Sequence[Sequence[int] | None]) -> None:
        """Of the step that began at slots `starts`, keep the pending token and the accepted path of each row.

        Draft node ``i`` of row b lies in slot ``starts[b] + 1 + i``. The accepted nodes are moved to directly follow
        the pending token, unless they lie there already (as in every chain). A row whose path is None keeps nothing.
        """
        scattered = [row for row, path in enumerate(paths) if path and path[-1] != len(path) - 1]
        if scattered:
            moves = _moves(scattered, starts, [paths[row] or () for row in scattered])
            on_device = {device: moves.to(device).unbind() for device in {part.device for part in self._filled}}
            for part in self._filled:
                part.move(*on_device[part.device])
        kept = [0 if path is None else 1 + len(path) for path in paths]
        self.set_lengths([start + count for start, count in zip(starts, kept, strict=True)])

    @classmethod
    def from_dynamic(cls, cache: DynamicCache, max_slots: int | None = None) -> RaggedCache:
        """Copy a `DynamicCache`, whose rows have equal lengths; the original is left unchanged.

        Its sliding-window layers contain only the window: older slots count as dropped.
        """
        result = cls(max_slots=max_slots)
        for index, given in enumerate(cache.layers):
            layer: Any = given
            new = RaggedLayer(getattr(layer, "sliding_window", None), max_slots)
            result.layers.append(new)
            if not layer.is_initialized or layer.keys is None or layer.get_seq_length() == 0:
                continue
            new.lazy_initialization(layer.keys, layer.values)
            held = layer.keys.shape[2]
            new.reserve(held)
            assert new.keys is not None and new.values is not None
            new.keys[:, :, :held], new.values[:, :, :held] = layer.keys, layer.values
            new.lengths = (cache.get_seq_length(index),) * layer.keys.shape[0]
            new.first = new.lengths[0] - held
        return result

    def to_dynamic(self, cache: DynamicCache) -> None:
        """Write the contents back into the `DynamicCache` that this one was copied from."""
        while len(cache.layers) < len(self.layers):
            cache.layers.append(DynamicLayer())
        pairs: Any = zip(cache.layers, self.layers, strict=True)
        for layer, mine in pairs:
            if not mine.is_initialized:
                continue
            if not layer.is_initialized:
                layer.lazy_initialization(mine.keys, mine.values)
            first = 0
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = mine.get_seq_length()
                first = max(0, layer.cumulative_length - layer.sliding_window + 1)
            held = slice(first - mine.first, mine.get_seq_length() - mine.first)
            layer.keys, layer.values = mine.keys[:, :, held].clone(), mine.values[:, :, held].clone()


def _moves(rows: list[int], starts: Sequence[int], paths: Sequence[Sequence[int]]) -> torch.Tensor:
    """`[3, moved, longest path]`: rows, source and destination slots; shorter paths get no-op moves.

    One tensor, since each transfer to a GPU is waited for.
    """
    longest = max(map(len, paths))
    sources, destinations = [], []
    for row, path in zip(rows, paths, strict=True):
        first = starts[row] + 1
        sources.append([first + node for node in (*path, *range(len(path), longest))])
        destinations.append([first + place for place in range(longest)])
    return torch.tensor([[[row] * longest for row in rows], sources, destinations])
