"""Layers of a cache that take less memory on the accelerator: offloaded and quantized ones.

What attention reads is, at each token, what it reads in plain decoding with Transformers' cache of the same kind:

| layer | its buffers hold | attention reads |
|---|---|---|
| offloaded | keys and values, on the CPU | a copy on the layer's device |
| float8 | each number as float8, by the scale of the prompt | the same numbers, dequantized |
| grouped (quanto, HQQ) | the last tokens; all before are quantized together | both; a pass ends before the next group |

The first pass over the prompt reads it as it was before it was quantized.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from transformers.cache_utils import (
    Fp8QuantizedLayer,
    LinearAttentionLayer,
    QuantizedLayer,
    StaticSlidingWindowLayer,
)

from hf_specgen import compat
from hf_specgen.targets.cache_layer import RaggedLayer

States = tuple[torch.Tensor, torch.Tensor]
"""Keys and values."""


def layer_like(layer: Any, is_offloaded: bool) -> RaggedLayer:
    """An empty layer of the same kind as one of Transformers."""
    if isinstance(layer, Fp8QuantizedLayer):
        return Fp8Layer(layer)
    if isinstance(layer, QuantizedLayer):
        return GroupedLayer(layer)
    has_attention = type(layer) is not LinearAttentionLayer
    window = getattr(layer, "sliding_window", None)
    if isinstance(layer, StaticSlidingWindowLayer):
        window = layer.max_cache_len
    return (OffloadedLayer if is_offloaded and has_attention else RaggedLayer)(window, has_attention)


class OffloadedLayer(RaggedLayer):
    """Keys and values on the CPU, of which each pass makes a copy on the layer's device."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.keys, self.values = self.keys.cpu(), self.values.cpu()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> States:
        self.device = key_states.device
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = super().update(key_states.to(self.keys.device), value_states.to(self.keys.device))
        if self.window is None:  # whole buffers: a copy of some slots of each head would first be made on the CPU
            slots = keys.shape[2]
            is_cuda = self.device.type == "cuda"  # whose copies to the CPU in the next pass wait for these
            keys, values = (buffer.to(self.device, non_blocking=is_cuda) for buffer in (self.keys, self.values))
            return keys[:, :, :slots], values[:, :, :slots]
        return keys.to(self.device), values.to(self.device)

    def reserve(self, width: int) -> None:
        super().reserve(width)
        if self.device.type == "cuda" and not self.keys.is_pinned():
            self.keys, self.values = self.keys.pin_memory(), self.values.pin_memory()

    def take_over(self, layer: Any, slots: int) -> None:
        super().take_over(layer, 0)  # no more slots than are copied in each pass
        if self.is_initialized:
            self.device = layer.device

    def hand_over(self, layer: Any) -> None:
        super().hand_over(layer)
        layer.device = self.device


