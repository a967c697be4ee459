"""EAGLE, P-EAGLE, DFlash, JetSpec and Gemma-assistant checkpoints in every layout that is found on the Hub.

| layout | config.json | tensors |
|---|---|---|
| EAGLE-1/2, HASS | a Llama config | `fc` [H, 2H], `layers.0.*` without its first norm |
| EAGLE-3; SpecForge, ModelOpt, DeepSpec | a Llama or Qwen3 config | `fc` [H, states * H], `midlayer.*` or `layers.*` |
| P-EAGLE | the same, with a mask token | the same and `mask_hidden` |
| speculators `eagle3`, `peagle` | nested, with `transformer_layer_config` | `fc`, `layers.*` |
| DFlash of z-lab, JetSpec | a Qwen3 config with `dflash_config` | `fc`, `hidden_norm`, `layers.*` |
| speculators `dflash` | nested, with `transformer_layer_config` | the same |
| Gemma 4 assistant | `text_config` | `model.layers.*` without keys and values |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_specgen.heads.aux_hidden_states import block_layers, configured_layers
from hf_specgen.heads.base import DraftHead, build_head
from hf_specgen.heads.block import BlockAttention, BlockConfig, BlockHead
from hf_specgen.heads.checkpoint import INDEX, PICKLED, SINGLE, Checkpoint, Fields, Names, Source, open_checkpoint
from hf_specgen.heads.eagle import Eagle1Head, Eagle3Head, EagleConfig
from hf_specgen.heads.gemma_assistant import is_assistant, load_assistant
from hf_specgen.heads.layers import LayerConfig, count_layers, layer_fields, read_layer
from hf_specgen.heads.medusa import MedusaConfig
from hf_specgen.heads.medusa_formats import MEDUSA_FILES

IGNORED = re.compile(r"^(d2t|t2d|verifier_(norm|lm_head)\.weight|.*\.inv_freq)$")
"""Read separately, derived from another tensor, or belonging to the target."""
MASK_TOKEN_FIELDS = ("mask_token_id", "pard_token", "ptd_token_id")

Layers = tuple[int, ...]
Load = Callable[[Checkpoint, "Layers | None", "torch.dtype | None"], DraftHead]


def load_head(
    path_or_id: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    subfolder: str | None = None,
    cache_dir: str | Path | None = None,
    aux_hidden_state_layers: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> DraftHead:
    """Load a draft head; its format is recognised by config.json and the names of the tensors.

    Args:
        path_or_id: a folder, or the id of a Hub repository.
        revision, token, subfolder, cache_dir: as for `from_pretrained`.
        aux_hidden_state_layers: `hidden_states` indices of the target to read, instead of those of the checkpoint.
        dtype: of the head; None for the dtype of the file.

    Returns:
        The head, on the CPU, frozen, in evaluation mode; `head.bind(target)` makes it ready to draft.
    """
    cache = None if cache_dir is None else str(cache_dir)
    checkpoint = open_checkpoint(Source(str(path_or_id), revision, token, subfolder, cache))
    layers = None if aux_hidden_state_layers is None else tuple(aux_hidden_state_layers)
    try:
        return head_format(checkpoint).load(checkpoint, layers, dtype)
    except ValueError as error:
        raise ValueError(f"{checkpoint.source}: {error}") from None


def head_names(checkpoint: Checkpoint) -> Names:
    """The tensors of a checkpoint by the names of our modules."""
    return {re.sub(r"^midlayer\.", "layers.0.", name): name for name in checkpoint.tensors if not IGNORED.match(name)}


def load_eagle1(checkpoint: Checkpoint, layers: Layers | None, dtype: torch.dtype | None) -> Eagle1Head:
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
        num_aux_hidden_states=1,
        aux_hidden_state_layers=layers,
        projection_bias="fc.bias" in names,
        own_embeddings="embed_tokens.weight" in names,
    )
    return build_head(Eagle1Head, config, checkpoint, names, dtype)


def load_eagle3(checkpoint: Checkpoint, layers: Layers | None, dtype: torch.dtype | None) -> Eagle3Head:
    """An EAGLE-3 or P-EAGLE head, flat or in the format of speculators."""
    names, fields = head_names(checkpoint), Fields(checkpoint.config)
    nested = "transformer_layer_config" in checkpoint.config
    of_layers = layer_fields(fields.nested("transformer_layer_config").values if nested else checkpoint.config)
    if not nested and fields.get("norm_output") is False:
        raise ValueError("a head without a norm before its output matrix (norm_output: false) is not supported")
    layer = read_layer(of_layers, checkpoint, names, strict_bias=nested)
    projects = fields.nested("eagle_config").get("use_aux_hidden_state") is not False
    config = EagleConfig(
        layer=layer,
        num_layers=count_layers(of_layers, names),
        **_sizes(checkpoint, fields, of_layers, layer, projects),
        aux_hidden_state_layers=layers or configured_layers(checkpoint.config),
        projects_features=projects,
        projection_bias="fc.bias" in names,
        norm_before_residual=fields.flag("norm_before_residual"),
        norm_before_fc=fields.flag("norm_before_fc") or "input_norm.weight" in names,
        fc_norm=fields.flag("fc_norm") or "fc_norm.0.weight" in names,
        norm_output=nested and fields.flag("norm_output"),
        mask_token_id=_mask_token(fields) if "mask_hidden" in names or fields.get("mask_token_id") else None,
        speculative_tokens=_speculative_tokens(fields),
        base_model=_base_model(fields),
    )
    return build_head(Eagle3Head, config, checkpoint, names, dtype)


def _sizes(
    checkpoint: Checkpoint, fields: Fields, of_layers: Fields, layer: LayerConfig, projects: bool
) -> dict[str, Any]:
    """The fields of `HeadConfig` that hold sizes or name optional tensors."""
    tensors, hidden = checkpoint.tensors, layer.hidden_size
    target_hidden = fields.optional_integer("target_hidden_size", 1) or hidden
    vocab, draft_vocab = of_layers.integer("vocab_size"), fields.optional_integer("draft_vocab_size", 1)
    if draft_vocab is None:
        draft_vocab = tensors["d2t"].shape[0] if "d2t" in tensors and tensors["d2t"].shape else vocab
    return {
        "hidden_size": hidden,
        "vocab_size": vocab,
        "draft_vocab_size": draft_vocab,
        "target_hidden_size": target_hidden,
        "num_aux_hidden_states": _num_aux_hidden_states(checkpoint, target_hidden, hidden) if projects else 1,
        "own_embeddings": "embed_tokens.weight" in tensors,
        "own_lm_head": "lm_head.weight" in tensors,
    }


def _num_aux_hidden_states(checkpoint: Checkpoint, target_hidden: int, hidden: int) -> int:
    """How many of the target's states the linear layer over the features reads."""
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


