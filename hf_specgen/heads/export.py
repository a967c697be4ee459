"""Writing Medusa heads in the formats that the original Medusa, TGI and vLLM read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from hf_specgen.heads.lora import load_lora, stacked_deltas
from hf_specgen.heads.medusa import MedusaHeads
from hf_specgen.targets.model_parts import output_matrix

FORMATS = ("medusa", "tgi", "vllm")
Tensors = dict[str, torch.Tensor]


def export_medusa(heads: MedusaHeads, folder: str | Path, to: str, target: PreTrainedModel | None = None) -> list[Path]:
    """Write heads in another program's format.

    Heads with LoRA matrices get their own output matrices: the target's, with each head's LoRA product added.

    Args:
        heads: as loaded.
        folder: where to; it must not hold a config.json.
        to: "medusa" (v2, or v1 if the heads have their own output matrices), "tgi" or "vllm".
        target: needed if its output matrix becomes part of the files: "vllm" with shared matrices, and heads with LoRA.

    Returns:
        the files written.

    Raises:
        ValueError: for an unknown format, heads that it cannot represent, or a missing target.
    """
    if to not in FORMATS:
        raise ValueError(f"unknown format {to!r}; use one of {', '.join(FORMATS)}")
    if heads.config.reads_token:
        raise ValueError(f"{to} cannot represent heads that read the next token (reads_token=True); train others")
    folder = Path(folder)
    if (folder / "config.json").exists():
        raise ValueError(f"{folder} holds a config.json already; export to another folder")
    outputs = _outputs(heads, target, to)
    writers = {"medusa": _medusa, "tgi": _tgi, "vllm": _vllm}
    folder.mkdir(parents=True, exist_ok=True)
    config, name, tensors = writers[to](heads, outputs, target)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}
    if name.endswith(".pt"):
        torch.save(tensors, folder / name)
    else:
        save_file(tensors, folder / name, metadata={"format": "pt"})
    return [folder / "config.json", folder / name]


def _outputs(heads: MedusaHeads, target: PreTrainedModel | None, to: str) -> list[torch.Tensor]:
    """The output matrix `[vocab, hidden]` of each head; an empty list if they share the target's."""
    if heads.config.own_outputs:
        return [head.weight for head in heads.lm_heads]  # type: ignore[misc]
    if heads.config.lora_rank:
        if target is None:
            raise ValueError(f"LoRA matrices are merged into the target's output matrix for {to}; give the target")
        matrix = _without_bias(target, to)
        down, up = stacked_deltas(load_lora(matrix, heads.config.num_heads, str(heads.name_or_path)))
        return [matrix.weight + (d @ u).T.to(matrix.weight) for d, u in zip(down, up, strict=True)]
    return []


def _without_bias(target: PreTrainedModel, to: str) -> torch.nn.Linear:
    matrix = output_matrix(target)
    if matrix.bias is not None:
        raise ValueError(f"{to} cannot represent the bias of the target's output matrix; export heads that share it")
    return matrix


def _layers(heads: MedusaHeads, pattern: str) -> Tensors:
    """The residual layers under other names; `pattern` is formatted with head, layer and kind of tensor."""
    tensors = {}
    for name, tensor in heads.blocks.state_dict().items():
        head, _, layer, kind = name.split(".")
        tensors[pattern.format(head, layer, kind)] = tensor
    return tensors


def _base_name(heads: MedusaHeads) -> Any:
    return (heads.config.base or {}).get("name_or_path")


def _medusa(
    heads: MedusaHeads, outputs: list[torch.Tensor], target: PreTrainedModel | None
) -> tuple[dict[str, Any], str, Tensors]:
    config = heads.config
    tensors = _layers(heads, "{}.{}.linear.{}")
    tensors |= {f"{head}.{config.num_layers}.weight": matrix for head, matrix in enumerate(outputs)}
    written = {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "base_model_name_or_path": _base_name(heads),
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
    }
    if outputs:
        return written, "medusa_lm_head.pt", tensors
    return written | {"version": "2"}, "medusa_lm_head.safetensors", tensors


def _tgi(
    heads: MedusaHeads, outputs: list[torch.Tensor], target: PreTrainedModel | None
) -> tuple[dict[str, Any], str, Tensors]:
    if not outputs and heads.config.num_layers != 1:
        raise ValueError(
            f"TGI reads heads that share the output matrix with one layer only, these have {heads.config.num_layers}"
        )
    config, _, tensors = _medusa(heads, outputs, target)
    return config, "medusa_lm_head.safetensors", tensors


def _vllm(
    heads: MedusaHeads, outputs: list[torch.Tensor], target: PreTrainedModel | None
) -> tuple[dict[str, Any], str, Tensors]:
    if not outputs and target is None:
        raise ValueError("vLLM's files hold the output matrix, which these heads share; give the target")
    config = heads.config
    tensors = _layers(heads, "blocks.{}.layers.{}.{}")
    if outputs:
        tensors |= {f"lm_heads.{head}.weight": matrix for head, matrix in enumerate(outputs)}
    elif target is not None:
        tensors["lm_head.weight"] = _without_bias(target, "vllm").weight
    return (
        {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "truncated_vocab_size": config.vocab_size,
            "num_heads": config.num_heads,
            "num_hidden_layers": config.num_layers,
            "medusa_fc_bias": True,
            "original_lm_head": not outputs,
            "base_model_name_or_path": _base_name(heads),
        },
        "model.safetensors",
        tensors,
    )
