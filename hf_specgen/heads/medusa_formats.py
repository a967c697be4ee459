"""Reads and writes Medusa heads in every format that is found on the Hub.

| format | file | tensors |
|---|---|---|
| our own | model.safetensors | as in `MedusaHeads` |
| Medusa v1, TGI | medusa_lm_head.pt, .safetensors | `{head}.{layer}.linear.weight`, `.bias`; `{head}.{layers}.weight` |
| Medusa v2, TGI | medusa_lm_head.safetensors | `{head}.{layer}.linear.weight`, `.bias` |
| vLLM | model.safetensors | `blocks.{head}.layers.{layer}.weight`, `.bias`; `lm_heads.{head}.weight`; `token_map` |

In all but our own format heads and layers are counted in the tensors, which are checked before a module is built.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from transformers import PreTrainedModel

from hf_specgen.heads.checkpoint import (
    CONFIG,
    INDEX,
    SINGLE,
    Checkpoint,
    Fields,
    Names,
    Source,
    TensorInfo,
    checkpoint_tensors,
    first_line,
    offline_hint,
    open_checkpoint,
    read_json,
    tensor_infos,
    write_checkpoint,
)
from hf_specgen.heads.head_file import Format
from hf_specgen.heads.lora import load_lora, stacked_deltas
from hf_specgen.heads.medusa import MedusaConfig, MedusaHeads, check_heads
from hf_specgen.targets.model_parts import output_matrix

Shape = tuple[int, ...]
MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
"""Files that only Medusa heads have; some come without a config."""
PROGRAMS = ("medusa", "tgi", "vllm")
"""Other programs whose formats can be written."""
LAYER = re.compile(r"^(?:medusa_heads?\.)?(\d+)\.(\d+)\.linear\.(weight|bias)$")
OUTPUT = re.compile(r"^(?:medusa_heads?\.)?(\d+)\.(\d+)\.weight$")
VLLM_LAYER = re.compile(r"^(?:medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")
VLLM_OUTPUT = re.compile(r"^(?:medusa_heads\.)?lm_heads\.(\d+)\.weight$")


def is_medusa(checkpoint: Checkpoint) -> bool:
    """Whether the config is that of Medusa heads."""
    model_type = checkpoint.config.get("model_type")
    return "medusa_num_heads" in checkpoint.config or model_type in ("medusa", MedusaConfig.model_type)


def holds_medusa(source: Source) -> bool:
    """Whether a folder or repository holds Medusa heads."""
    return any(source.file(name) for name in MEDUSA_FILES) or is_medusa(open_checkpoint(source))


FORMATS = (Format("Medusa heads", "MedusaCandidates", is_medusa, None, "hf_specgen.heads.load_medusa"),)


class MedusaCheckpoint(NamedTuple):
    """A set of heads on disk, checked but not loaded."""

    config: MedusaConfig
    checkpoint: Checkpoint
    names: Names


def load_medusa(path_or_id: str | Path, target: PreTrainedModel | None = None) -> MedusaHeads:
    """Load heads from a folder or a repository of the Hub: on the CPU, in the dtype of the file.

    Args:
        path_or_id: where they are.
        target: the model that they draft for; if given, the heads are checked against it before they are loaded.
    """
    config, checkpoint, names = inspect_medusa(path_or_id)
    if target is not None:
        config.vocab_size = config.vocab_size or output_matrix(target).out_features  # Medusa v2 does not state it
        check_heads(config, target, f"the set of heads {checkpoint.source!r}")
    tensors = checkpoint.read(names.values())
    state = {ours: tensors[name] for ours, name in names.items()}
    tokens = state.pop("token_map", torch.zeros(0)).long()
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < config.vocab_size:
        raise ValueError(f"{checkpoint.source}: token_map has tokens outside of the vocabulary of {config.vocab_size}")
    for name, tensor in state.items():
        if name.startswith("lm_heads.") and len(tokens) and len(tensor) != len(tokens):
            state[name] = tensor[tokens]
    dtypes = {tensor.dtype for tensor in state.values()}
    if not all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in dtypes):
        raise ValueError(
            f"{checkpoint.source}: its tensors do not make a whole set of heads: they have the dtypes "
            f"{', '.join(sorted(map(str, dtypes)))}, of which not all are supported"
        )
    if len(tokens):
        state["token_map"] = tokens
    with torch.device("meta"):
        heads = MedusaHeads(config)
    for name, tensor in heads.state_dict().items():
        if name not in state:  # `medusa_fc_bias=False` of vLLM
            state[name] = torch.zeros(tensor.shape, dtype=next(iter(dtypes)))
    heads.load_state_dict(state, assign=True)
    return heads.eval()


def inspect_medusa(path_or_id: str | Path) -> MedusaCheckpoint:
    """Read a set of heads' config and the shapes of its tensors, without building or loading anything."""
    source = Source(str(path_or_id))
    path = source.file(CONFIG)
    fields = {} if path is None else read_json(path)
    own = fields.get("model_type") == MedusaConfig.model_type
    infos = _medusa_tensors(source)
    names = {name: name for name in infos} if own else native_names(infos)
    if not any(name.startswith("blocks.") for name in names):
        raise ValueError(f"{source}: no Medusa layers among its tensors {sorted(infos)[:3]}; use another checkpoint")
    shapes = {ours: infos[name].shape for ours, name in names.items()}
    try:
        config = _own_config(fields) if own else _counted_config(fields, shapes)
        config.name_or_path = str(source)
        _check_shapes(config, shapes, biases_required=own)
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{source}: its tensors do not make a whole set of heads: {first_line(error)}") from None
    return MedusaCheckpoint(config, Checkpoint(str(source), fields, infos), names)


