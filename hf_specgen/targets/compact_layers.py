"""Layers of a cache that take less memory on the accelerator: offloaded, quantized and static ones.

What attention reads is, at each token, what it reads in plain decoding with Transformers' cache of the same kind:

| layer | its buffers hold | attention reads |
|---|---|---|
| offloaded | keys and values, on the CPU | a copy on the layer's device |
| float8 | each number as float8, by the scale of the prompt | the same numbers, dequantized |
| grouped (quanto, HQQ) | the last tokens; all before are quantized together | both; a pass ends before the next group |
| shared (static) | keys and values, in the static layer's own tensors | the slots of the text and of drafts |

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
    StaticLayer,
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
    if type(layer) is StaticLayer and layer.is_initialized and not is_offloaded:
        return SharedLayer()
    if isinstance(layer, StaticSlidingWindowLayer):
        window = layer.max_cache_len
    return (OffloadedLayer if is_offloaded and has_attention else RaggedLayer)(window, has_attention)


class SharedLayer(RaggedLayer):
    """Keys and values in the tensors of a static layer, whose slots after its own text are those of drafts.

    Where drafts need more slots than it has, its tensors become views of larger ones until the call ends.
    """

    def take_over(self, layer: Any, slots: int) -> None:
        self.static = layer
        self.keys, self.values = layer.keys, layer.values
        self.dtype, self.device, self.is_initialized = layer.keys.dtype, layer.keys.device, True
        self.lengths = (int(layer.get_seq_length()),) * len(layer.keys)

    def reserve(self, width: int) -> None:
        is_shared = self._is_shared
        super().reserve(width)
        if is_shared:
            size = self.static.max_cache_len
            self.static.keys, self.static.values = self.keys[:, :, :size], self.values[:, :, :size]

    def hand_over(self, layer: Any) -> None:
        if not self._is_shared or layer is not self.static:
            return super().hand_over(layer)
        length = self.get_seq_length()
        if layer.keys.shape != self.keys.shape:
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        layer.keys[:, :, length:] = layer.values[:, :, length:] = 0
        layer.cumulative_length.fill_(length)

    @property
    def _is_shared(self) -> bool:
        """Whether nothing has put other tensors in place of the static layer's."""
        return bool(self.keys.data_ptr() == self.static.keys.data_ptr())


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
    """What layers that quantize have in common.

    `_quantizer` is a copy of the layer of Transformers: its settings and methods quantize, and the layer itself keeps
    its contents until `hand_over`.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self._quantizer = copy.copy(layer)

    def hand_over(self, layer: Any) -> None:
        for name, value in vars(self._quantizer).items():
            setattr(layer, name, value)
        layer.cumulative_length = self.get_seq_length()


class Fp8Layer(_QuantizedLayer):
    """Keys and values in float8, each rounded by itself; the scales are those of the first pass.

    The buffers have the type uint8, in which slots can be written and moved.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self._scales: tuple[Any, ...] = ()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._quantizer.lazy_initialization(key_states, value_states)
        _, self._scales = zip(*compat.quantized_states(self._quantizer), strict=True)
        compat.set_quantized_states(self._quantizer, None, None)
        super().lazy_initialization(key_states[:, :, :0].to(torch.uint8), value_states[:, :, :0].to(torch.uint8))

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> States:
        is_first = not self.is_initialized
        if is_first:
            self.lazy_initialization(key_states, value_states)
        pairs = zip((key_states, value_states), self._scales, strict=True)
        rounded = [compat.quantize(self._quantizer, states, scale=scale)[0] for states, scale in pairs]
        keys, values = super().update(*(numbers.view(torch.uint8) for numbers in rounded))
        if is_first:
            return key_states, value_states
        keys, values = map(self._dequantized, (keys, values), self._scales)
        return keys, values

    def _dequantized(self, buffer: torch.Tensor, scale: Any) -> torch.Tensor:
        return compat.dequantize(self._quantizer, (buffer.view(self._quantizer.fp8_dtype), scale))

    def take_over(self, layer: Any, slots: int) -> None:
        if not layer.get_seq_length():
            return
        rounded, self._scales = zip(*compat.quantized_states(layer), strict=True)
        compat.set_quantized_states(self._quantizer, None, None)
        states = [numbers.view(torch.uint8) for numbers in rounded]
        super().lazy_initialization(*states)
        self.reserve(slots)
        views = [view.view(self._quantizer.fp8_dtype) for view in super().update(*states)]
        compat.set_quantized_states(layer, *zip(views, self._scales, strict=True))

    def hand_over(self, layer: Any) -> None:
        length = self.get_seq_length()
        buffers = (buffer[:, :, :length].contiguous() for buffer in (self.keys, self.values))
        numbers = (buffer.view(self._quantizer.fp8_dtype) for buffer in buffers)
        super().hand_over(layer)
        compat.set_quantized_states(layer, *zip(numbers, self._scales, strict=True))


class GroupedLayer(_QuantizedLayer):
    """Keys and values of equally long rows: the buffers hold the last tokens, all tokens before them are quantized.

    Plain decoding quantizes all tokens anew, together, as soon as `residual_length` of them are not quantized. A pass
    adds no token beyond that one. `first` is the number of quantized tokens.
    """

    @property
    def max_pass_tokens(self) -> float:
        if not self.is_initialized:
            return math.inf
        free = self._residual_length - self._num_unquantized
        return free if free > 0 else self._residual_length  # if there are too many, the next pass quantizes them first

    @property
    def _residual_length(self) -> int:
        return max(1, int(self._quantizer.residual_length))

    @property
    def _num_unquantized(self) -> int:
        """How many committed tokens of each row are in the buffers."""
        kept = min(self.lengths, default=0) if self.committed is None else self.committed
        return kept - self.first

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> States:
        if not self.is_initialized:
            self._quantizer.lazy_initialization(key_states, value_states)
            self.lazy_initialization(key_states, value_states)
            self._store(key_states, value_states)
            return key_states, value_states
        self._store_if_due()
        return self._joined(*super().update(key_states, value_states))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def _joined(self, keys: torch.Tensor, values: torch.Tensor) -> States:
        """All keys and values: the quantized ones, dequantized, followed by these."""
        before = (compat.dequantize(self._quantizer, states) for states in compat.quantized_states(self._quantizer))
        joined_keys, joined_values = map(torch.cat, zip(before, (keys, values), strict=True), (-2, -2))
        return joined_keys, joined_values

    def _store(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Quantize the keys and values of all tokens, and store them in place of what was stored."""
        pairs = zip((keys, values), (self._quantizer.axis_key, self._quantizer.axis_value), strict=True)
        quantized = [compat.quantize(self._quantizer, states.contiguous(), axis=axis) for states, axis in pairs]
        compat.set_quantized_states(self._quantizer, *quantized)
        self.first = keys.shape[2]
        self.lengths = (self.first,) * len(keys)

    def _store_if_due(self) -> None:
        if (count := self._num_unquantized) >= self._residual_length:
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
        if count := self._num_unquantized:
            layer.keys, layer.values = self.keys[:, :, :count].clone(), self.values[:, :, :count].clone()
