"""Writes draft heads in the formats of speculators (which vLLM serves), EAGLE and SGLang; Medusa heads in their own.

| head | `save_head` | `export_head(to="eagle")` | `export_head(to="sglang")` |
|---|---|---|---|
| EAGLE-1 | original | original | original |
| EAGLE-3 | speculators `eagle3` | original | SpecForge |
| P-EAGLE | speculators `peagle` | | |
| DFlash, DFlash2 | speculators `dflash`, `dflash2` | | z-lab |
| DSpark | speculators `dspark` | | SpecForge |
| JetSpec, Domino | z-lab | | z-lab |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specgen.heads.base import DraftHead
from hf_specgen.heads.block import BlockAttention, BlockConfig, BlockHead
from hf_specgen.heads.checkpoint import write_checkpoint
from hf_specgen.heads.dflash2 import FACTORS, DFlash2Head
from hf_specgen.heads.dspark import DominoHead, DSparkHead
from hf_specgen.heads.eagle import Eagle1Head, Eagle3Head, eagle_layers
from hf_specgen.heads.medusa import MedusaHeads, medusa_file

PROGRAMS = ("eagle", "sglang", "vllm")
MEDUSA_PROGRAMS = ("medusa", "tgi", "vllm")
Config = dict[str, Any]
LAYER_FIELDS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "mlp_bias"),
    *("rms_norm_eps", "hidden_act", "max_position_embeddings", "rope_parameters"),
)


def save_head(head: DraftHead, folder: str | Path) -> list[Path]:
    """Write Medusa heads in our format, and EAGLE and block heads as vLLM reads them; returns the files."""
    return _written(head, folder, "" if isinstance(head, MedusaHeads) else "vllm")


def export_head(head: DraftHead, folder: str | Path, to: str, target: PreTrainedModel | None = None) -> list[Path]:
    """Write a head in the layout that another program reads; returns the files.

    Args:
        head: an EAGLE, P-EAGLE or block head, or Medusa heads.
        folder: where to; it must not hold a config.json yet.
        to: "eagle" (the original implementation), "sglang" (the layouts of SpecForge and z-lab) or "vllm"; of Medusa
            heads "medusa" (v1 with output matrices of their own, else v2), "tgi" or "vllm".
        target: of Medusa heads whose files then hold its output matrix: shared by "vllm", and merged with LoRA.
    """
    programs = MEDUSA_PROGRAMS if isinstance(head, MedusaHeads) else PROGRAMS
    if to not in programs:
        raise ValueError(f"{type(head).__name__} cannot be written for {to!r}; choose {', '.join(programs)}")
    if (Path(folder) / "config.json").exists():
        raise ValueError(f"{folder} holds a config.json already; export to a folder of its own")
    return _written(head, folder, to, target)


def _written(head: DraftHead, folder: str | Path, to: str, target: PreTrainedModel | None = None) -> list[Path]:
    if isinstance(head, MedusaHeads):
        return write_checkpoint(folder, *medusa_file(head, to, target))
    config, is_flat_eagle3 = _config(head, to), isinstance(head, Eagle3Head) and to != "vllm"
    first = "midlayer." if is_flat_eagle3 else "layers.0."
    tensors = {name.replace("layers.0.", first): tensor for name, tensor in head.state_dict().items()}
    ids = tensors.pop("draft_to_target", None)
    if ids is None and is_flat_eagle3 and to == "sglang":  # SpecForge reads a mapping even if it is the identity
        ids = torch.arange(head.config.vocab_size)
    if ids is not None:
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    config["dtype"] = str(next(head.parameters()).dtype).removeprefix("torch.")
    if head.config.trained_length:
        config["trained_length"] = head.config.trained_length
    return write_checkpoint(folder, config, "model.safetensors", tensors)


def _config(head: DraftHead, to: str) -> Config:
    """The config of a head in the layout that a program reads."""
    if isinstance(head, Eagle1Head):
        return original_eagle1(head, to)
    if isinstance(head, Eagle3Head):
        return speculators_eagle(head) if to == "vllm" else flat_eagle3(head, to)
    if isinstance(head, BlockHead) and to != "eagle":
        return speculators_block(head) if to == "vllm" and fits_speculators(head) else zlab_block(head)
    raise ValueError(f"there is no layout of {type(head).__name__} for {to!r}")


def _refuse(unsupported: Mapping[str, bool], what: str) -> None:
    """Raise a `ValueError` that names those of the options that the head has and the format `what` lacks."""
    refused = [name for name, present in unsupported.items() if present]
    if refused:
        raise ValueError(f"{what} cannot express a head with {', '.join(refused)}")


def _layer_config(head: Eagle1Head | Eagle3Head | BlockHead) -> Config:
    """The layers as a Llama or Qwen3 config."""
    layer = head.config.layer
    some_biases = {"biases of queries, keys and values without the output's": layer.qkv_bias != layer.output_bias}
    _refuse({"layers of Gemma 4": layer.is_gemma} | some_biases, "a Llama or Qwen3 config")
    return {name: getattr(layer, name) for name in LAYER_FIELDS} | {
        "model_type": "qwen3" if layer.qk_norm else "llama",
        "num_hidden_layers": head.config.num_layers,
        "attention_bias": layer.qkv_bias,
        "tie_word_embeddings": False,
        "vocab_size": head.config.vocab_size,
    }


def _speculators(head: Eagle3Head | BlockHead, name: str, layer: Config, tokens: int) -> Config:
    """The fields that all speculators configs have; `tokens` are recommended if the head recommends no number."""
    config, kind = head.config, name.lower()
    methods = [{"proposal_type": "greedy", "speculative_tokens": config.speculative_tokens or tokens}]
    return {
        "architectures": [f"{name}DraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": methods,
            "verifier": {"name_or_path": config.base_model, "architectures": []},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None if config.target_hidden_size == config.hidden_size else config.target_hidden_size,
        "tie_word_embeddings": False,
    }


def _layer_ids(head: DraftHead, offset: int = 0) -> list[int] | None:
    """The auxiliary hidden states in a format that counts them from `hidden_states[offset]`."""
    layers = head.config.aux_hidden_state_layers
    return None if layers is None else [layer - offset for layer in layers]


def speculators_eagle(head: Eagle3Head) -> Config:
    """The config of an EAGLE-3 or P-EAGLE head in the format of speculators (`eagle3`, `peagle`)."""
    config = head.config
    _refuse({"a bias of fc": config.projection_bias, "no fc": not config.projects_features}, "speculators' format")
    parallel = config.mask_token_id is not None
    norms = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    own = {name: getattr(config, name) for name in norms} | {
        "eagle_aux_hidden_state_layer_ids": _layer_ids(head),
        "embed_requires_grad": parallel,
    }
    own |= {"mask_token_id": config.mask_token_id} if parallel else {}
    return _speculators(head, "PEagle" if parallel else "Eagle3", _layer_config(head), 5) | own


BLOCK_NAMES = {BlockHead: "DFlash", DFlash2Head: "DFlash2", DSparkHead: "DSpark", DominoHead: "Domino"}
"""Of the formats; all but Domino are types of speculators."""


def fits_speculators(head: BlockHead) -> bool:
    """Whether speculators has such a head: layers without a window, or with one and all of the same kind."""
    if isinstance(head, DominoHead) or _correction(head).keys() & FACTORS:
        return False
    sliding = set(head.config.attention) - {BlockAttention()}
    from_anchor = all(kind.window is not None and kind.window_from_anchor for kind in sliding)
    return from_anchor and len({kind.causal for kind in sliding}) < 2


def _correction(head: BlockHead) -> Config:
    """The fields that describe the correction by the path: those that its config adds to that of a plain block head."""
    values, plain = vars(head.config), {field.name for field in fields(BlockConfig)} - FACTORS
    added = [field for field in fields(head.config) if field.name not in plain]
    kept = [field.name for field in added if field.name not in FACTORS or values[field.name] != field.default]
    return {name: values[name] for name in kept}


def _sliding(head: BlockHead) -> Config:
    windows = {kind.window for kind in head.config.attention if kind.window is not None}
    if len(windows) > 1:
        raise ValueError(f"a config has one sliding window for all layers, but the head has {sorted(windows)}")
    types = ["full_attention" if kind.window is None else "sliding_attention" for kind in head.config.attention]
    return {"layer_types": types, "use_sliding_window": bool(windows), "sliding_window": next(iter(windows), None)}


def speculators_block(head: BlockHead) -> Config:
    """The config of a block head in the format of speculators (`dflash`, `dflash2`, `dspark`)."""
    config = head.config
    _refuse({"no norms of queries and keys": not config.layer.qk_norm}, "speculators' format")
    sliding = [kind for kind in config.attention if kind.window is not None]
    layer = _layer_config(head) | _sliding(head)
    own = {
        "aux_hidden_state_layer_ids": _layer_ids(head),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.first_proposing_position == 0,
        "sliding_window_non_causal": bool(sliding) and not sliding[0].causal,
    }
    return _speculators(head, BLOCK_NAMES[type(head)], layer, config.depth) | own | _correction(head)


def zlab_block(head: BlockHead) -> Config:
    """The config of a block head in the layout of z-lab, JetSpec and SpecForge."""
    config = head.config
    causal = {kind.causal for kind in config.attention}
    from_anchor = config.first_proposing_position == 0
    corrects = isinstance(head, DSparkHead | DominoHead)
    unsupported = {
        "windows counted from the anchor": any(kind.window_from_anchor for kind in config.attention),
        "layers of which only some are causal": len(causal) > 1,
        "a draft vocabulary or an output matrix of its own": config.own_lm_head,
        "no norms of queries and keys": not config.layer.qk_norm,
        "a token proposed by the anchor": from_anchor and not corrects,
        "a target of another hidden size": config.target_hidden_size != config.hidden_size,
        "unknown auxiliary hidden states": 0 in (config.aux_hidden_state_layers or (0,)),
    }
    _refuse(unsupported, "z-lab's layout")
    is_causal = causal == {True}
    dflash: Config = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": _layer_ids(head, offset=1),
    } | _correction(head)
    if corrects:
        dflash |= {"projector_type": BLOCK_NAMES[type(head)].lower(), "shift_label": from_anchor}
    layer = _flat(_layer_config(head)) | _sliding(head)
    return layer | {
        "architectures": [f"{BLOCK_NAMES[type(head)]}DraftModel"],
        "block_size": config.block_size,
        "is_causal": is_causal,
        "dflash_config": dflash | ({"causal_head": True} if is_causal else {}),
        "num_target_layers": config.num_target_layers,
    }


def _flat(layer: Config) -> Config:
    """A layer's config with the rotary parameters of Transformers 4, which these programs read."""
    flat = {name: value for name, value in layer.items() if name != "rope_parameters"}
    rope = dict(layer["rope_parameters"])
    flat["rope_theta"] = rope.pop("rope_theta")
    return flat | {"rope_scaling": None if rope["rope_type"] == "default" else rope}