def _medusa_tensors(source: Source) -> dict[str, TensorInfo]:
    """The tensors in the file that only Medusa heads have, else those of an ordinary checkpoint."""
    for name in MEDUSA_FILES:
        if (path := source.file(name)) is not None:
            return tensor_infos(path)
    infos = checkpoint_tensors(source)
    if not infos:
        files = ", ".join((*MEDUSA_FILES, SINGLE, INDEX))
        raise FileNotFoundError(
            f"{source} has no Medusa heads: none of {files} is there{offline_hint(source.path_or_id)}"
        )
    return infos


def native_names(names: Iterable[str]) -> Names:
    """The tensors of another program's format by their names in `MedusaHeads`; other tensors are left out."""
    native: Names = {}
    for name in names:
        if match := LAYER.match(name) or VLLM_LAYER.match(name):
            native[f"blocks.{int(match[1])}.layers.{int(match[2])}.{match[3]}"] = name
        elif match := OUTPUT.match(name) or VLLM_OUTPUT.match(name):
            native[f"lm_heads.{int(match[1])}.weight"] = name
        elif name == "token_map":
            native[name] = name
    outputs = [name for name in native if name.startswith("lm_heads.")]
    if outputs == ["lm_heads.0.weight"] and "token_map" in native:  # vLLM's `original_lm_head`: one for all heads
        return native | {f"lm_heads.{head}.weight": native[outputs[0]] for head in range(_count(native, 1))}
    if [name for name in native if name.startswith("lm_heads.")] == ["lm_heads.0.weight"] and _count(native, 1) > 1:
        del native["lm_heads.0.weight"]  # vLLM's `original_lm_head`: the one matrix is the target's
    return native


def _own_config(fields: dict[str, Any]) -> MedusaConfig:
    """From a config in our format: of its fields only those that describe heads, which `MedusaConfig` checks."""
    return MedusaConfig(**{name: fields[name] for name in MedusaConfig.__annotations__ if name in fields})


def _counted_config(fields: dict[str, Any], state: dict[str, Shape]) -> MedusaConfig:
    """From the shapes of tensors under the names of `MedusaHeads`; a config states at most the vocabulary's size."""
    own = any(name.startswith("lm_heads.") for name in state)
    hidden = state.get("blocks.0.layers.0.weight", ())
    output = state.get("lm_heads.0.weight", ()) if own else (int(fields.get("vocab_size") or 0), 0)
    if len(hidden) != 2 or len(output) != 2:
        raise ValueError("head 0 has no weight matrix")
    base, kept = fields.get("base_model_name_or_path"), state.get("token_map", ())
    vocab, truncated = (fields.get(name) or output[0] for name in ("vocab_size", "truncated_vocab_size"))
    if truncated != (kept[0] if kept else vocab) and "truncated_vocab_size" in fields:
        raise ValueError(f"truncated_vocab_size is {truncated}, but token_map has {kept} and vocab_size is {vocab}")
    return MedusaConfig(
        hidden_size=hidden[1],
        vocab_size=vocab if kept else output[0],
        draft_vocab_size=kept[0] if kept else 0,
        logit_scale=Fields(fields, {"logit_scale": 1.0}).number("logit_scale"),
        num_heads=_count(state, 1),
        num_layers=_count(state, 3),
        own_outputs=own,
        base={"name_or_path": base} if isinstance(base, str) else None,
    )


