"""EAGLE checkpoints in every layout that is found on the Hub.

| layout | config.json | tensors |
|---|---|---|
| EAGLE-1/2, HASS | a Llama config | `fc` [H, 2H], `layers.0.*` without its first norm |
| EAGLE-3; SpecForge, ModelOpt, DeepSpec | a Llama or Qwen3 config | `fc` [H, taps * H], `midlayer.*` or `layers.*` |
| P-EAGLE | the same, with a mask token | the same and `mask_hidden` |
| speculators `eagle3`, `peagle` | nested, with `transformer_layer_config` | `fc`, `layers.*` |

Which optional tensors there are (biases, norms, embeddings, output matrix) is seen in the file; what only a config can
say (`norm_before_residual`, `norm_output`) is read from it.
"""

from __future__ import annotations

import re

import torch

from hf_specgen.heads.checkpoint import Checkpoint
from hf_specgen.heads.eagle import Eagle1Head, Eagle3Head, EagleConfig
from hf_specgen.heads.fields import Fields
from hf_specgen.heads.layer_format import Names, count_layers, fill, layer_fields, read_layer
from hf_specgen.heads.taps import read_taps

IGNORED = re.compile(r"^(d2t|t2d|verifier_(norm|lm_head)\.weight|.*\.inv_freq)$")
"""Read separately, derived from another tensor, or belonging to the target."""

MASK_TOKEN_FIELDS = ("mask_token_id", "pard_token", "ptd_token_id")


def head_names(checkpoint: Checkpoint) -> Names:
    """The tensors of a checkpoint by the names of our modules."""
    return {re.sub(r"^midlayer\.", "layers.0.", name): name for name in checkpoint.tensors if not IGNORED.match(name)}


def is_eagle1(checkpoint: Checkpoint) -> bool:
    """Whether the layer reads a state made of embedding and feature, and so has no norms before its attention."""
    names = head_names(checkpoint)
    return (
        "fc.weight" in names
        and "layers.0.self_attn.q_proj.weight" in names
        and (
            not names.keys() & {"layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight", "hidden_norm.weight"}
        )
    )


def is_eagle3(checkpoint: Checkpoint) -> bool:
    """Whether the first layer normalises embedding and feature side by side."""
    return "layers.0.hidden_norm.weight" in head_names(checkpoint)


def load_eagle1(checkpoint: Checkpoint, taps: tuple[int, ...] | None, dtype: torch.dtype | None) -> Eagle1Head:
    """An EAGLE-1, EAGLE-2 or HASS head."""
    names, fields = head_names(checkpoint), layer_fields(checkpoint.config)
    layer = read_layer(fields, checkpoint, names)
    vocab = fields.integer("vocab_size")
    config = EagleConfig(
        layer=layer,
        num_layers=count_layers(fields, names),
        hidden_size=layer.hidden_size,
        vocab_size=vocab,
        draft_vocab_size=vocab,
        target_hidden_size=layer.hidden_size,
        num_taps=1,
        taps=taps,
        projection_bias="fc.bias" in names,
        own_embeddings="embed_tokens.weight" in names,
    )
    with torch.device("meta"):
        head = Eagle1Head(config)
    fill(head, checkpoint, names, dtype)
    return head


def load_eagle3(checkpoint: Checkpoint, taps: tuple[int, ...] | None, dtype: torch.dtype | None) -> Eagle3Head:
    """An EAGLE-3 or P-EAGLE head, flat or in the format of speculators."""
    names, fields = head_names(checkpoint), Fields(checkpoint.config)
    nested = "transformer_layer_config" in checkpoint.config
    layers = layer_fields(fields.nested("transformer_layer_config").values if nested else checkpoint.config)
    if not nested and fields.get("norm_output") is False:
        raise ValueError("a head without a norm before its output matrix (norm_output: false) is not supported")
    layer = read_layer(layers, checkpoint, names, strict_bias=nested)
    target_hidden = fields.optional_integer("target_hidden_size", 1) or layer.hidden_size
    projects = fields.nested("eagle_config").get("use_aux_hidden_state") is not False
    config = EagleConfig(
        layer=layer,
        num_layers=count_layers(layers, names),
        hidden_size=layer.hidden_size,
        vocab_size=layers.integer("vocab_size"),
        draft_vocab_size=draft_vocab_size(fields, layers, checkpoint),
        target_hidden_size=target_hidden,
        num_taps=num_taps(checkpoint, target_hidden, layer.hidden_size) if projects else 1,
        taps=taps or read_taps(checkpoint.config),
        projects_features=projects,
        projection_bias="fc.bias" in names,
        norm_before_residual=fields.flag("norm_before_residual"),
        norm_before_fc=fields.flag("norm_before_fc") or "input_norm.weight" in names,
        fc_norm=fields.flag("fc_norm") or "fc_norm.0.weight" in names,
        norm_output=nested and fields.flag("norm_output"),
        mask_token_id=_mask_token(fields) if "mask_hidden" in names or fields.get("mask_token_id") else None,
        own_embeddings="embed_tokens.weight" in names,
        own_lm_head="lm_head.weight" in names,
        speculative_tokens=speculative_tokens(fields),
        base_model=base_model(fields),
    )
    with torch.device("meta"):
        head = Eagle3Head(config)
    fill(head, checkpoint, names, dtype)
    return head


def draft_vocab_size(fields: Fields, layers: Fields, checkpoint: Checkpoint) -> int:
    """The number of tokens that a head can propose: as the config says, else as many as it maps, else all."""
    said = fields.optional_integer("draft_vocab_size", 1)
    if said is None and (mapping := checkpoint.tensors.get("d2t")) is not None and mapping.shape:
        return mapping.shape[0]
    return said or layers.integer("vocab_size")


def num_taps(checkpoint: Checkpoint, target_hidden: int, hidden: int) -> int:
    """How many of the target's states the linear layer over the features reads.

    Raises:
        ValueError: if there is none, or its width is not a multiple of the target's hidden size.
    """
    info = checkpoint.tensors.get("fc.weight")
    if info is None:
        raise ValueError("the tensor fc.weight is missing")
    shape = info.shape
    if len(shape) != 2 or shape[0] != hidden or shape[1] % target_hidden or shape[1] == 0:
        raise ValueError(
            f"fc.weight has shape {shape}, but it has to make a state of width {hidden} out of states of width "
            f"{target_hidden}"
        )
    return shape[1] // target_hidden


def speculative_tokens(fields: Fields) -> int | None:
    """The number of draft tokens that a speculators config recommends."""
    methods = fields.nested("speculators_config").get("proposal_methods")
    if not isinstance(methods, list) or not methods or not isinstance(methods[0], dict):
        return None
    return Fields(methods[0]).optional_integer("speculative_tokens", 1)


def base_model(fields: Fields) -> str | None:
    """The target that a speculators config names."""
    verifier = fields.nested("speculators_config").nested("verifier")
    return verifier.text("name_or_path") if verifier.get("name_or_path") else None


def _mask_token(fields: Fields) -> int:
    for place in (fields.nested("dflash_config"), fields):
        for name in MASK_TOKEN_FIELDS:
            if place.get(name) is not None:
                return place.integer(name, 0)
    raise ValueError(f"the head predicts positions in parallel, but config.json names no {MASK_TOKEN_FIELDS[0]}")
