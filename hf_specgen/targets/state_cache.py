"""The cache of a call, and layers that keep more than keys and values: convolutions, recurrent states, an indexer.

A `StateLayer` keeps more columns than a convolution's window, so that it can be cut again where accepted tokens end. A
recurrent state can only return to where the last pass began; `hf_specgen.targets.replay` processes tokens again.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import (
    DummyLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from hf_specgen import compat
from hf_specgen.targets.cache import MAX_DRAFT_SLOTS, MAX_ROLLBACK, RaggedCache, RaggedLayer, check_crop
from hf_specgen.targets.model_parts import INDEXED_TYPES, WITHOUT_CACHE, has_special_layers, layer_windows


class StateLayer(LinearAttentionLayer):
    """Convolution windows and recurrent states of one layer; `lengths` are the tokens of each row that they include."""

    is_compileable = False
    is_sliding = False

    def __init__(self, number_of_states: int = 1, **kwargs: object) -> None:
        super().__init__(number_of_states=number_of_states)
        self.record_past = True  # models then leave out kernels that overwrite the window in place
        self.lengths: tuple[int, ...] = ()
        self._start: tuple[int, ...] = ()  # lengths before the last pass
        self._columns: dict[int, torch.Tensor] = {}  # by convolution: its window and the columns before it
        self._before: dict[int, torch.Tensor | None] = {}  # recurrent states before the last pass
        self._saved: dict[str, Any] | None = None  # the whole state at the protected length

    @property
    def parts(self) -> tuple[Any, ...]:
        """The parts that are rolled back separately: the layer alone."""
        return (self,)

    @property
    def is_initialized(self) -> bool:
        return bool(self.lengths)

    @property
    def has_recurrent_state(self) -> bool:
        """Whether there is a state besides convolution windows."""
        return any(self.is_recurrent_states_initialized.values())

    @property
    def protected(self) -> int | None:
        """A length that a user's cache must be able to return to, set when it has that length; None: none."""
        return None if self._saved is None else min(self._saved["lengths"])

    @protected.setter
    def protected(self, length: int) -> None:
        names = ("lengths", "_start", "_columns", "_before", "conv_states", "recurrent_states")
        self._saved = copy.deepcopy({name: self.__dict__[name] for name in names})

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: object
    ) -> torch.Tensor:
        """Append the columns `[batch, channels, new]` of a pass; returns them after the window that precedes them."""
        if not self.is_conv_states_initialized[state_idx]:
            self.lazy_initialization(conv_states=conv_states, state_idx=state_idx, conv_kernel_size=conv_kernel_size)
        window = self.conv_states[state_idx]
        size = self.conv_kernel_size[state_idx]
        assert window is not None and size is not None
        columns = torch.cat([self._columns.get(state_idx, window), conv_states], dim=-1)
        self._columns[state_idx] = columns[..., -(size + MAX_ROLLBACK + conv_states.shape[-1]) :]
        self.conv_states[state_idx] = columns[..., -size:]
        self.has_previous_state[state_idx] = True
        if state_idx == 0:  # once a pass, however many convolutions the layer has
            self._start = self.lengths or (0,) * len(conv_states)
            self.lengths = tuple(length + conv_states.shape[-1] for length in self._start)
        return torch.cat([window, conv_states], dim=-1)

    def state_for_pass(self, state_idx: int = 0) -> torch.Tensor:
        """The state, of which a copy is kept for a rollback: kernels for a single token overwrite it in place."""
        state = self.recurrent_states[state_idx]
        assert state is not None
        self._before[state_idx] = state.clone()
        return state

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        """Replace the state."""
        before = self.recurrent_states[state_idx]
        if before is None:
            self.lazy_initialization(recurrent_states=recurrent_states, state_idx=state_idx)
        self.recurrent_states[state_idx] = recurrent_states if before is None else recurrent_states.to(before.dtype)
        return recurrent_states

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Return to these lengths; raises if a window or a recurrent state was not kept there."""
        removed = [now - length for now, length in zip(self.lengths, lengths, strict=True)]
        if not any(removed):
            return
        if self._saved is not None and tuple(lengths) == self._saved["lengths"]:
            saved = copy.deepcopy(self._saved)
            for states in ("conv_states", "recurrent_states"):  # a `HybridLayer` has the same dictionaries
                self.__dict__[states].update(saved.pop(states))
            self.__dict__.update(saved)
            return
        most, rows = max(removed), torch.tensor(removed, device=self.device)
        self._check_windows(most)
        if self.has_recurrent_state:
            self._return_to_start(rows > 0, lengths)
        for index, columns in self._columns.items():
            places = torch.arange(columns.shape[-1] - most, device=columns.device) + (most - rows)[:, None]
            kept = columns.gather(-1, places[:, None].expand(-1, columns.shape[1], -1))
            self._columns[index], self.conv_states[index] = kept, kept[..., -self._window_size(index) :]
        self.lengths = tuple(lengths)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` tokens of every row; raises as `set_lengths`."""
        check_crop(tokens_to_remove)
        self.set_lengths([max(length + tokens_to_remove, 0) for length in self.lengths])

    def _window_size(self, index: int) -> int:
        size = self.conv_kernel_size[index]
        assert size is not None
        return size

    def _check_windows(self, removed: int) -> None:
        for index, columns in self._columns.items():
            most = columns.shape[-1] - self._window_size(index)
            if removed > most:
                raise RuntimeError(
                    f"{removed} tokens cannot be removed: the columns before the window of a convolution were kept for "
                    f"{most} tokens"
                )

    def _return_to_start(self, rows: torch.Tensor, lengths: Sequence[int]) -> None:
        for row in rows.nonzero().flatten().tolist():
            if lengths[row] != self._start[row]:
                raise RuntimeError(
                    f"row {row} cannot return to {lengths[row]} tokens: its recurrent state was kept at "
                    f"{self._start[row]} and {self.lengths[row]}"
                )
        for index, state in self.recurrent_states.items():
            before = self._before.get(index)
            if state is None:
                continue
            chosen = rows.view(-1, *[1] * (state.dim() - 1))
            self.recurrent_states[index] = torch.where(
                chosen, torch.zeros_like(state) if before is None else before, state
            )

    def move(self, rows: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Do nothing: only chains are verified, whose accepted tokens need not be moved."""

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows."""
        if not self.lengths:
            return
        indices = indices.to(self.device)
        for states in (self._columns, self.conv_states, self.recurrent_states, self._before):
            for index, state in states.items():
                if state is not None:
                    states[index] = state[indices]
        self.lengths = tuple(self.lengths[row] for row in indices.tolist())
        self._start = tuple(self._start[row] for row in indices.tolist())

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)


