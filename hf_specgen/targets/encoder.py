"""Inputs of an encoder-decoder model beside the text: the encoder's outputs, its mask, and a cache in two parts."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from hf_specgen import compat
from hf_specgen.targets.cache import RaggedCache
from hf_specgen.targets.inputs import StepInputs


class EncoderStepInputs(StepInputs):
    """Makes the arguments of passes of an encoder-decoder, or a decoder that takes `encoder_outputs`."""

    def __init__(self, model: PreTrainedModel, input_ids: torch.Tensor, model_kwargs: dict[str, Any]):
        given = model_kwargs.get("past_key_values")
        check_cache(given, type(model).__name__)
        self._given: Any = given
        prefix = _prefix(model)
        self._names = {name: prefix + name for name in ("input_ids", "attention_mask", "position_ids")}
        self._takes_positions = takes_positions(model)
        positions = _positions(input_ids, model_kwargs if self._takes_positions else {})
        super().__init__(model, input_ids, {**model_kwargs, "position_ids": positions})

    @property
    def divisible(self) -> bool:
        """Whether rows can be dropped: not if there are further tensors, whose batch dimension is unknown."""
        given = self._kwargs if self._extra is None else self._extra
        tensors = {name for name, value in given.items() if isinstance(value, torch.Tensor | dict)}
        return tensors <= {"encoder_outputs", "attention_mask", "position_ids", *self._names.values()}

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows of the batch only."""
        index = list(rows)
        self._given.cross_attention_cache.batch_select_indices(torch.tensor(index))
        if self._extra is None:  # no step has been made yet
            self._input_ids, self._kwargs = self._input_ids[index], _select(self._kwargs, index)
        else:
            self._extra = _select(self._extra, index)

    def text_cache(self, given: Any) -> Any:
        """Of the cache that `generate` passes on, the part for the text."""
        return self._given.self_attention_cache

    def past_key_values(self, cache: Any) -> Any:
        """Both parts of the cache."""
        return EncoderDecoderCache(cache, self._given.cross_attention_cache)

    def returned_cache(self, cache: Any, past_key_values: Any) -> Any:
        """The cache that plain `generate` returns."""
        assert isinstance(cache, RaggedCache)
        cache.to_dynamic(self._given.self_attention_cache)
        self._given.is_updated = past_key_values.is_updated
        return self._given

    def arguments(
        self, tokens: dict[str, torch.Tensor], mask: Any, positions: torch.Tensor, cache: Any
    ) -> dict[str, Any]:
        values = {**tokens, "attention_mask": mask, **({"position_ids": positions} if self._takes_positions else {})}
        named = {self._names[name]: value for name, value in values.items()}
        return {**self.extra(cache, positions.shape[1]), **named, "past_key_values": cache}

    def _after_prompt(self, cache: Any) -> dict[str, Any]:
        kwargs = {name: value for name, value in self._kwargs.items() if name not in ("logits_to_keep", "position_ids")}
        mask_name = self._names["attention_mask"]
        if (mask := kwargs.get(mask_name)) is not None:
            kwargs[mask_name] = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        prepared = self._prepared({**kwargs, "past_key_values": cache})
        own = (*self._names.values(), "past_key_values")
        return {name: value for name, value in prepared.items() if name not in own and value is not None}


def _select(arguments: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    """Arguments with some rows of their tensors, and of the tensors of the encoder's outputs."""
    selected = {name: value[rows] if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    outputs = arguments["encoder_outputs"]
    parts = {name: part[rows] if isinstance(part, torch.Tensor) else part for name, part in outputs.items()}
    return {**selected, "encoder_outputs": type(outputs)(**parts)}


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether the decoder takes the position of each token, so that rows may differ in length and drafts may branch."""
    return _prefix(model) + "position_ids" in inspect.signature(model.forward).parameters


def _prefix(model: PreTrainedModel) -> str:
    """The prefix of the names of the decoder's arguments: without it they are the encoder's."""
    return "decoder_" if model.config.is_encoder_decoder else ""


def _positions(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> torch.Tensor:
    """`[batch, prompt]` positions of the decoder's prompt: given, by its mask, or one for each column."""
    given, mask = model_kwargs.get("decoder_position_ids"), model_kwargs.get("decoder_attention_mask")
    if given is not None:
        return given[..., -input_ids.shape[1] :].expand_as(input_ids)
    counted = torch.ones_like(input_ids) if mask is None else mask[:, -input_ids.shape[1] :].long()
    return (counted.cumsum(dim=-1) - 1).clamp(min=0)


def check_cache(given: Any, model: str) -> None:
    """Raise a `ValueError` unless `generate` has made a cache of the usual kind for an encoder-decoder."""
    if given is None:
        raise ValueError(f"{model} uses no EncoderDecoderCache; call generate() without candidate_generator=")
    parts = (getattr(given, "self_attention_cache", None), getattr(given, "cross_attention_cache", None))
    is_plain = all(type(part) is DynamicCache and not part.offloading for part in parts)
    if compat.is_user_defined(given) or not is_plain:
        raise ValueError(
            "candidate_generator= makes the cache of an encoder-decoder model itself; leave past_key_values out, and "
            'cache_implementation, or give cache_implementation="dynamic"'
        )
