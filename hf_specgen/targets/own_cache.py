"""The cache that a call works on: made for the model, or the one that the caller gave."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache, GenerationConfig

from hf_specgen import compat
from hf_specgen.targets import masks
from hf_specgen.targets.cache import RaggedCache
from hf_specgen.targets.state_layers import has_special_layers, make_layers

MAX_DRAFT_SLOTS = 64
"""Slots for draft tokens beyond the maximum length of the text."""
PADDING_SLOTS = 128
"""Slots for the padding of a compiled pass, and for rounding the number of slots."""


class CallCache:
    """The cache of a call, and the one that the caller of `generate` gave, if any.

    Args:
        given: the cache that `generate` passes on; None if there is none.
        config: of the model's text part.
        generation_config: as prepared by `generate`.
        keeps_all: as for `own_cache`.

    Attributes:
        cache: the one that the forward passes use.

    Raises:
        ValueError: for a cache that cannot be copied.
    """

    def __init__(self, given: Any, config: Any, generation_config: GenerationConfig, keeps_all: bool):
        self._given = given if compat.is_user_defined(given) else None
        self.cache = own_cache(given, self.is_given, config, max_slots(generation_config), keeps_all)
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


def own_cache(given: Any, user_owned: bool, config: Any, slots: int | None, keeps_all: bool = False) -> RaggedCache:
    """The cache for a call.

    Args:
        given: the cache that `generate` passes on; None if there is none.
        user_owned: whether the caller of `generate` gave it.
        config: of the model's text part.
        slots: how many the call can fill, if known.
        keeps_all: whether sliding-window layers keep the slots outside of their window too, as compiled passes need.

    Raises:
        ValueError: for a cache that cannot be copied.
    """
    if keeps_all and user_owned and any(getattr(given, "is_sliding", ())):
        raise ValueError(
            f"the given {type(given).__name__} has dropped what is outside of sliding windows, and compiled passes "
            "need all of it; leave past_key_values or compile= out"
        )
    if isinstance(given, RaggedCache):
        return given
    special = has_special_layers(config)
    if given is None or (type(given) is DynamicCache and not given.offloading and not (user_owned and special)):
        if given is not None and user_owned:
            return RaggedCache.from_dynamic(given, slots)
        windows = [] if keeps_all else masks.layer_windows(config)
        slots = slots + PADDING_SLOTS if keeps_all and slots is not None else slots
        return RaggedCache(windows, slots, layers=make_layers(config, slots) if special else None)
    if type(given) is DynamicCache and not given.offloading:
        raise ValueError(
            "a DynamicCache cannot roll back the convolutions, recurrent states or indexed attention of this model; "
            "leave past_key_values out of the first call, and give later ones the cache that it returned"
        )
    raise ValueError(
        f"candidate_generator= works with a DynamicCache or the cache of an earlier speculative call, "
        f"not with {type(given).__name__}; leave past_key_values and cache_implementation unset"
    )


def max_slots(config: GenerationConfig) -> int | None:
    """The number of cache slots that a call can fill: its maximum length and a draft after it."""
    return None if config.max_length is None else int(config.max_length) + MAX_DRAFT_SLOTS
