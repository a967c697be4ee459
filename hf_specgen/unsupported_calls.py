"""Why a call of `generate` cannot speculate: arguments that would be ignored, or go wrong later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from hf_specgen import compat
from hf_specgen.libraries import adapter_names
from hf_specgen.targets.inputs import ROUTER_LOGITS, check_cache, prompt_columns, without_router_loss
from hf_specgen.targets.model_parts import (
    cached_tokens,
    compares_slots,
    decoder_argument,
    image_layers,
    layer_kinds,
    layers_with_images,
    text_config,
)

OTHER_METHODS = ("penalty_alpha", "dola_layers", "assistant_early_exit", "use_mtp", "constraints", "force_words_ids")
"""Settings that, beside `num_beams`, ask for other decoding methods than greedy search and sampling."""


def unsupported_argument(arguments: dict[str, Any]) -> str | None:
    """Why a call with these arguments cannot speculate, as far as `generate` would not pass them on to us."""
    if arguments.get("assistant_model") is not None:
        return (
            "assistant_model= asks for Transformers' own assisted generation; leave it out, or use plain "
            "generate(candidate_generator=None)"
        )
    if arguments.get("synced_gpus"):
        return "synced_gpus=True (FSDP, ZeRO-3) is not supported; use plain generate(candidate_generator=None)"
    config = arguments.get("generation_config")
    if "paged" in (arguments.get("cache_implementation"), getattr(config, "cache_implementation", None)):
        return "cache_implementation='paged' is for continuous batching; leave it out, or call generate_batch()"
    return None


def problems(
    model: PreTrainedModel, input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> Iterator[str]:
    """Why a call cannot speculate: what would otherwise be ignored, or go wrong later."""
    if model_kwargs.get("decoder_inputs_embeds") is not None:
        yield "decoder_inputs_embeds= has no tokens to draft from; give the decoder's prompt as decoder_input_ids"
    tokens = prompt_columns(input_ids, model_kwargs)
    if len(input_ids) * tokens == 0:
        yield f"the prompt is empty: input_ids has shape {tuple(input_ids.shape)}; give at least one token per row"
    if input_ids.shape[1] not in (0, tokens):
        yield f"inputs_embeds has {tokens} columns, and input_ids {input_ids.shape[1]}; give one id for each, or no ids"
    embeddings = model_kwargs.get("inputs_embeds")
    if embeddings is not None and len(embeddings) != len(input_ids):
        yield f"inputs_embeds has {len(embeddings)} rows, and input_ids {len(input_ids)}; give one row of ids for each"
    if config.prompt_lookup_num_tokens is not None:
        saved = _saved(model, config, "prompt_lookup_num_tokens")
        yield (
            "prompt_lookup_num_tokens= asks for Transformers' own prompt lookup; leave it out, or use plain "
            f"generate(candidate_generator=None){saved}"
        )
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        asking = [f"{name}=" for name in OTHER_METHODS if getattr(config, name, None)]
        remedy = f"leave out {' and '.join(asking) or 'the setting that asks for it'}"
        remedy = f"set num_beams=1 instead of {config.num_beams}" if config.num_beams > 1 else remedy
        yield (
            f"speculative decoding works with greedy search and sampling, not with {mode.value}; {remedy}, or use "
            f"plain generate(candidate_generator=None){_saved(model, config, 'num_beams', *OTHER_METHODS)}"
        )
    if not model_kwargs.get("use_cache", True):
        saved = _saved(model, config, "use_cache")
        yield f"speculative decoding needs the key/value cache; give use_cache=True{saved}"
    # Whisper's `generate` then sets output_attentions itself.
    if getattr(config, "return_token_timestamps", False):
        yield (
            "return_token_timestamps=True needs the attention weights of every token, which are not available in "
            "speculative decoding; leave it out, or use plain generate(candidate_generator=None)"
        )
    if hidden := [name for name in ("output_attentions", "output_hidden_states") if getattr(config, name)]:
        verb = "are" if len(hidden) > 1 else "is"
        remedy = " and ".join(f"{name}=False" for name in hidden)
        yield (
            f"{' and '.join(hidden)} {verb} not available in speculative decoding; "
            f"give {remedy}{_saved(model, config, *hidden)}"
        )
    names = adapter_names(model)
    if names is not None and len(names) != len(input_ids):
        yield f"adapter_names has length {len(names)}, but the batch {len(input_ids)}; give one name for each row"
    yield from _input_problems(model, model_kwargs, tokens)


def _input_problems(model: PreTrainedModel, model_kwargs: dict[str, Any], tokens: int) -> Iterator[str]:
    """Why a call cannot speculate with this mask, cache or these positions, for a prompt of `tokens` columns."""
    mask = model_kwargs.get(decoder_argument(model, "attention_mask"))
    computes_loss = model_kwargs.get(ROUTER_LOGITS, bool(without_router_loss(model)))
    if computes_loss and mask is not None and not bool(mask.all()):
        yield "output_router_logits=True fails for padded prompts, in plain generate() too; give False"
    if compares_slots(text_config(model)) and mask is not None and not bool(mask.all()):
        yield (
            f"{type(model).__name__} selects keys by positions that it compares with cache slots, so that what padded "
            "rows select depends on the length of others; give prompts of equal length, without padding"
        )
    cache = model_kwargs.get(compat.CACHE)
    of_images = image_layers(text_config(model))
    if of_images and model_kwargs.get("cross_attention_states") is not None:
        yield f"{type(model).__name__} caches cross_attention_states again in every pass; give it pixel_values instead"
    reads_images = of_images and (model_kwargs.get("pixel_values") is not None or layers_with_images(model, cache))
    if reads_images and (type(cache) is not DynamicCache or cache.offloading):
        yield (
            f"{type(model).__name__} reads the keys of images from the layers of its cache, which must then hold them "
            'as they are; leave cache_implementation= out, or give "dynamic"'
        )
    if mask is not None and mask.dim() == 2:
        columns = mask.shape[1]
        cached = cached_tokens(cache)
        if columns not in (tokens, tokens + cached):  # plain `generate` takes further ones for generated tokens
            yield f"the attention mask has {columns} columns for a prompt of {tokens} tokens; give one for each token"
        if columns == tokens <= cached and not bool(mask.all()):  # plain `generate` then masks cached slots by it
            yield (
                f"the cache holds {cached} tokens already, so a prompt of {tokens} cannot be the whole text; give the "
                f"whole text, or an attention mask with a column for each of the {cached + tokens} tokens"
            )
    positions = model_kwargs.get("position_ids")
    if model.config.is_encoder_decoder:
        check_cache(cache, type(model).__name__)
    elif (positions is None and layer_kinds(text_config(model))) or (
        positions is not None and positions.dim() not in (2, 3)
    ):
        yield (
            "speculative decoding works with models that take position_ids of shape [batch, tokens] or "
            f"[axes, batch, tokens], got {'none' if positions is None else tuple(positions.shape)}; use plain "
            "generate(candidate_generator=None)"
        )


def _saved(model: PreTrainedModel, config: GenerationConfig, *names: str) -> str:
    """The end of a message about settings of a call: which of them the checkpoint brought."""
    defaults = compat.default_generation_settings()
    values = {name: getattr(model.generation_config, name, None) for name in names}
    saved = [
        f"{name}={value!r}"
        for name, value in values.items()
        if value is not None and value == getattr(config, name, None) != defaults.get(name)
    ]
    return f" ({', '.join(saved)} is saved in model.generation_config, where it can be changed too)" if saved else ""
