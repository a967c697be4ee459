"""The inputs of forward passes: prompt, cache, tokens of a step, inputs beside the text.

Images and audio belong to the prompt; the model's own `prepare_inputs_for_generation` leaves them out of later passes.
Rotary positions may have several axes: after the prompt all advance by one with each token.
"""

from __future__ import annotations

import inspect
import math
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, QuantizedCache, StaticCache
from transformers.cache_utils import Cache, QuantizedLayer, StaticLayer

from hf_specgen import compat
from hf_specgen.call import UnsupportedModelError
from hf_specgen.targets.cache import MAX_DRAFT_SLOTS, RaggedCache
from hf_specgen.targets.hooks import treats_rows_alike
from hf_specgen.targets.masks import mask_of_images
from hf_specgen.targets.model_parts import (
    MAKES_ITS_MASK,
    cached_tokens,
    decoder_argument,
    has_special_layers,
    image_layers,
    layer_kinds,
    text_config,
)

TOKEN_ARGUMENTS = ("input_ids", "attention_mask", "position_ids")
ROUTER_LOGITS = "output_router_logits"
"""Makes a pass compute a loss from router logits, and from a 2-D mask that passes over drafts do not have."""
OWN_ARGUMENTS = {"inputs_embeds", compat.CACHE, "logits_to_keep", "use_cache", ROUTER_LOGITS}
"""What the target passes itself, besides `TOKEN_ARGUMENTS` under the names that the decoder has for them."""
TOKEN_TYPES = {"token_type_ids": "last", "mm_token_type_ids": "text", "moe_mm_token_type_ids": "text"}
"""Arguments with one value per token, and what generated tokens have: the last token's, or that of text (0)."""
IMAGE_MASK = "cross_attention_mask"
"""Which images each token attends to, `[batch, tokens, images, tiles]`; generated tokens as the last one (Mllama)."""