def _check_shapes(config: MedusaConfig, shapes: dict[str, Shape], biases_required: bool) -> None:
    """Raise unless the tensors are those of `config`: first their number, so that it cannot make endless modules."""
    if config.hidden_size not in (width := shapes.get("blocks.0.layers.0.weight", ())):
        raise ValueError(f"hidden_size is {config.hidden_size}, but tensor 'blocks.0.layers.0.weight' is {width}")
    for name, part in (("num_heads", 1), ("num_layers", 3)):
        count = _count(shapes, part)
        if getattr(config, name) != count:
            raise ValueError(f"{name} is {getattr(config, name)}, but there are tensors for {count}")
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in MedusaHeads(config).state_dict().items()}
    has_biases = biases_required or any(name.endswith(".bias") for name in shapes)
    for name in sorted({*expected, *shapes}):
        optional = name.endswith(".bias") and not has_biases and name not in shapes
        # vLLM takes the rows of `token_map` from matrices for the whole vocabulary.
        is_whole = config.draft_vocab_size > 0 and shapes.get(name) == (config.vocab_size, config.hidden_size)
        sliced = name.startswith("lm_heads.") and is_whole
        if not optional and not sliced and expected.get(name) != shapes.get(name):
            raise ValueError(
                f"tensor {name[:120]!r} should be {expected.get(name, 'absent')}, but is {shapes.get(name, 'absent')}"
            )


def _count(names: Iterable[str], part: int) -> int:
    """How many different heads (part 1) or layers (part 3) the names of the blocks have."""
    return len({name.split(".")[part] for name in names if name.startswith("blocks.")})


def export_medusa(heads: MedusaHeads, folder: str | Path, to: str, target: PreTrainedModel | None = None) -> list[Path]:
    """Write heads in another program's format; returns the files. LoRA is merged into output matrices.

    Args:
        heads: as loaded.
        folder: where to; it must not hold a config.json.
        to: "medusa" (v2, or v1 if the heads have their own output matrices), "tgi" or "vllm".
        target: needed if its output matrix becomes part of the files: "vllm" with shared matrices, and heads with LoRA.
    """
    if to not in PROGRAMS:
        raise ValueError(f"unknown format {to!r}; use one of {', '.join(PROGRAMS)}")
    if heads.config.reads_token:
        raise ValueError(f"{to} cannot represent heads that read the next token (reads_token=True); train others")
    if heads.config.draft_vocab_size and to != "vllm":
        raise ValueError(f"{to} cannot represent heads with a truncated vocabulary; export them to vllm")
    folder = Path(folder)
    if (folder / "config.json").exists():
        raise ValueError(f"{folder} holds a config.json already; export to another folder")
    outputs = _outputs(heads, target, to)
    return write_checkpoint(folder, *(_vllm(heads, outputs, target) if to == "vllm" else _medusa(heads, outputs, to)))


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


def _layers(heads: MedusaHeads, pattern: str) -> dict[str, torch.Tensor]:
    """The residual layers under other names; `pattern` is formatted with head, layer and kind of tensor."""
    tensors = {}
    for name, tensor in heads.blocks.state_dict().items():
        head, _, layer, kind = name.split(".")
        tensors[pattern.format(head, layer, kind)] = tensor
    return tensors


def _base_name(heads: MedusaHeads) -> Any:
    return (heads.config.base or {}).get("name_or_path")


def _medusa(
    heads: MedusaHeads, outputs: list[torch.Tensor], to: str
) -> tuple[dict[str, Any], str, dict[str, torch.Tensor]]:
    """Config, file and tensors in the formats of Medusa v1 (own output matrices), v2 (shared) and TGI."""
    config = heads.config
    if to == "tgi" and not outputs and config.num_layers != 1:
        raise ValueError(
            f"TGI reads heads that share the output matrix with one layer only, these have {config.num_layers}"
        )
    tensors = _layers(heads, "{}.{}.linear.{}")
    tensors |= {f"{head}.{config.num_layers}.weight": matrix for head, matrix in enumerate(outputs)}
    written = {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "base_model_name_or_path": _base_name(heads),
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
    } | ({} if outputs else {"version": "2"})
    return written, "medusa_lm_head.pt" if outputs and to == "medusa" else "medusa_lm_head.safetensors", tensors


def _vllm(
    heads: MedusaHeads, outputs: list[torch.Tensor], target: PreTrainedModel | None
) -> tuple[dict[str, Any], str, dict[str, torch.Tensor]]:
    if not outputs and target is None:
        raise ValueError("vLLM's files hold the output matrix, which these heads share; give the target")
    config = heads.config
    tensors = _layers(heads, "blocks.{}.layers.{}.{}")
    if outputs:
        tensors |= {f"lm_heads.{head}.weight": matrix for head, matrix in enumerate(outputs)}
        if config.draft_vocab_size:
            tensors["token_map"] = cast(torch.Tensor, heads.token_map)
    elif target is not None:
        tensors["lm_head.weight"] = _without_bias(target, "vllm").weight
    return (
        {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "truncated_vocab_size": config.draft_vocab_size or config.vocab_size,
            "logit_scale": config.logit_scale,
            "num_heads": config.num_heads,
            "num_hidden_layers": config.num_layers,
            "medusa_fc_bias": True,
            "original_lm_head": not outputs,
            "base_model_name_or_path": _base_name(heads),
        },
        "model.safetensors",
        tensors,
    )
