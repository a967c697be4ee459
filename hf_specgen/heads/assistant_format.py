"""Checkpoints of Gemma 4 assistants."""

from __future__ import annotations

import re

import torch

from hf_specgen.heads.checkpoint import Checkpoint
from hf_specgen.heads.fields import Fields
from hf_specgen.heads.gemma_assistant import AssistantConfig, AssistantHead
from hf_specgen.heads.layer_format import Names, count_layers, fill, read_rope
from hf_specgen.heads.layers import LayerConfig

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
RENAMED = {
    "model.embed_tokens.weight": "lm_head.weight",
    "masked_embedding.centroids.weight": "lm_head.centroids.weight",
    "masked_embedding.token_ordering": "lm_head.token_ordering",
}
TIED = ("lm_head.weight",)
"""A copy of the embeddings, which files may have or leave out."""


def is_assistant(checkpoint: Checkpoint) -> bool:
    """Whether the config is that of a Gemma 4 assistant."""
    return checkpoint.config.get("model_type") in MODEL_TYPES


def load_assistant(checkpoint: Checkpoint, taps: tuple[int, ...] | None, dtype: torch.dtype | None) -> AssistantHead:
    """A Gemma 4 assistant, with or without centroids."""
    names: Names = {
        RENAMED.get(name, re.sub(r"^model\.", "", name)): name for name in checkpoint.tensors if name not in TIED
    }
    fields = Fields(checkpoint.config)
    text = fields.nested("text_config")
    count, types = count_layers(text, names), text.get("layer_types")
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != count or not all(kind in known for kind in types):
        raise ValueError(f"layer_types must name full or sliding attention for {count} layers, got {str(types)[:80]!r}")
    if "lm_head.weight" not in names:
        raise ValueError("the tensor model.embed_tokens.weight is missing")
    vocab = checkpoint.tensors[names["lm_head.weight"]].shape[0]
    if text.integer("vocab_size") != vocab:
        raise ValueError(f"config.json says vocab_size {text.integer('vocab_size')}, but the tensors have {vocab}")
    hidden = fields.integer("backbone_hidden_size")
    ordered = fields.flag("use_ordered_embeddings")
    config = AssistantConfig(
        hidden_size=hidden,
        vocab_size=vocab,
        draft_vocab_size=vocab,
        target_hidden_size=hidden,
        num_taps=1,
        taps=taps,
        own_lm_head=True,
        layers=tuple(_layer(text, checkpoint, names, index, kind) for index, kind in enumerate(types)),
        layer_types=tuple(types),
        sliding_window=text.integer("sliding_window"),
        num_centroids=fields.integer("num_centroids") if ordered else None,
        top_centroids=fields.integer("centroid_intermediate_top_k") if ordered else 0,
    )
    with torch.device("meta"):
        head = AssistantHead(config)
    fill(head, checkpoint, names, dtype)
    return head


def _layer(text: Fields, checkpoint: Checkpoint, names: Names, index: int, kind: str) -> LayerConfig:
    """One layer: heads and MLP have the sizes of its tensors, rotary positions the parameters of its type."""
    shapes = []
    for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj"):
        name = f"layers.{index}.{part}.weight"
        if name not in names or len(checkpoint.tensors[names[name]].shape) != 2:
            raise ValueError(f"the matrix {name} is missing")
        shapes.append(checkpoint.tensors[names[name]].shape)
    heads = text.integer("num_attention_heads")
    if shapes[0][0] % heads:
        raise ValueError(
            f"config.json says {heads} attention heads, but layer {index} has {shapes[0][0]} rows of queries"
        )
    bias = text.flag("attention_bias")
    return LayerConfig(
        hidden_size=shapes[1][0],
        intermediate_size=shapes[2][0],
        num_heads=heads,
        num_kv_heads=1,  # keys and values are the target's, in its number of heads
        head_dim=shapes[0][0] // heads,
        norm_eps=text.number("rms_norm_eps"),
        activation=text.text("hidden_activation"),
        qkv_bias=bias,
        output_bias=bias,
        max_position_embeddings=text.integer("max_position_embeddings"),
        rope=read_rope(Fields({"rope_parameters": text.nested("rope_parameters").nested(kind).values})),
    )
