"""The table of checkpoint formats of draft heads, and `load_head`.

| layout | config.json | tensors |
|---|---|---|
| EAGLE-1/2, HASS | a Llama config | `fc` [H, 2H], `layers.0.*` without its first norm |
| EAGLE-3; SpecForge, ModelOpt, DeepSpec | Llama, Qwen3 or Gemma 4 | `fc` [H, states * H], `midlayer.*` or `layers.*` |
| P-EAGLE | the same, with a mask token | the same and `mask_hidden` |
| speculators `eagle3`, `peagle` | nested, with `transformer_layer_config` | `fc`, `layers.*` |
| DFlash of z-lab, JetSpec | a Qwen3 config with `dflash_config` | `fc`, `hidden_norm`, `layers.*` |
| speculators `dflash` | nested, with `transformer_layer_config` | the same |
| DSpark, DFlash2, Domino | as one of the two, with further fields | the same and those of the correction |
| Gemma 4 assistant | `text_config` | `model.layers.*` without keys and values |
| MTP layers, Medusa heads | of the target; any or none | see `hf_specgen.heads.mtp` and `medusa` |

A further format is a file like `hf_specgen.heads.block`, and an entry in `FORMATS`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import safe_open

from hf_specgen.heads import config_keys
from hf_specgen.heads.base import DraftHead
from hf_specgen.heads.block import block_type, load_block
from hf_specgen.heads.checkpoint import (
    INDEX,
    PICKLED,
    SINGLE,
    Checkpoint,
    Fields,
    TensorInfo,
    base_of_adapter,
    merge_adapter,
    named_errors,
    open_checkpoint,
)
from hf_specgen.heads.dflash2 import load_dflash2
from hf_specgen.heads.dspark import load_domino, load_dspark
from hf_specgen.heads.eagle import load_eagle1, load_eagle3
from hf_specgen.heads.gemma_assistant import is_assistant, load_assistant
from hf_specgen.heads.head_file import HeadFile
from hf_specgen.heads.medusa import is_medusa, load_medusa
from hf_specgen.heads.mtp import has_mtp_layers
from hf_specgen.heads.source import Source, first_line

NORM_OF_STATES = "layers.0.hidden_norm.weight"
"""Only the first layer of EAGLE-3 normalises embedding and state beside each other."""


class Format(NamedTuple):
    """A format of checkpoints."""

    name: str  # as in messages
    strategy: str  # the class of `hf_specgen.candidates` that drafts with it
    load: Callable[[HeadFile], DraftHead] | None  # None: it is read together with its target
    recognises: Callable[[HeadFile], bool]  # a checkpoint of this format that is not of speculators
    kind: str = ""  # the type that speculators calls it
    keys: Set[str] = config_keys.HEAD  # that are read in the config beside those of the layers


FORMATS = (
    Format("Medusa heads", "MedusaCandidates", load_medusa, is_medusa, keys=config_keys.MEDUSA),
    Format("MTP layers", "MTPCandidates", None, lambda file: has_mtp_layers(file.checkpoint), "mtp"),
    Format(
        "P-EAGLE",
        "PEagleCandidates",
        load_eagle3,
        lambda file: file.has(NORM_OF_STATES, "mask_hidden"),
        "peagle",
        config_keys.EAGLE3,
    ),
    Format(
        "EAGLE-3", "EagleCandidates", load_eagle3, lambda file: file.has(NORM_OF_STATES), "eagle3", config_keys.EAGLE3
    ),
    Format(
        "DSpark",
        "DFlashCandidates",
        load_dspark,
        lambda file: block_type(file) == "dspark",
        "dspark",
        config_keys.DSPARK,
    ),
    Format(
        "DFlash2",
        "DFlashCandidates",
        load_dflash2,
        lambda file: block_type(file) == "dflash2",
        "dflash2",
        config_keys.DFLASH2,
    ),
    Format(
        "Domino", "DFlashCandidates", load_domino, lambda file: block_type(file) == "domino", keys=config_keys.DOMINO
    ),
    Format(
        "DFlash, JetSpec",
        "DFlashCandidates",
        load_block,
        lambda file: block_type(file) is not None,
        "dflash",
        config_keys.BLOCK,
    ),
    Format(
        "EAGLE-1, EAGLE-2, HASS",
        "EagleCandidates",
        load_eagle1,
        lambda file: file.has("fc.weight", "layers.0.self_attn.q_proj.weight"),
        keys=config_keys.EAGLE1,
    ),
    Format(
        "Gemma 4 assistant",
        "GemmaAssistantCandidates",
        load_assistant,
        is_assistant,
        keys=config_keys.ASSISTANT,
    ),
)
"""All formats, in the order in which they are tried."""


def load_head(
    path_or_id: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    subfolder: str | None = None,
    cache_dir: str | Path | None = None,
    dtype: torch.dtype | None = None,
) -> DraftHead:
    """Load a draft head; its format is recognised by config.json and the names of the tensors.

    A LoRA adapter of a head is merged into the head that its config names.

    Args:
        path_or_id: a folder, or the id of a Hub repository.
        revision, token, subfolder, cache_dir: as for `from_pretrained`.
        dtype: of the head; None for the dtype of the file.

    Returns:
        The head, on the CPU, frozen, in evaluation mode; `head.bind(target)` makes it ready to draft.
    """
    cache = None if cache_dir is None else str(cache_dir)
    source = Source(os.path.expanduser(path_or_id), revision, token, subfolder, cache)
    if (base := base_of_adapter(source)) is not None:
        head = load_head(base, token=token, cache_dir=cache_dir, dtype=dtype)
        merge_adapter(head, source)
        return head
    checkpoint = open_checkpoint(source)
    with named_errors(source):
        checkpoint = dequantised(checkpoint)
        found = head_format(checkpoint)
        if found.load is None:
            raise ValueError(f"it holds {found.name}, which hf_specgen.heads.mtp.load_mtp reads with their target")
        return found.load(HeadFile(checkpoint, dtype, found.keys))


def dequantised(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with ordinary weights in place of those that a library has quantised, read by it.

    Activations are not quantised, so the head is at least as accurate as in the program that it was made for.
    """
    config = Fields(checkpoint.config).nested("quantization_config").values
    method = str(config.get("quant_method"))
    end, reader = QUANTISED.get(method, ("", None))
    modules = [name.removesuffix(end) for name in checkpoint.tensors if name.endswith(end)]
    if reader is None or not modules:
        return checkpoint
    tensors = dict(checkpoint.tensors)
    try:
        for module in modules:
            names = [name for name in tensors if name.startswith(f"{module}.") and name != f"{module}.bias"]
            parts = {name.removeprefix(f"{module}."): tensors.pop(name) for name in names}
            weight = reader(config, module, parts)
            file = next(iter(parts.values())).file
            tensors[f"{module}.weight"] = TensorInfo.of(f"{module}.weight", weight, file)
    except ImportError:
        raise ValueError(f"the head is quantised; install {method} to read it") from None
    except Exception as error:  # whatever the library raises for what it cannot work with
        raise ValueError(f"the quantised head cannot be read ({first_line(error)})") from None
    return checkpoint._replace(tensors=tensors)


