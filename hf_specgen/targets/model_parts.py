"""The parts of a causal language model, and what its config specifies of its layers and attention."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from hf_specgen import compat
from hf_specgen.targets.hooks import own_attributes

FINAL_NORMS = ("norm", "final_layernorm", "ln_f", "final_layer_norm", "embedding_norm")
"""Attributes of the decoder under which architectures keep their final norm."""
ATTENTION_OF_TYPE = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
"""The type of attention in layers that combine it with a recurrent state."""
WITHOUT_ATTENTION = ("conv", "linear_attention")
"""Types of layers with a recurrent state or a convolution alone."""
COMPRESSED_TYPES = ("compressed_sparse_attention", "heavily_compressed_attention")
"""Types of layers whose cache compresses tokens, so that it can only return to where a pass began."""
STATE_TYPES = (*WITHOUT_ATTENTION, *ATTENTION_OF_TYPE, *COMPRESSED_TYPES)
"""Types of layers with a recurrent state, a convolution or compressed tokens, as configurations name them."""
COUNTING_TYPES = ("minimax_m3_sparse",)
"""Types of layers that compare positions with slots, so that drafts are chains, and rows have no padding."""
INDEXED_TYPES = ("indexed_attention", *COUNTING_TYPES)
"""Types of layers whose attention selects keys by an indexer, which has keys of its own."""
WITHOUT_CACHE = ("dummy", "moe", "mlp")
"""Types of layers that write nothing to the cache."""

MASKS_PADDING = ("glm5_next_text",)
"""Types of models whose indexed attention takes a mask of padding alone, and sees the slots up to a query's own."""
MAKES_ITS_MASK = ("deepseek_v4",)
"""Types of models that make the mask of drafts themselves: compressed tokens are counted for all rows together."""
TAKES_2D_MASK = ("kosmos_2_text_model",)
"""Types of models that take a mask of padding alone, and place tokens by the length of the cache."""
TAKES_ONE_MASK = ("paligemma",)
"""Types of models that give one mask to layers of all kinds; their decoders take one for each kind."""


def text_config(model: PreTrainedModel) -> Any:
    """The config of the part that generates text; of an encoder-decoder, its decoder's, or the one for both."""
    config: Any = model.config
    if not config.is_encoder_decoder:
        return config.get_text_config()
    # `get_text_config(decoder=True)` would copy a config for both, which takes milliseconds.
    parts = (getattr(config, name, None) for name in ("decoder", "generator", "text_config"))
    return next((part for part in parts if isinstance(part, PreTrainedConfig)), config)


def decoder_config(model: PreTrainedModel) -> Any:
    """The config by which the cache of the decoder is made."""
    is_encoder_decoder = bool(model.config.is_encoder_decoder)
    return model.config.get_text_config(decoder=True) if is_encoder_decoder else text_config(model)


def decoder_argument(model: PreTrainedModel, name: str) -> str:
    """The name of an argument of the decoder; of an encoder-decoder those without prefix are the encoder's."""
    return f"decoder_{name}" if model.config.is_encoder_decoder else name


def layer_kinds(config: Any) -> set[str]:
    """The types of attention in the model's layers, under the names of Transformers' mask functions."""
    if hasattr(config, "layer_types"):
        types = {ATTENTION_OF_TYPE.get(layer_type, layer_type) for layer_type in config.layer_types}
        return types - {*WITHOUT_ATTENTION, *WITHOUT_CACHE}
    if getattr(config, "sliding_window", None) is not None:
        return {"sliding_attention"}
    if getattr(config, "attention_chunk_size", None) is not None:
        return {"chunked_attention"}
    return {"full_attention"}


def image_layers(config: Any) -> tuple[int, ...]:
    """The layers of a decoder that attend to images, whose keys they keep in the cache (Mllama)."""
    return tuple(getattr(config, "cross_attention_layers", None) or ())


def layers_with_images(model: PreTrainedModel, cache: Any) -> list[Any]:
    """The layers of a cache that hold keys of images for layers of such a model (Mllama); of None, there are none."""
    layers = getattr(cache, "layers", ())
    of_images = [layer for index in image_layers(text_config(model)) for layer in layers[index : index + 1]]
    return [layer for layer in of_images if layer.get_seq_length()]


def cached_tokens(cache: Any) -> int:
    """The tokens that a cache of Transformers holds; 0 of None, and of layers of states alone, which count none."""
    layers = getattr(cache, "layers", ())
    if cache is None or (layers and not any(isinstance(layer, CacheLayerMixin) for layer in layers)):
        return 0
    return int(cache.get_seq_length())


def keeps_state(config: Any) -> bool:
    """Whether a model has convolutions or recurrent states."""
    return not set(STATE_TYPES).isdisjoint(getattr(config, "layer_types", None) or ())


def compares_slots(config: Any) -> bool:
    """Whether a model has layers of `COUNTING_TYPES`."""
    return not set(COUNTING_TYPES).isdisjoint(getattr(config, "layer_types", None) or ())


def may_have_recurrent_state(config: Any) -> bool:
    """Whether a model's layers may have recurrent states beside convolutions, which is certain after the prefill."""
    return not (set(STATE_TYPES) - {"conv"}).isdisjoint(getattr(config, "layer_types", None) or ())


def has_special_layers(config: Any) -> bool:
    """Whether a model's layers cache more than keys and values (`hf_specgen.targets.state_cache`)."""
    return not {*STATE_TYPES, *INDEXED_TYPES}.isdisjoint(getattr(config, "layer_types", None) or ())