def _speculative_tokens(fields: Fields) -> int | None:
    """The number of draft tokens that a speculators config recommends."""
    methods = fields.nested("speculators_config").get("proposal_methods")
    if not isinstance(methods, list) or not methods or not isinstance(methods[0], dict):
        return None
    return Fields(methods[0]).optional_integer("speculative_tokens", 1)


def _base_model(fields: Fields) -> str | None:
    """The target that a speculators config names."""
    verifier = fields.nested("speculators_config").nested("verifier")
    return verifier.text("name_or_path") if verifier.get("name_or_path") else None


def _mask_token(fields: Fields) -> int:
    """The mask token of a P-EAGLE head."""
    for part in (fields.nested("dflash_config"), fields):
        for name in MASK_TOKEN_FIELDS:
            if part.get(name) is not None:
                return part.integer(name, 0)
    raise ValueError(f"the head predicts positions in parallel, but config.json has no {MASK_TOKEN_FIELDS[0]}")


def load_speculators_block(checkpoint: Checkpoint, layers: Layers | None, dtype: torch.dtype | None) -> BlockHead:
    """A DFlash head in the format of speculators; sliding layers are causal unless configured."""
    fields = Fields(checkpoint.config)
    of_layers = layer_fields(fields.nested("transformer_layer_config").values)
    if fields.get("projector_type") not in (None, "dflash"):
        raise ValueError(
            f"DFlash heads with projector_type {str(fields.get('projector_type'))[:40]!r} are not supported"
        )
    both_ways = fields.flag("sliding_window_non_causal")
    attention = tuple(
        BlockAttention() if window is None else BlockAttention(not both_ways, window, window_from_anchor=True)
        for _, window in _sliding(of_layers, count_layers(of_layers, head_names(checkpoint)))
    )
    options = {
        "block_size": fields.integer("block_size", 2),
        "mask_token_id": fields.integer("mask_token_id", 0),
        "first_proposing_position": 0 if fields.flag("sample_from_anchor") else 1,
        "aux_hidden_state_layers": layers or configured_layers(checkpoint.config),
        "base_model": _base_model(fields),
        "speculative_tokens": _speculative_tokens(fields),
    }
    return _load_block(checkpoint, fields, of_layers, attention, options, dtype)


def load_zlab_block(checkpoint: Checkpoint, layers: Layers | None, dtype: torch.dtype | None) -> BlockHead:
    """A DFlash head as z-lab publishes it, or a JetSpec head; `is_causal` or `causal_head` decide for all layers."""
    fields, of_layers = Fields(checkpoint.config), layer_fields(checkpoint.config)
    dflash = fields.nested("dflash_config")
    either = Fields(dflash.values, checkpoint.config)
    flags = ((dflash, "causal_head"), (dflash, "causal"), (fields, "is_causal"))
    causal = next((part.flag(name) for part, name in flags if part.get(name) is not None), None)
    num_layers = count_layers(of_layers, head_names(checkpoint))
    attention = tuple(
        BlockAttention(sliding if causal is None else causal, window)
        for sliding, window in _sliding(of_layers, num_layers)
    )
    target_layers = fields.optional_integer("num_target_layers", 1)
    layers = layers or configured_layers(checkpoint.config)
    if layers is None and target_layers is not None:
        layers = block_layers(target_layers, num_layers)
    options = {
        "block_size": either.integer("block_size", 2),
        "mask_token_id": either.integer("mask_token_id", 0),
        "aux_hidden_state_layers": layers,
        "num_target_layers": target_layers,
    }
    return _load_block(checkpoint, fields, of_layers, attention, options, dtype)