def _compressed_tensors(config: Mapping[str, Any], module: str, parts: Mapping[str, TensorInfo]) -> torch.Tensor:
    """A weight that compressed-tensors has quantised."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    settings = QuantizationConfig.model_validate(config)
    [scheme] = settings.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(getattr(scheme, "format", None) or settings.format)
    scale = parts["weight_scale"].shape
    rows = parts["weight_packed" if "weight_packed" in parts else "weight"].shape[0]
    if len(scale) > 2 or (scale and scale[0] not in (1, rows)):
        raise ValueError(f"{module}.weight_scale has the shape {scale}, but there are {rows} rows")
    state = {part: info.read() for part, info in parts.items()}
    return cast(torch.Tensor, compressor.decompress(state, scheme)["weight"])


def _torchao(config: Mapping[str, Any], module: str, parts: Mapping[str, TensorInfo]) -> torch.Tensor:
    """A weight that torchao has quantised, by what the file's metadata say of it."""
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    name = f"{module}.weight"
    with safe_open(parts["_weight_qdata"].file, framework="pt") as file:
        metadata = file.metadata() or {}
    if name not in metadata:
        raise ValueError(f"the file's metadata do not describe {name}")
    for info in parts.values():
        if len(info.shape) == 1:  # it would be broadcast to more numbers than the file has
            raise ValueError(f"{info.name} has {info.shape[0]} elements, but should be a matrix")
    state = {info.name: info.read() for info in parts.values()}
    described = {name: metadata[name], "tensor_names": json.dumps([name])}
    return cast(torch.Tensor, unflatten_tensor_state_dict(state, described)[0][name].dequantize())


PACKED = re.compile(r"\._?weight_(packed|qdata)$")
WeightReader = Callable[[Mapping[str, Any], str, Mapping[str, TensorInfo]], torch.Tensor]
"""From the config of the quantisation, the name of a linear layer and its tensors to its weight."""
QUANTISED: Mapping[str, tuple[str, WeightReader]] = {
    "compressed-tensors": (".weight_scale", _compressed_tensors),
    "torchao": ("._weight_qdata", _torchao),
}
"""For each library how the name of a tensor ends that every quantised layer has, and what reads the weights."""


def head_format(checkpoint: Checkpoint) -> Format:
    """The format of a checkpoint, by its config and the names of its tensors."""
    plain = {PACKED.sub(".weight", name): info for name, info in checkpoint.tensors.items()}
    file = HeadFile(checkpoint._replace(tensors=plain))
    for candidate in FORMATS:
        if candidate.recognises(file) if file.kind is None else candidate.kind == file.kind:
            return candidate
    if not checkpoint.tensors:
        raise ValueError(f"it has no tensors: none of {INDEX}, {SINGLE} and {PICKLED} is there")
    content = f"tensors such as {sorted(checkpoint.tensors)[:3]}"
    if file.kind is not None:
        content = f"a speculators model of type {file.kind[:40]!r}"
    names = "; ".join(format.name for format in sorted(FORMATS, key=lambda format: format.load is None))
    raise ValueError(
        f"{content} are not a draft head of a known format; known are {names}; a whole model drafts as "
        "DraftModelCandidates (--draft)"
    )