def accompanying_inputs(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call beside the text: images, audio, token types, and what a user's own class takes."""
    own = {*TOKEN_ARGUMENTS, *OWN_ARGUMENTS}
    return {
        name: value
        for name, value in model_kwargs.items()
        if name not in own and value is not None and not (isinstance(value, dict) and not value)
    }


class PreparedCall(NamedTuple):
    """What `generate` has prepared for its decoding method; `input_ids` are the prompt, `[batch, tokens]`."""

    model: PreTrainedModel
    input_ids: torch.Tensor
    config: GenerationConfig
    model_kwargs: dict[str, Any]


class CallInputs:
    """Makes the arguments of the forward passes of a call."""

    def __init__(self, prepared: PreparedCall):
        model, input_ids, config, model_kwargs = prepared
        self._model = model
        self._input_ids = input_ids
        self._config = config
        self._kwargs = model_kwargs
        self._names = {name: decoder_argument(model, name) for name in TOKEN_ARGUMENTS}
        self._takes_positions = takes_positions(model)
        if "encoder_outputs" in model_kwargs:
            check_cache(model_kwargs.get(compat.CACHE), type(model).__name__)
        given, mask = (model_kwargs.get(self._names[name]) for name in ("position_ids", "attention_mask"))
        if self._takes_positions and given is not None:
            last = self._last_position(given).expand(*given.shape[:-2], len(input_ids))
        else:  # of an encoder-decoder: by its mask, or one for each column
            is_text = torch.ones_like(input_ids) if mask is None or not self._takes_positions else mask
            last = (is_text[:, -input_ids.shape[1] :].long().sum(dim=-1) - 1).clamp(min=0)
        self._axes: torch.Tensor | None = None
        if last.dim() > 1:
            self._axes = last - last[:1]
            last = last[0]
        self.first_positions: tuple[int, ...] = tuple(position + 1 for position in last.tolist())
        """The position of each row's first generated token, on the first axis."""
        # An indexer keeps the positions of each row.
        self._has_positions_by_row = "indexed_attention" in layer_kinds(text_config(model))
        self._others: dict[str, Any] = {}
        self._equal_prompts = self._find_equal_prompts()
        self.prefill_rows: list[int] | None = None
        """Where rows with equal prompts were prefilled as one: for each row of the call its row in that pass."""

    def _last_position(self, given: torch.Tensor) -> torch.Tensor:
        """The positions of the last prompt token, `[..., rows]`, that the model's own preparation makes of given ones.

        It may count from 1, or leave them out: the model then counts the slots of its cache, padding included.
        """
        prepare = cast(Any, self._model).prepare_inputs_for_generation
        positions = prepare(self._input_ids, next_sequence_length=1, **self._kwargs).get(self._names["position_ids"])
        if positions is None:
            return given.new_full(given.shape[:-1], given.shape[-1] - 1)
        return cast(torch.Tensor, positions)[..., -1]

    @property
    def padding(self) -> torch.Tensor | None:
        """`[batch, slots]` bool, False for padding in the prompt; None if there is none."""
        mask = self._kwargs.get(self._names["attention_mask"])
        return None if mask is None or bool((mask != 0).all()) else mask != 0

    def _find_equal_prompts(self) -> tuple[list[int], list[int]] | None:
        """The first row of each different prompt, and for each row the index of its prompt among these.

        None if all prompts differ, or if a row may depend on anything but its own prompt.
        """
        batch = len(self._input_ids)
        given = [self._kwargs.get(self._names[name]) for name in ("attention_mask", "position_ids")]
        by_token = [self._input_ids, *(values for values in given if values is not None)]
        is_text = self._axes is None and self._kwargs.get("inputs_embeds") is None
        if batch == 1 or not is_text or accompanying_inputs(self._kwargs) or {*map(torch.Tensor.dim, by_token)} != {2}:
            return None
        # Of each tensor by itself: in one tensor a mask in half precision would round the token ids.
        rows = list(zip(*(map(tuple, values.expand(batch, -1).tolist()) for values in by_token), strict=True))
        index = {row: number for number, row in enumerate(dict.fromkeys(rows))}
        if len(index) == batch or not self._treats_rows_alike or compat.replaced_methods(self._model):
            return None
        if len(index) == 1 and not _is_unpadded(*given):
            return None
        return [rows.index(row) for row in index], [index[row] for row in rows]

    def prefill(self, cache: Any, shares_prompts: bool = True) -> torch.Tensor:
        """The logits after the prompt, `[batch, 1, vocab]`; raises if the model caches none of it, or more positions.

        With `shares_prompts` the samples of a group, or of a batch with repeated prompts, are prefilled once for each
        different prompt.
        """
        before = cache.get_seq_length()
        tokens = prompt_columns(self._input_ids, self._kwargs)
        input_ids = self._input_ids
        kwargs = {**self._kwargs, compat.CACHE: cache}
        self.prefill_rows = None
        if shares_prompts and self._equal_prompts is not None and cache.is_plain and not cache.is_initialized:
            first, self.prefill_rows = self._equal_prompts
            input_ids = input_ids[first]
            for name in self._names.values():
                if isinstance(values := kwargs.get(name), torch.Tensor) and len(values) == len(self._input_ids):
                    kwargs[name] = values[first]
        outputs = compat.prefill(self._model, input_ids, self._config, kwargs)
        positions = cache.get_seq_length() - before
        if positions <= 0:
            raise UnsupportedModelError("the model writes no keys and values of its text into the cache")
        if positions > tokens:
            raise UnsupportedModelError(
                f"the model cached {positions} positions for a prompt of {tokens} tokens; models that add "
                "positions of their own (images without placeholders, prefix or prompt tuning) are not supported"
            )
        if self.prefill_rows is not None:
            cache.check_pass()  # before rows are selected, after which it would detect nothing
            cache.batch_select_indices(torch.tensor(self.prefill_rows))
        self._others = self._other_arguments(cache)
        return self.by_row(cast(torch.Tensor, outputs.logits)[:, -1:])

    def by_row(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the prefill, `[prompts, …]`, as `[batch, …]`."""
        return values if self.prefill_rows is None else values[self.prefill_rows]

    def is_text(self) -> bool:
        """Whether passes after the prefill read text alone, at one position for each token."""
        return self._axes is None and not accompanying_inputs(self._others)

    def rows_can_change(self, cache: Any) -> bool:
        """Whether rows can be dropped and joined: nothing but the text and its keys belongs to a row."""
        return cache.is_plain and self.is_text() and self._treats_rows_alike

    @cached_property
    def _treats_rows_alike(self) -> bool:
        return treats_rows_alike(self._model)

    @property
    def axes(self) -> torch.Tensor | None:
        """`[axes, batch, 1]` offsets of positions on each axis from the first one; None with a single axis."""
        return None if self._axes is None else self._axes[..., None]

    def positions(self, text: torch.Tensor) -> torch.Tensor:
        """`[batch, tokens]` positions on the first axis to those on all axes."""
        return text if self.axes is None else text + self.axes.to(text.device)

    def arguments(self, tokens: dict[str, torch.Tensor], mask: Any, positions: torch.Tensor) -> dict[str, Any]:
        """The arguments of a pass but the cache, under the decoder's names for them; `tokens` is `{"input_ids": …}`."""
        values = {**tokens, "attention_mask": mask}
        if self._takes_positions:
            if self._has_positions_by_row:
                positions = positions.expand(len(tokens["input_ids"]), -1)
            values["position_ids"] = self.positions(positions)
        named = {self._names.get(name, name): value for name, value in values.items()}
        return {**self.others(positions.shape[1]), **named}

    def others(self, tokens: int) -> dict[str, Any]:
        """The other arguments of a pass over `tokens` tokens of each row, after the prefill."""
        by_token = {name: self._others[name] for name in {*TOKEN_TYPES, IMAGE_MASK} & self._others.keys()}
        repeated = {name: value.expand(-1, tokens, *value.shape[2:]) for name, value in by_token.items()}
        return {**self._others, **repeated}

    def _other_arguments(self, cache: Any) -> dict[str, Any]:
        """What the model's own preparation passes on in the first step after the prompt.

        Without media, which a drafted placeholder would read again.
        """
        own = {*self._names.values(), *OWN_ARGUMENTS, "image_pixel_values", "audio_input_features"}  # Phi-4
        kwargs = {name: value for name, value in self._kwargs.items() if name not in own}
        for name in TOKEN_TYPES.keys() & kwargs.keys():
            kwargs[name] = kwargs[name][:, -1:] if TOKEN_TYPES[name] == "last" else kwargs[name][:, -1:] * 0
        kwargs[compat.CACHE] = cache
        prepare = cast(Any, self._model).prepare_inputs_for_generation
        last = self._input_ids.new_zeros(len(self._input_ids), 1)
        prepared = prepare(last, next_sequence_length=1, use_cache=True, **kwargs)
        others = {name: value for name, value in prepared.items() if name not in own and value is not None}
        others |= without_router_loss(self._model)
        if IMAGE_MASK not in others and (seen := mask_of_images(self._model, cache)) is not None:
            others[IMAGE_MASK] = seen
        return others


def _is_unpadded(mask: torch.Tensor | None, positions: torch.Tensor | None) -> bool:
    """Whether the prompt has neither padding nor gaps, which some layers treat otherwise in a single row."""
    is_consecutive = positions is None or bool((positions.diff(dim=-1) == 1).all())
    return is_consecutive and (mask is None or bool((mask != 0).all()))


def healed_prompt(model: Any, input_ids: torch.Tensor, tokenizer: Any) -> torch.Tensor:
    """The prompt after token healing, which plain `generate` gives the mask and the positions of the one before."""
    if model.generation_config.do_sample:
        raise ValueError("token_healing=True draws tokens by model.generation_config.do_sample=True; set it to False")
    healed: torch.Tensor = model.heal_tokens(input_ids, tokenizer)
    if (columns := healed.shape[1]) != input_ids.shape[1]:
        raise ValueError(f"token healing makes {columns} of {input_ids.shape[1]} tokens; strip spaces around the text")
    return healed


def prompt_columns(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> int:
    """The columns of the decoder's prompt, which may be given as embeddings alone; an encoder has read its own."""
    embeddings = None if "encoder_outputs" in model_kwargs else model_kwargs.get("inputs_embeds")
    return int((input_ids if embeddings is None else embeddings).shape[1])


def without_router_loss(model: PreTrainedModel) -> dict[str, bool]:
    """The argument that switches the loss of `ROUTER_LOGITS` off, for a model whose config switches it on."""
    is_on = getattr(text_config(model), ROUTER_LOGITS, False)
    return {ROUTER_LOGITS: False} if is_on and ROUTER_LOGITS in inspect.signature(model.forward).parameters else {}


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether the decoder takes the position of each token, so that rows may differ in length and drafts may branch."""
    return decoder_argument(model, "position_ids") in inspect.signature(model.forward).parameters


def check_cache(given: Any, model: str) -> None:
    """Raise a `ValueError` unless `generate` has made a cache of the usual kind for an encoder-decoder."""
    if given is None:
        raise ValueError(f"{model} uses no EncoderDecoderCache; use plain generate(candidate_generator=None)")
    parts = (getattr(given, "self_attention_cache", None), getattr(given, "cross_attention_cache", None))
    is_plain = all(type(part) is DynamicCache and not part.offloading for part in parts)
    if compat.is_user_defined(given) or not is_plain:
        raise ValueError(
            f"speculative decoding makes the cache of an encoder-decoder model itself; leave {compat.CACHE} out, and "
            'cache_implementation, or give cache_implementation="dynamic"'
        )


def check_step_arguments(model: PreTrainedModel, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> None:
    """Raise if a user's class may change arguments from step to step: a pass over a draft makes several steps."""
    replaced = compat.replaced_methods(model)
    if replaced == ["prepare_inputs_for_generation"]:  # harmless if several steps get the same
        own = {*OWN_ARGUMENTS, *TOKEN_TYPES, *(decoder_argument(model, name) for name in TOKEN_ARGUMENTS)}
        prepare = cast(Any, model).prepare_inputs_for_generation
        text = input_ids.repeat(1, 1 + MAX_DRAFT_SLOTS)
        texts = [text[:, : input_ids.shape[1] + new] for new in (1, 2, 3, 5, MAX_DRAFT_SLOTS)]
        try:
            steps = [prepare(text, next_sequence_length=1, **model_kwargs) for text in texts]
        except Exception:
            steps = []
        if len({repr([(name, step[name]) for name in sorted({*step} - own)]) for step in steps}) == 1:
            return
    if replaced:
        raise ValueError(
            f"the class {type(model).__name__} has a {replaced[0]} of its own, which may change what a pass receives "
            "from step to step, while one pass verifies several steps; use plain generate(candidate_generator=None)"
        )


def call_cache(given: Any, config: Any, call: PreparedCall, keeps_all: bool) -> RaggedCache:
    """The cache of a call, of the same kind as the given one, which keeps its contents until `to_dynamic`.

    `config` is that of the decoder. With `keeps_all` sliding-window layers keep the slots outside of their window, as
    captured passes need.
    """
    length = call.config.max_length
    slots = None if length is None else int(length) + MAX_DRAFT_SLOTS
    user_owned = given is not None and compat.is_user_defined(given)
    if given is not None and (user_owned or type(given) is not DynamicCache or given.offloading):
        if type(given) not in (DynamicCache, StaticCache, QuantizedCache):
            remedy = f"leave {compat.CACHE} out" if user_owned else 'give cache_implementation="dynamic"'
            raise ValueError(
                "speculative decoding works with a DynamicCache, StaticCache or QuantizedCache, not with "
                f"{type(given).__name__}; {remedy}"
            )
        if problem := _cache_problem(given, config, call):
            raise ValueError(problem)
        return RaggedCache.from_dynamic(given, slots, image_layers(config))
    if keeps_all:
        return RaggedCache(None if slots is None else slots + 128)  # for the padding of captured passes
    return RaggedCache.for_model(config, slots)


def _cache_problem(given: Cache, config: Any, call: PreparedCall) -> str | None:
    """Why a call cannot continue a cache that `generate` was given, or has made for `cache_implementation`."""
    layers: list[Any] = given.layers
    if given.offloading and config.model_type in MAKES_ITS_MASK:
        remedy = 'give cache_implementation="dynamic"'
        return f"layers that compress tokens are not offloaded while drafts are verified; {remedy}"
    if has_special_layers(config) and _layer_types(given) != _layer_types(DynamicCache(config=config)):
        return (
            f"the layers of this {type(given).__name__} are not those that this model writes convolutions, recurrent "
            "states or an indexer's keys to while drafts are rolled back; give DynamicCache(config=model.config), what "
            'an earlier call returned, or cache_implementation="dynamic"'
        )
    _, input_ids, generation, model_kwargs = call
    mask = model_kwargs.get("attention_mask")
    rows, columns = input_ids.shape
    new = math.inf if generation.max_length is None else int(generation.max_length) - columns
    cached = cached_tokens(given)
    text = compat.mask_columns(generation, mask) or cached + columns
    static = [layer for layer in layers if isinstance(layer, StaticLayer)]
    # Other sliding layers hold the window before any number of tokens.
    limits = [layer.max_cache_len for layer in static if not layer.is_sliding or layer.is_croppable]
    if limits and text + new - 1 > min(limits):
        return (
            f"the StaticCache has {min(limits)} slots, and a text of {text} tokens with {new} new ones may need "
            f"{text + new - 1}; give a longer cache or less max_new_tokens"
        )
    if static and isinstance(mask, torch.Tensor) and mask.dim() == 2 and not mask[:, -1].all():
        return "a prompt of nothing but padding attends to every slot of a StaticCache; leave out one of the two"
    kept = min((layer.residual_length for layer in layers if isinstance(layer, QuantizedLayer)), default=None)
    if rows > 1 and kept is not None and new > (0 if cached else kept):
        return (
            f"this QuantizedCache quantizes the keys of all rows together after every {kept} tokens, which rows that "
            f"differ in length do not reach at the same time; give one row, a new cache and at most {kept} new tokens, "
            'or cache_config={"backend": "fp8"}'
        )
    return None


def _layer_types(cache: Cache) -> list[type]:
    return [type(layer) for layer in cache.layers]