def is_causal_kernel(implementation: str) -> bool:
    """Whether an attention implementation computes causal attention without a mask, as FlashAttention 2, 3, 4."""
    return "flash" in implementation and "paged" not in implementation


def takes_no_mask(config: Any) -> str | None:
    """What of a model takes no mask of drafts, so that it verifies chains of one row; None if nothing does."""
    implementation = compat.attention_implementation(config)
    if is_causal_kernel(implementation):
        return implementation
    if config.model_type in MAKES_ITS_MASK:
        return "its attention, which compresses the tokens of all rows together,"
    return "the indexer of its attention" if config.model_type in MASKS_PADDING else None


def reads_encoder(model: PreTrainedModel) -> bool:
    """Whether a model's decoder reads encoder outputs: its own encoder's, or as a decoder alone those that it gets."""
    return bool(model.config.is_encoder_decoder) or "encoder_outputs" in inspect.signature(model.forward).parameters


def decoder(model: PreTrainedModel) -> nn.Module:
    """The model without its output matrix; its `last_hidden_state` is what the output matrix reads."""
    inner = cast(Any, model).get_decoder()
    if not model.config.is_encoder_decoder and hasattr(inner, "lm_head"):
        # Llama4ForCausalLM, alone or in its multimodal sibling, to which its base_model_prefix belongs.
        inner = inner.model
    return cast(nn.Module, inner)


def num_layers(model: PreTrainedModel) -> int:
    """The number of decoder layers; configs for an encoder too have names of their own for it."""
    config = text_config(model)
    of_both = (getattr(config, name, None) for name in ("decoder_layers", "num_decoder_layers"))
    return int(next((count for count in of_both if count is not None), config.num_hidden_layers))


def text_embeddings(model: PreTrainedModel) -> Any:
    """The embeddings of the tokens that are generated."""
    part: Any = cast(Any, model).get_decoder() if model.config.is_encoder_decoder else model
    return part.get_input_embeddings()


def matrix_rows(module: Any) -> int | None:
    """How many tokens embeddings or an output matrix have; None without a plain matrix, as of quantized ones."""
    weight: Any = getattr(module, "weight", None)
    is_plain = isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.is_floating_point()
    return weight.shape[0] if is_plain else None


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers, first to last; raises if the model has no list of as many as its config states."""
    count = num_layers(model)
    for child in decoder(model).children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            return child
    raise ValueError(
        f"{type(model).__name__} has no list of {count} decoder layers, which exits and heads need; use another "
        "candidate generator"
    )


def final_norm(model: PreTrainedModel) -> nn.Module:
    """The normalisation between the last layer and the output matrix; raises if it has none of the known names."""
    for name in FINAL_NORMS:
        norm = getattr(decoder(model), name, None)
        if isinstance(norm, nn.Module):
            return norm
    raise ValueError(f"{type(model).__name__} has no final norm under the names {', '.join(FINAL_NORMS)}")


def sharing_copy(module: Any) -> Any:
    """A module with the same parameters, submodules and buffers, each of which can be replaced in the copy alone."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    copied._buffers = dict(module._buffers)
    # Functions that are bound to the module, such as a `forward` of accelerate, are bound to the copy.
    attributes = own_attributes(copied)
    for name, value in own_attributes(module).items():
        if isinstance(value, MethodType) and value.__self__ is module:
            attributes[name] = MethodType(value.__func__, copied)
        elif isinstance(value, partial) and any(argument is module for argument in value.args):
            args = (copied if argument is module else argument for argument in value.args)
            attributes[name] = bound = partial(value.func, *args, **value.keywords)
            own_attributes(bound).update(own_attributes(value))  # such as the function whose signature it has
    return copied


def with_part(module: Any, old: nn.Module, new: nn.Module) -> Any:
    """A module that has a new part in the place of an old one, and shares all parts that do not contain it.

    Raises:
        ValueError: if one that contains it has a replaced `forward` that would run the module itself, not its copy.
    """
    if module is old:
        return new
    if all(part is not old for part in module.modules()):
        return module
    copied = sharing_copy(module)
    forward = own_attributes(module).get("forward")
    if forward is not None and forward is own_attributes(copied)["forward"]:
        raise ValueError(
            f"the forward of this {type(module).__name__} was replaced by {forward!r:.80}, which a copy with another "
            f"{type(old).__name__} cannot run; assign a method, types.MethodType(function, model), or use a hook"
        )
    for name, child in module._modules.items():
        copied._modules[name] = None if child is None else with_part(child, old, new)
    return copied


def output_matrix(model: PreTrainedModel) -> nn.Linear:
    """The output matrix, hidden state to vocabulary; raises if it is not a linear layer."""
    head = compat.unwrapped(model.get_output_embeddings())
    if not isinstance(head, nn.Linear):
        raise ValueError(
            f"{type(model).__name__} has no linear output matrix (lm_head) that a head could share; merge an adapter "
            "on it into the model (merge_and_unload()), or use a strategy without a head"
        )
    return head


def output_logits(
    model: PreTrainedModel, hidden: torch.Tensor, matrix: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> torch.Tensor:
    """The model's logits, scaled and capped as by itself, for states `[..., hidden]` that its decoder returned.

    `matrix` takes the place of the model's own output matrix.
    """
    config = model.config.get_text_config()
    logits = (matrix or output_matrix(model))(hidden)
    # Which of them a model reads is model-specific; no architecture has a field of these names that it ignores.
    if (scale := getattr(config, "logit_scale", None)) is not None:
        logits = logits * scale
    if (scaling := getattr(config, "logits_scaling", None)) is not None:
        logits = logits / scaling
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = cap * torch.tanh(logits / cap)
    return cast(torch.Tensor, logits)