def _load_block(
    checkpoint: Checkpoint,
    fields: Fields,
    of_layers: Fields,
    attention: tuple[BlockAttention, ...],
    options: dict[str, Any],
    dtype: torch.dtype | None,
) -> BlockHead:
    names = head_names(checkpoint)
    layer = read_layer(of_layers, checkpoint, names, strict_bias=True)
    sizes = _sizes(checkpoint, fields, of_layers, layer, projects=True)
    config = BlockConfig(layer=layer, attention=attention, **sizes, **options)
    return build_head(BlockHead, config, checkpoint, names, dtype)


def _sliding(of_layers: Fields, num_layers: int) -> list[tuple[bool, int | None]]:
    """For each layer whether it is a sliding one, and its window; Qwen3 ignores the window if its use is off."""
    window = of_layers.optional_integer("sliding_window", 1) if of_layers.flag("use_sliding_window") else None
    types = of_layers.values.get("layer_types")
    if types is None:
        first = of_layers.optional_integer("max_window_layers") or 0
        types = ["sliding_attention" if window and layer >= first else "full_attention" for layer in range(num_layers)]
    valid = ("sliding_attention", "full_attention")
    if not isinstance(types, list) or len(types) != num_layers or not all(name in valid for name in types):
        raise ValueError(f"layer_types must name the attention of {num_layers} layers, got {str(types)[:80]!r}")
    return [(name == "sliding_attention", window if name == "sliding_attention" else None) for name in types]


class Format(NamedTuple):
    """A format of checkpoints: how it is recognised, and how it is loaded."""

    name: str
    recognises: Callable[[Checkpoint], bool]
    load: Load


def speculators_type(checkpoint: Checkpoint) -> str | None:
    """The type of a checkpoint in the speculators format; None for every other one."""
    name = checkpoint.config.get("speculators_model_type")
    return str(name) if name is not None else None


def is_medusa(checkpoint: Checkpoint) -> bool:
    """Whether it holds Medusa heads, which `hf_specgen.heads.load_medusa` reads."""
    model_type = checkpoint.config.get("model_type")
    return "medusa_num_heads" in checkpoint.config or model_type in ("medusa", MedusaConfig.model_type)


def holds_medusa(source: Source) -> bool:
    """Whether a folder or repository holds Medusa heads."""
    return any(source.file(name) for name in MEDUSA_FILES) or is_medusa(open_checkpoint(source))


def _is_eagle1(checkpoint: Checkpoint) -> bool:
    """Whether the layer reads a state made of embedding and feature, and so has no norms before its attention."""
    names = head_names(checkpoint).keys()
    norms = {"layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight", "hidden_norm.weight"}
    return names >= {"fc.weight", "layers.0.self_attn.q_proj.weight"} and not names & norms


def _is_eagle3(checkpoint: Checkpoint) -> bool:
    """Whether the first layer normalises embedding and feature side by side."""
    return "layers.0.hidden_norm.weight" in head_names(checkpoint)


def _is_block(checkpoint: Checkpoint) -> bool:
    """Whether features are projected and normalised once for all layers."""
    return {"fc.weight", "hidden_norm.weight"} <= checkpoint.tensors.keys()


FORMATS = (
    Format("speculators eagle3", lambda head: speculators_type(head) == "eagle3", load_eagle3),
    Format("speculators peagle", lambda head: speculators_type(head) == "peagle", load_eagle3),
    Format("speculators dflash", lambda head: speculators_type(head) == "dflash", load_speculators_block),
    Format("Gemma 4 assistant", is_assistant, load_assistant),
    Format("EAGLE-3 (original, SpecForge, ModelOpt, DeepSpec, P-EAGLE)", _is_eagle3, load_eagle3),
    Format("EAGLE-1, EAGLE-2, HASS", _is_eagle1, load_eagle1),
    Format("DFlash, JetSpec", _is_block, load_zlab_block),
)
"""All formats, in the order in which they are tried."""


def head_format(checkpoint: Checkpoint) -> Format:
    """The format of a checkpoint."""
    speculators = speculators_type(checkpoint)
    if is_medusa(checkpoint):
        raise ValueError("it holds Medusa heads, which hf_specgen.heads.load_medusa reads")
    if not checkpoint.tensors:
        raise ValueError(f"it has no tensors: none of {INDEX}, {SINGLE} and {PICKLED} is there")
    for candidate in FORMATS:
        is_named = speculators is None or candidate.name == f"speculators {speculators}"
        if is_named and candidate.recognises(checkpoint):
            return candidate
    content = f"tensors such as {sorted(checkpoint.tensors)[:3]}"
    if speculators:
        content = f"a speculators model of type {speculators[:40]!r}"
    raise ValueError(
        f"{content} are not a draft head of a known format; known are {'; '.join(format.name for format in FORMATS)}"
    )
