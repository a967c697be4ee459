"""Writes draft heads in the formats of speculators (which vLLM serves), EAGLE and SGLang; Medusa heads in their own.

| head | `save_head`, `export_head(to="vllm")` | `export_head(to="eagle")` | `export_head(to="sglang")` |
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
from hf_specgen.heads.checkpoint import MASK_EMBEDDING, write_checkpoint
from hf_specgen.heads.dflash2 import NOT_IN_SPECULATORS, DFlash2Head
from hf_specgen.heads.dspark import DominoHead, DSparkHead
from hf_specgen.heads.eagle import Eagle1Head, Eagle3Head, EagleConfig, eagle_layers
from hf_specgen.heads.layer_options import PAIR_FLAGS
from hf_specgen.heads.medusa import MedusaHeads, medusa_file

PROGRAMS = ("eagle", "sglang", "vllm")
MEDUSA_PROGRAMS = ("medusa", "tgi", "vllm")
Config = dict[str, Any]
LAYER_FIELDS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "mlp_bias"),
    *("rms_norm_eps", "hidden_act", "max_position_embeddings", "rope_parameters"),
)
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
BLOCK_NAMES = {BlockHead: "DFlash", DFlash2Head: "DFlash2", DSparkHead: "DSpark", DominoHead: "Domino"}
"""Of the formats; all but Domino are types of speculators."""
CARD = """---
{metadata}
---

A draft head ({kind}) for speculative decoding of {target} in Transformers, for which alone it was trained
(`pip install hf-specgen`):

