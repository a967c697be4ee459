"""DFlash and JetSpec checkpoints: the layout of z-lab, and that of speculators."""

from __future__ import annotations

from typing import Any

import torch

from hf_specgen.heads.block import BlockAttention, BlockConfig, BlockHead
from hf_specgen.heads.checkpoint import Checkpoint
from hf_specgen.heads.eagle_format import (
    base_model,
    draft_vocab_size,
    head_names,
    num_taps,
    speculative_tokens,
)
from hf_specgen.heads.fields import Fields
from hf_specgen.heads.layer_format import Names, count_layers, fill, layer_fields, read_layer
from hf_specgen.heads.taps import block_taps, read_taps


def is_block(checkpoint: Checkpoint) -> bool:
    """Whether features are projected and normalised once for all layers."""
    return {"fc.weight", "hidden_norm.weight"} <= checkpoint.tensors.keys()


def load_speculators_block(
    checkpoint: Checkpoint, taps: tuple[int, ...] | None, dtype: torch.dtype | None
) -> BlockHead:
    """A DFlash head in the format of speculators.

    Its sliding layers count their window from the anchor, and are causal unless the config says otherwise.
    """
    fields = Fields(checkpoint.config)
    layers = layer_fields(fields.nested("transformer_layer_config").values)
    if fields.get("projector_type") not in (None, "dflash"):
        raise ValueError(
            f"DFlash heads with projector_type {str(fields.get('projector_type'))[:40]!r} are not supported"
        )
    both_ways = fields.flag("sliding_window_non_causal")
    attention = tuple(
        BlockAttention() if window is None else BlockAttention(not both_ways, window, window_from_anchor=True)
        for _, window in _sliding(layers, count_layers(layers, head_names(checkpoint)))
    )
    rest = {
        "block_size": fields.integer("block_size", 2),
        "mask_token_id": fields.integer("mask_token_id", 0),
        "first_proposing_position": 0 if fields.flag("sample_from_anchor") else 1,
        "taps": taps or read_taps(checkpoint.config),
        "base_model": base_model(fields),
        "speculative_tokens": speculative_tokens(fields),
    }
    return _load(checkpoint, fields, layers, attention, rest, dtype)


def load_zlab_block(checkpoint: Checkpoint, taps: tuple[int, ...] | None, dtype: torch.dtype | None) -> BlockHead:
    """A DFlash head as z-lab publishes it, or a JetSpec head.

    Sliding layers count their window from each position and are causal; `is_causal`, or JetSpec's `causal_head`,
    decides for all layers.
    """
    fields, layers = Fields(checkpoint.config), layer_fields(checkpoint.config)
    dflash = fields.nested("dflash_config")
    places = Fields(dflash.values, checkpoint.config)
    said = ((dflash, "causal_head"), (dflash, "causal"), (fields, "is_causal"))
    causal = next((place.flag(name) for place, name in said if place.get(name) is not None), None)
    num_layers = count_layers(layers, head_names(checkpoint))
    attention = tuple(
        BlockAttention(sliding if causal is None else causal, window)
        for sliding, window in _sliding(layers, num_layers)
    )
    target_layers = fields.optional_integer("num_target_layers", 1)
    chosen = taps or read_taps(checkpoint.config)
    if chosen is None and target_layers is not None:
        chosen = block_taps(target_layers, num_layers)
    rest = {
        "block_size": places.integer("block_size", 2),
        "mask_token_id": places.integer("mask_token_id", 0),
        "taps": chosen,
        "num_target_layers": target_layers,
    }
    return _load(checkpoint, fields, layers, attention, rest, dtype)


def _load(
    checkpoint: Checkpoint,
    fields: Fields,
    layers: Fields,
    attention: tuple[BlockAttention, ...],
    rest: dict[str, Any],
    dtype: torch.dtype | None,
) -> BlockHead:
    names: Names = head_names(checkpoint)
    layer = read_layer(layers, checkpoint, names, strict_bias=True)
    target_hidden = fields.optional_integer("target_hidden_size", 1) or layer.hidden_size
    config = BlockConfig(
        layer=layer,
        attention=attention,
        hidden_size=layer.hidden_size,
        vocab_size=layers.integer("vocab_size"),
        draft_vocab_size=draft_vocab_size(fields, layers, checkpoint),
        target_hidden_size=target_hidden,
        num_taps=num_taps(checkpoint, target_hidden, layer.hidden_size),
        own_embeddings="embed_tokens.weight" in names,
        own_lm_head="lm_head.weight" in names,
        **rest,
    )
    with torch.device("meta"):
        head = BlockHead(config)
    fill(head, checkpoint, names, dtype)
    return head


def _sliding(layers: Fields, num_layers: int) -> list[tuple[bool, int | None]]:
    """For each layer whether it is a sliding one, and its window; Qwen3 ignores the window if its use is off."""
    window = layers.optional_integer("sliding_window", 1) if layers.flag("use_sliding_window") else None
    types = layers.values.get("layer_types")
    if types is None:
        first = layers.optional_integer("max_window_layers") or 0
        types = ["sliding_attention" if window and layer >= first else "full_attention" for layer in range(num_layers)]
    known = ("sliding_attention", "full_attention")
    if not isinstance(types, list) or len(types) != num_layers or not all(kind in known for kind in types):
        raise ValueError(f"layer_types must name the attention of {num_layers} layers, got {str(types)[:80]!r}")
    return [(kind == "sliding_attention", window if kind == "sliding_attention" else None) for kind in types]