def original_eagle1(head: Eagle1Head, to: str) -> Config:
    """The config of an EAGLE-1 or EAGLE-2 head in the original layout; others use the target's output matrix."""
    config, own = head.config, Config()
    unsupported = {"norms of queries and keys": config.layer.qk_norm, "MLP biases": config.layer.mlp_bias}
    if to != "vllm":
        unsupported["an output matrix of its own"] = config.own_lm_head
        unsupported["states of inner layers"] = config.aux_hidden_state_layers not in (
            None,
            (config.num_target_layers,),
        )
    _refuse(unsupported, "EAGLE's layout")
    if config.aux_hidden_state_layers is not None:
        own["eagle_aux_hidden_state_layer_ids"] = _layer_ids(head)
    layer = _flat(_layer_config(head)) | {"draft_vocab_size": config.draft_vocab_size}
    return layer | own | {"architectures": ["LlamaForCausalLM"], "bias": config.projection_bias}


def flat_eagle3(head: Eagle3Head, to: str) -> Config:
    """The config of an EAGLE-3 head in the original layout (`to="eagle"`) or that of SpecForge (`to="sglang"`)."""
    config = head.config
    layers = config.aux_hidden_state_layers
    default = config.num_target_layers and layers == eagle_layers(config.num_target_layers)
    unsupported = {
        "several layers": config.num_layers > 1,
        "norms of queries and keys": config.layer.qk_norm,
        "biases": config.layer.qkv_bias or config.layer.mlp_bias or config.projection_bias,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "norm_output": config.norm_output,
        "a mask token": config.mask_token_id is not None,
        "no fc": not config.projects_features,
        "no output matrix of its own": not config.own_lm_head,
    }
    if to == "eagle":
        unsupported["fc_norm"] = config.fc_norm  # and the original implementation reads three fixed states
        unsupported[f"aux_hidden_state_layers {layers} (export to sglang or vllm)"] = layers is not None and not default
    _refuse(unsupported, "EAGLE's layout" if to == "eagle" else "SpecForge's layout")
    result = _flat(_layer_config(head)) | {"draft_vocab_size": config.draft_vocab_size}
    if config.target_hidden_size != config.hidden_size:
        result["target_hidden_size"] = config.target_hidden_size
    if to == "eagle":
        return result | {"architectures": ["LlamaForCausalLM"]}
    result |= {"architectures": ["LlamaForCausalLMEagle3"], "fc_norm": config.fc_norm}
    if layers is not None:
        ids = _layer_ids(head, offset=1)
        result["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    return result