```python
from hf_specgen import AutoCandidates

model.generate(**inputs, candidate_generator={use})
```
"""
"""The model card; whoever publishes a head adds its license."""


def save_head(head: DraftHead, folder: str | Path, base_model: str | None = None) -> list[Path]:
    """Write Medusa heads in our format, other heads as `export_head(to="vllm")`; a config.json is replaced.

    Args:
        head: any draft head.
        folder: where to. It gets a model card for the Hub, README.md, unless it has one.
        base_model: id of the target for the card.
    """
    files = _written(head, folder, "" if isinstance(head, MedusaHeads) else "vllm")
    card = Path(folder) / "README.md"
    if not card.exists():
        target = [f"base_model: {base_model}"] if base_model else []
        metadata = ["library_name: hf-specgen", "tags: [speculative-decoding]", *target]
        use = f'AutoCandidates.from_pretrained("org/{Path(folder).resolve().name}")'
        text = CARD.format(
            metadata="\n".join(metadata), kind=type(head).__name__, target=base_model or "its target", use=use
        )
        card.write_text(text, encoding="utf-8")
        files.append(card)
    return files


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
    if isinstance(head, Eagle1Head):
        config = _eagle1(head, to)
    elif isinstance(head, Eagle3Head):
        config = _speculators(head) if to == "vllm" else _eagle3(head, to)
    elif isinstance(head, BlockHead) and type(head) in BLOCK_NAMES and to != "eagle":
        config = _speculators(head) if to == "vllm" and _fits_speculators(head) else _zlab(head)
    else:
        raise ValueError(f"there is no layout of {type(head).__name__} for {to!r}")
    is_flat_eagle3 = isinstance(head, Eagle3Head) and to != "vllm"
    first = "midlayer." if is_flat_eagle3 else "layers.0."
    tensors = {name.replace("layers.0.", first): tensor for name, tensor in head.state_dict().items()}
    ids = tensors.pop("draft_to_target", None)
    mask = tensors.pop("mask_embedding", None)
    if ids is None and is_flat_eagle3 and to == "sglang":  # SpecForge reads a mapping even if it is the identity
        ids = torch.arange(head.config.vocab_size)
    if ids is not None:
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    config["dtype"] = str(next(head.parameters()).dtype).removeprefix("torch.")
    for name in ("trained_length", "num_target_layers"):
        if (value := getattr(head.config, name)) is not None:
            config[name] = value
    paths = write_checkpoint(folder, config, "model.safetensors", tensors)
    if mask is not None:
        paths.append(Path(folder) / MASK_EMBEDDING)
        torch.save({"mask_token_id": head.config.mask_token_id, "embedding": mask}, paths[-1])
    return paths


def _refuse(unsupported: Mapping[str, bool], what: str) -> None:
    """Raise a `ValueError` that names those of the options that the head has and the format `what` lacks."""
    refused = [name for name, present in unsupported.items() if present]
    if refused:
        raise ValueError(f"{what} cannot express a head with {', '.join(refused)}")


def _layers(head: Eagle1Head | Eagle3Head | BlockHead) -> Config:
    """The layers as a Llama or Qwen3 config."""
    layer = head.config.layer
    some_biases = {"biases of queries, keys and values without the output's": layer.qkv_bias != layer.output_bias}
    kinds = {"layers of Gemma 4": layer.is_gemma, "multi-head latent attention": layer.kv_lora_rank > 0}
    _refuse(kinds | some_biases, "a Llama or Qwen3 config")
    result: Config = {name: getattr(layer, name) for name in LAYER_FIELDS} | {
        "model_type": "qwen3" if layer.qk_norm else "llama",
        "num_hidden_layers": len(head.layers),
        "attention_bias": layer.qkv_bias,
        "tie_word_embeddings": False,
        "vocab_size": head.config.vocab_size,
    }
    if layer.swiglu_limit:
        result |= {"hidden_act": "swigluoai", "swiglu_alpha": layer.swiglu_alpha, "swiglu_limit": layer.swiglu_limit}
    if not isinstance(head, BlockHead):
        scaled = head.config.input_embedding_scale != 1.0 or head.config.final_logit_softcapping is not None
        _refuse({"attention sinks": layer.attention_sinks, "scaled embeddings or capped logits": scaled}, "its layout")
        factor = head.config.output_multiplier
        return result if factor == 1.0 else result | {"logit_scale": factor}
    attention = head.config.attention
    windows = {kind.window for kind in attention if kind.window is not None}
    if len(windows) > 1:
        raise ValueError(f"a config has one sliding window for all layers, but the head has {sorted(windows)}")
    types = ["full_attention" if kind.window is None else "sliding_attention" for kind in attention]
    result |= {"layer_types": types, "use_sliding_window": bool(windows)}
    if not head.config.pairs_undecided:  # weights are kept in the order of halves
        result[PAIR_FLAGS[0]] = True
    return result | {"sliding_window": next(iter(windows), None)}


def _flat(head: Eagle1Head | Eagle3Head | BlockHead) -> Config:
    """The layers with the rotary parameters of Transformers 4, which other programs than vLLM read."""
    layers = _layers(head)
    rope = dict(layers.pop("rope_parameters"))
    theta = {"rope_theta": rope.pop("rope_theta")}
    return layers | theta | {"rope_scaling": None if rope == {"rope_type": "default"} else rope}


def _layer_ids(head: DraftHead, offset: int = 0) -> list[int] | None:
    """The auxiliary hidden states in a format that counts them from `hidden_states[offset]`."""
    layers = head.config.aux_hidden_state_layers
    return None if layers is None else [layer - offset for layer in layers]


def _speculators(head: Eagle3Head | BlockHead) -> Config:
    """The config in the format of speculators (`eagle3`, `peagle`, `dflash`, `dflash2`, `dspark`)."""
    config = head.config
    if isinstance(config, EagleConfig):
        _refuse({"a bias of fc": config.projection_bias, "no fc": not config.projects_features}, "speculators' format")
        is_parallel = config.mask_token_id is not None
        tokens = 5
        name = "PEagle" if is_parallel else "Eagle3"
        own: Config = {name: getattr(config, name) for name in NORMS}
        own |= {"eagle_aux_hidden_state_layer_ids": _layer_ids(head), "embed_requires_grad": is_parallel}
        own |= {"mask_token_id": config.mask_token_id} if is_parallel else {}
    else:
        _refuse({"no norms of queries and keys": not config.layer.qk_norm}, "speculators' format")
        name = BLOCK_NAMES[type(head)]
        tokens = config.depth
        sliding = [kind for kind in config.attention if kind.window is not None]
        own = {
            "aux_hidden_state_layer_ids": _layer_ids(head),
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "sample_from_anchor": config.first_proposing_position == 0,
            "sliding_window_non_causal": bool(sliding) and not sliding[0].causal,
        } | _correction(config)
    method = {"proposal_type": "greedy", "speculative_tokens": config.speculative_tokens or tokens}
    return {
        "architectures": [f"{name}DraftModel"],
        "speculators_model_type": name.lower(),
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": name.lower(),
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": config.base_model, "architectures": []},
        },
        "transformer_layer_config": _layers(head),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None if config.target_hidden_size == config.hidden_size else config.target_hidden_size,
        "tie_word_embeddings": False,
    } | own


def _fits_speculators(head: BlockHead) -> bool:
    """Whether speculators has such a head: layers without a window, or with one and all of the same kind."""
    sliding = set(head.config.attention) - {BlockAttention()}
    from_anchor = all(kind.window is not None and kind.window_from_anchor for kind in sliding)
    is_known = not isinstance(head, DominoHead) and not _correction(head.config).keys() & NOT_IN_SPECULATORS
    layer = head.config.layer
    is_known = is_known and not (layer.attention_sinks or layer.swiglu_limit or head.config.has_mask_embedding)
    return is_known and from_anchor and len({kind.causal for kind in sliding}) < 2


def _correction(config: BlockConfig) -> Config:
    """The fields that describe the correction by the path: those that its config adds to that of a plain block head."""
    plain = {field.name for field in fields(BlockConfig)} - NOT_IN_SPECULATORS
    added = {field.name: field.default for field in fields(config) if field.name not in plain}
    values = {name: getattr(config, name) for name in added}
    return {name: value for name, value in values.items() if name not in NOT_IN_SPECULATORS or value != added[name]}


def _zlab(head: BlockHead) -> Config:
    """The config of a block head in the layout of z-lab, JetSpec and SpecForge."""
    config = head.config
    name = BLOCK_NAMES[type(head)]
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
    ids = {"mask_token_id": config.mask_token_id, "target_layer_ids": _layer_ids(head, offset=1)}
    dflash: Config = ids | _correction(config)
    if config.layer.attention_sinks:
        dflash["attention_sink_bias"] = True
    if corrects:
        dflash |= {"projector_type": name.lower(), "shift_label": from_anchor}
    if causal == {True}:
        dflash["causal_head"] = True
    return _flat(head) | {
        "architectures": [f"{name}DraftModel"],
        "block_size": config.block_size,
        "is_causal": causal == {True},
        "dflash_config": dflash,
    }


def _eagle1(head: Eagle1Head, to: str) -> Config:
    """The config of an EAGLE-1 or EAGLE-2 head in the original layout; others use the target's output matrix."""
    config = head.config
    own = Config()
    unsupported = {"norms of queries and keys": config.layer.qk_norm, "MLP biases": config.layer.mlp_bias}
    if to != "vllm":
        inner = config.aux_hidden_state_layers not in (None, (config.num_target_layers,))
        unsupported |= {"an output matrix of its own": config.own_lm_head, "states of inner layers": inner}
    _refuse(unsupported, "EAGLE's layout")
    if config.aux_hidden_state_layers is not None:
        own["eagle_aux_hidden_state_layer_ids"] = _layer_ids(head)
    own |= {"architectures": ["LlamaForCausalLM"], "bias": config.projection_bias}
    return _flat(head) | {"draft_vocab_size": config.draft_vocab_size} | own