class _QuantizedLayer(RaggedLayer):
    """What layers that quantize have in common: a layer of Transformers whose settings and methods they use."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self._like = copy.copy(layer)

    def hand_over(self, layer: Any) -> None:
        vars(layer).update(vars(self._like), cumulative_length=self.get_seq_length())


class Fp8Layer(_QuantizedLayer):
    """Keys and values in float8, each rounded by itself; the scales are those of the first pass.

    The buffers have the type uint8, in which slots can be written and moved.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self._scales: tuple[Any, ...] = ()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._like.lazy_initialization(key_states, value_states)
        _, self._scales = zip(*compat.quantized_states(self._like), strict=True)
        compat.set_quantized_states(self._like, None, None)
        super().lazy_initialization(key_states[:, :, :0].to(torch.uint8), value_states[:, :, :0].to(torch.uint8))

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> States:
        is_first = not self.is_initialized
        if is_first:
            self.lazy_initialization(key_states, value_states)
        pairs = zip((key_states, value_states), self._scales, strict=True)
        rounded = [compat.quantize(self._like, states, scale=scale)[0].view(torch.uint8) for states, scale in pairs]
        keys, values = super().update(*rounded)
        if is_first:
            return key_states, value_states
        keys, values = map(self._dequantized, (keys, values), self._scales)
        return keys, values

    def _dequantized(self, buffer: torch.Tensor, scale: Any) -> torch.Tensor:
        return compat.dequantize(self._like, (buffer.view(self._like.fp8_dtype), scale))

    def take_over(self, layer: Any, slots: int) -> None:
        if not layer.get_seq_length():
            return
        rounded, self._scales = zip(*compat.quantized_states(layer), strict=True)
        compat.set_quantized_states(self._like, None, None)
        states = [numbers.view(torch.uint8) for numbers in rounded]
        super().lazy_initialization(*states)
        self.reserve(slots)
        views = [view.view(self._like.fp8_dtype) for view in super().update(*states)]
        compat.set_quantized_states(layer, *zip(views, self._scales, strict=True))

    def hand_over(self, layer: Any) -> None:
        length = self.get_seq_length()
        buffers = (buffer[:, :, :length].contiguous() for buffer in (self.keys, self.values))
        numbers = (buffer.view(self._like.fp8_dtype) for buffer in buffers)
        super().hand_over(layer)
        compat.set_quantized_states(layer, *zip(numbers, self._scales, strict=True))


class GroupedLayer(_QuantizedLayer):
    """The keys and values of the last tokens of rows that are equally long; all before them are quantized together.

    Plain decoding quantizes anew as soon as there are `residual_length` tokens that are not, so a pass adds no token
    after that. `first` is the number of quantized slots.
    """

    @property
    def max_pass_tokens(self) -> float:
        if not self.is_initialized:
            return math.inf
        # A pass may fill the residual and no more, as plain decoding quantizes with the token that fills it. A full
        # residual is quantized at the beginning of the pass, which then can fill it anew.
        kept = self._unquantized
        return self._residual if kept >= self._residual else self._residual - kept

    @property
    def _residual(self) -> int:
        return max(1, int(self._like.residual_length))

    @property
    def _unquantized(self) -> int:
        """How many tokens are kept as they are; drafts do not count."""
        kept = min(self.lengths, default=0) if self.committed is None else self.committed
        return kept - self.first

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> States:
        if not self.is_initialized:
            self._like.lazy_initialization(key_states, value_states)
            self.lazy_initialization(key_states, value_states)
            self._store(key_states, value_states)
            return key_states, value_states
        self._store_if_due()
        return self._joined(*super().update(key_states, value_states))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def _joined(self, keys: torch.Tensor, values: torch.Tensor) -> States:
        """The quantized slots, dequantized, and these after them."""
        before = (compat.dequantize(self._like, states) for states in compat.quantized_states(self._like))
        joined_keys, joined_values = map(torch.cat, zip(before, (keys, values), strict=True), (-2, -2))
        return joined_keys, joined_values

    def _store(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keep these as all slots of the cache."""
        pairs = zip((keys, values), (self._like.axis_key, self._like.axis_value), strict=True)
        quantized = [compat.quantize(self._like, states.contiguous(), axis=axis) for states, axis in pairs]
        compat.set_quantized_states(self._like, *quantized)
        self.first = keys.shape[2]
        self.lengths = (self.first,) * len(keys)

    def _store_if_due(self) -> None:
        if (count := self._unquantized) >= self._residual:
            self._store(*self._joined(self.keys[:, :, :count], self.values[:, :, :count]))

    def take_over(self, layer: Any, slots: int) -> None:
        if not (length := layer.get_seq_length()):
            return
        before = [compat.dequantize(layer, states) for states in compat.quantized_states(layer)]
        self.lazy_initialization(*before)
        self.first = before[0].shape[2]
        self.lengths = (self.first,) * len(before[0])
        if length > self.first:
            super().update(layer.keys, layer.values)

    def hand_over(self, layer: Any) -> None:
        self._store_if_due()
        super().hand_over(layer)
        if count := self._unquantized:
            layer.keys, layer.values = self.keys[:, :, :count].clone(), self.values[:, :, :count].clone()