class HybridLayer(RaggedLayer, LinearAttentionCacheLayerMixin):  # type: ignore[misc]
    """A layer with attention and a state."""

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


def make_layers(config: Any, max_slots: int | None) -> list[Any]:
    """The cache layers of a model."""
    types, arguments = get_layer_types_and_kwargs(config)
    return [_make_layer(kind, settings, max_slots) for kind, settings in zip(types, arguments, strict=True)]


def _make_layer(layer_type: str, settings: dict[str, Any], max_slots: int | None) -> Any:
    states, window = settings.get("number_of_states", 1), settings.get("sliding_window")
    if layer_type in ("conv", "linear_attention"):
        return StateLayer(states)
    if layer_type in ("hybrid", "hybrid_sliding"):
        return HybridLayer(window, max_slots, states)
    if layer_type in INDEXED_TYPES:
        return IndexedLayer(max_slots)
    return DummyLayer() if layer_type in WITHOUT_CACHE else RaggedLayer(window, max_slots)


class CallCache:
    """The cache of a call, and the one that the caller of `generate` gave, if any.

    With `keeps_all` sliding-window layers keep the slots outside of their window, as captured passes need.
    """

    def __init__(self, given: Any, config: Any, generation_config: GenerationConfig, keeps_all: bool):
        self._given = given if compat.is_user_defined(given) else None
        length = generation_config.max_length
        slots = None if length is None else int(length) + MAX_DRAFT_SLOTS
        self.cache = _make_cache(given, self.is_given, config, slots, keeps_all)
        self._given_lengths = self.cache.lengths
        if self.cache is self._given:
            self.cache.protect()

    @property
    def is_given(self) -> bool:
        """Whether the caller of `generate` gave a cache, and so sees its contents after the call."""
        return self._given is not None

    def write_back(self) -> DynamicCache | None:
        """Copy the contents into the `DynamicCache` that the caller gave; returns it, or None for any other cache."""
        if not isinstance(self._given, DynamicCache):
            return None
        self.cache.to_dynamic(self._given)
        return self._given

    def restore(self) -> None:
        """After an exception: cut a cache that the caller gave to what it held before."""
        if self.cache is self._given:
            self.cache.set_lengths(self._given_lengths or (0,) * len(self.cache.lengths))


def _make_cache(given: Any, user_owned: bool, config: Any, slots: int | None, keeps_all: bool) -> RaggedCache:
    """The cache for a call that can fill so many slots; other arguments as for `CallCache`."""
    if isinstance(given, RaggedCache):
        return given
    if given is not None and (type(given) is not DynamicCache or given.offloading):
        raise _unusable_cache(given, user_owned)
    special = has_special_layers(config)
    if user_owned and special:
        raise ValueError(
            "a DynamicCache cannot roll back the convolutions, recurrent states or indexed attention of this model; "
            "leave past_key_values out of the first call, and give later ones the cache that it returned"
        )
    if given is not None and user_owned:
        return RaggedCache.from_dynamic(given, slots)
    windows = [] if keeps_all else layer_windows(config)
    if keeps_all and slots is not None:
        slots += 128  # for the padding of captured passes
    return RaggedCache(windows, slots, layers=make_layers(config, slots) if special else None)


def _unusable_cache(given: Any, user_owned: bool) -> ValueError:
    """The reason why a call cannot speculate with a cache, and what to do."""
    kind = type(given).__name__
    if getattr(given, "offloading", False):
        kind = f"an offloaded {kind}"
    remedy = "leave past_key_values out" if user_owned else 'give cache_implementation="dynamic"'
    return ValueError(
        "candidate_generator= works with a DynamicCache that is not offloaded, or the cache of an earlier speculative "
        f"call, not with {kind}; {remedy}"
    )
