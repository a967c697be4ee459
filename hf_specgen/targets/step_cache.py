"""The cache inside a compiled forward pass: buffers of a fixed size, and the slots to write to as a tensor.

A compiled function runs again without being compiled anew as long as only the *contents* of its tensors change. So
what differs from step to step, the number of filled slots in each row, is not a Python number here: the slots of the
pass are a tensor, and attention reads all slots up to a rounded width, of which the mask leaves out the unfilled ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class StepLayer(CacheLayerMixin):
    """Keys and values of one layer during one pass.

    Args:
        keys, values: `[batch, heads, capacity, head_dim]` buffers, which are written to.
        slots: `[batch, new]` where the keys and values of the pass go.
        width: how many slots attention reads.
    """

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, width: int) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self._slots, self._width = slots, width
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the buffers are given."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `[batch, heads, new, head_dim]` states to the slots; returns the slots that attention reads."""
        assert self.keys is not None and self.values is not None
        rows = torch.arange(self._slots.shape[0], device=self._slots.device)[:, None]
        self.keys[rows, :, self._slots] = key_states.transpose(1, 2)
        self.values[rows, :, self._slots] = value_states.transpose(1, 2)
        return self.keys[:, :, : self._width], self.values[:, :, : self._width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._width, 0

    def get_seq_length(self) -> int:
        """Slots before the pass, at most: models that place tokens by `position_ids` do not compute with it."""
        return self._width - int(self._slots.shape[1])

    def get_max_length(self) -> int:
        return -1


def step(
    model: Any,
    arguments: dict[str, Any],
    buffers: Sequence[tuple[torch.Tensor, torch.Tensor]],
    slots: torch.Tensor,
    taps: Sequence[int],
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """One forward pass over tokens that follow a cached text: the function that is compiled.

    Args:
        model: the model.
        arguments: tokens, positions and a mask (or one for each kind of layer) `[batch, 1, queries, width]`.
        buffers: keys and values of each layer.
        slots: `[batch, new]` where the pass writes to.
        taps: which hidden states to return, as indices into Transformers' `hidden_states`.

    Returns:
        `[batch, new, vocab]` logits, and the hidden states `[batch, new, hidden]`.
    """
    given = arguments["attention_mask"]
    masks = list(given.values()) if isinstance(given, dict) else [given]
    width = [mask.shape[-1] for mask in masks if mask is not None][0]  # noqa: RUF015, a generator is not traced
    cache = Cache(layers=[StepLayer(keys, values, slots, width) for keys, values in buffers])
    more = {"output_hidden_states": True} if taps else {}
    outputs = model(**arguments, past_key_values=cache, use_cache=True, return_dict=True, **more)
    return outputs.logits, tuple(outputs.hidden_states[tap] for tap in taps)
