"""Which cache layers a model needs, and those that hold more than keys and values: states, keys of an indexer."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DummyLayer, LinearAttentionCacheLayerMixin, get_layer_types_and_kwargs

from hf_specgen.targets.cache_layer import RaggedLayer
from hf_specgen.targets.layer_state import StateLayer

STATE_TYPES = ("conv", "linear_attention", "hybrid", "hybrid_sliding")
"""Types of layers with a state, as Transformers' configurations name them."""
INDEXED_TYPES = ("indexed_attention",)
"""Types of layers whose attention selects keys by an indexer, which has keys of its own."""
WITHOUT_CACHE = ("dummy", "moe", "mlp")
"""Types of layers that write nothing to the cache."""


class HybridLayer(RaggedLayer, LinearAttentionCacheLayerMixin):  # type: ignore[misc]
    """A layer with attention and a state.

    Args:
        window, max_slots: as in `RaggedLayer`.
        number_of_states: as in `StateLayer`.
    """

    def __init__(self, window: int | None = None, max_slots: int | None = None, number_of_states: int = 1) -> None:
        RaggedLayer.__init__(self, window, max_slots)
        self.state = state = StateLayer(number_of_states)
        # The dictionaries are the state's own, so that `Cache` finds its tensors here.
        self.number_of_states, self.record_past = number_of_states, True
        self.conv_states, self.recurrent_states = state.conv_states, state.recurrent_states
        self.has_previous_state, self.conv_kernel_size = state.has_previous_state, state.conv_kernel_size
        self.is_conv_states_initialized = state.is_conv_states_initialized
        self.is_recurrent_states_initialized = state.is_recurrent_states_initialized

    @property
    def parts(self) -> tuple[Any, ...]:
        return (self, self.state)

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        return self.state.update_conv_state(conv_states, state_idx, **kwargs)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        return self.state.update_recurrent_state(recurrent_states, state_idx, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        self.state.crop(tokens_to_remove)
        super().crop(tokens_to_remove)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self.state.batch_select_indices(indices)


class IndexedLayer(RaggedLayer):
    """A layer with the keys `[batch, tokens, head_dim]` of an indexer beside its own keys and values."""

    def __init__(self, max_slots: int | None = None) -> None:
        super().__init__(None, max_slots)
        self.indexer = RaggedLayer(None, max_slots)

    @property
    def parts(self) -> tuple[Any, ...]:
        return (self, self.indexer)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append the indexer's keys to each row; returns all slots up to the longest row."""
        keys = indexer_key_states[:, None]
        return self.indexer.update(keys, keys[..., :0])[0][:, 0]

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.indexer.crop(tokens_to_remove)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self.indexer.batch_select_indices(indices)


def has_special_layers(config: Any) -> bool:
    """Whether a model needs layers of this file."""
    return not {*STATE_TYPES, *INDEXED_TYPES}.isdisjoint(getattr(config, "layer_types", None) or ())


def keeps_state(config: Any) -> bool:
    """Whether a model has convolutions or recurrent states, so that only chains can be verified."""
    return not set(STATE_TYPES).isdisjoint(getattr(config, "layer_types", None) or ())


def make_layers(config: Any, max_slots: int | None) -> list[Any]:
    """The cache layers of a model."""
    types, arguments = get_layer_types_and_kwargs(config)
    return [_make_layer(kind, given, max_slots) for kind, given in zip(types, arguments, strict=True)]


def _make_layer(kind: str, given: dict[str, Any], max_slots: int | None) -> Any:
    states, window = given.get("number_of_states", 1), given.get("sliding_window")
    if kind in ("conv", "linear_attention"):
        return StateLayer(states)
    if kind in ("hybrid", "hybrid_sliding"):
        return HybridLayer(window, max_slots, states)
    if kind in INDEXED_TYPES:
        return IndexedLayer(max_slots)
    return DummyLayer() if kind in WITHOUT_CACHE else RaggedLayer(window, max_slots)