def _eagle3(head: Eagle3Head, to: str) -> Config:
    """The config of an EAGLE-3 head in the original layout (`to="eagle"`) or that of SpecForge (`to="sglang"`)."""
    config = head.config
    layers = head.config.aux_hidden_state_layers
    unsupported = {
        "several layers": config.num_layers > 1,
        "norms of queries and keys": config.layer.qk_norm,
        "biases": config.layer.qkv_bias or config.layer.mlp_bias or config.projection_bias,
        **{name: getattr(config, name) for name in NORMS if name != "fc_norm"},
        "a mask token": config.mask_token_id is not None,
        "no fc": not config.projects_features,
        "no output matrix of its own": not config.own_lm_head,
    }
    if to == "eagle":  # the original implementation reads three fixed states
        default = config.num_target_layers and layers == eagle_layers(config.num_target_layers)
        unsupported["fc_norm"] = config.fc_norm
        unsupported[f"aux_hidden_state_layers {layers} (export to sglang or vllm)"] = layers is not None and not default
    _refuse(unsupported, "EAGLE's layout" if to == "eagle" else "SpecForge's layout")
    result = _flat(head) | {"draft_vocab_size": config.draft_vocab_size}
    if config.target_hidden_size != config.hidden_size:
        result["target_hidden_size"] = config.target_hidden_size
    if to == "eagle":
        return result | {"architectures": ["LlamaForCausalLM"]}
    result |= {"architectures": ["LlamaForCausalLMEagle3"], "fc_norm": config.fc_norm}
    if layers is not None:
        ids = _layer_ids(head, offset=1)
        result["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    return result
