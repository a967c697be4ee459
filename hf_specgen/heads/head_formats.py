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

A further format is a file like `hf_specgen.heads.block`, with its entries in `FORMATS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from hf_specgen.heads import block, dflash2, domino, dspark, eagle, gemma_assistant, medusa, mtp
from hf_specgen.heads.base import DraftHead
from hf_specgen.heads.checkpoint import (
    INDEX,
    PICKLED,
    SINGLE,
    Checkpoint,
    Fields,
    Source,
    TensorInfo,
    first_line,
    open_checkpoint,
)
from hf_specgen.heads.head_file import Format, HeadFile, speculators_type
from hf_specgen.heads.lora import base_of_adapter, merge_adapter

FORMATS: tuple[Format, ...] = (
    *medusa.FORMATS,
    *mtp.FORMATS,
    *eagle.FORMATS,
    *dspark.FORMATS,
    *dflash2.FORMATS,
    *domino.FORMATS,
    *block.FORMATS,
    *gemma_assistant.FORMATS,
)
"""All formats, in the order in which they are tried."""


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

    A LoRA adapter of a head is merged into the head that its config names.

    Args:
        path_or_id: a folder, or the id of a Hub repository.
        revision, token, subfolder, cache_dir: as for `from_pretrained`.
        aux_hidden_state_layers: `hidden_states` indices of the target to read, instead of those of the checkpoint.
        dtype: of the head; None for the dtype of the file.

    Returns:
        The head, on the CPU, frozen, in evaluation mode; `head.bind(target)` makes it ready to draft.
    """
    cache = None if cache_dir is None else str(cache_dir)
    source = Source(str(path_or_id), revision, token, subfolder, cache)
    if (base := base_of_adapter(source)) is not None:
        head = load_head(
            base, token=token, cache_dir=cache_dir, aux_hidden_state_layers=aux_hidden_state_layers, dtype=dtype
        )
        merge_adapter(head, source)
        return head
    checkpoint = open_checkpoint(source)
    layers = None if aux_hidden_state_layers is None else tuple(aux_hidden_state_layers)
    try:
        checkpoint = dequantised(checkpoint)
        found = head_format(checkpoint)
        if found.load is None:
            raise ValueError(f"it holds {found.name}, which {found.reader} reads")
        return found.load(HeadFile(checkpoint, layers, dtype))
    except ValueError as error:
        raise ValueError(f"{checkpoint.source}: {error}") from None


def dequantised(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with ordinary weights in place of those that compressed-tensors has quantised, read by it.

    Activations are not quantised, so the head is at least as accurate as in the program that it was made for.
    """
    config = Fields(checkpoint.config).nested("quantization_config").values
    modules = [name.removesuffix("weight_scale") for name in checkpoint.tensors if name.endswith(".weight_scale")]
    if config.get("quant_method") != "compressed-tensors" or not modules:
        return checkpoint
    try:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationConfig
    except ImportError:
        raise ValueError("the head is quantised; install compressed-tensors to read it") from None
    tensors, loaded = dict(checkpoint.tensors), dict[str, torch.Tensor]()
    try:
        settings = QuantizationConfig.model_validate(config)
        [scheme] = settings.config_groups.values()
        compressor = BaseCompressor.get_value_from_registry(getattr(scheme, "format", None) or settings.format)
        for module in modules:
            parts = {name.removeprefix(module): name for name in tensors if name.startswith(module)}
            bias, read = parts.pop("bias", None), checkpoint.read(parts.values())
            state = {part: read[name] for part, name in parts.items()}
            scale, rows = (
                state["weight_scale"].shape,
                len(state["weight_packed" if "weight_packed" in state else "weight"]),
            )
            if len(scale) > 2 or (scale and scale[0] not in (1, rows)):
                raise ValueError(f"{module}weight_scale has the shape {tuple(scale)}, but there are {rows} rows")
            weight = loaded[f"{module}weight"] = compressor.decompress(state, scheme)["weight"]
            file = tensors[f"{module}weight_scale"].file
            tensors = {name: info for name, info in tensors.items() if not name.startswith(module) or name == bias}
            tensors[f"{module}weight"] = TensorInfo(tuple(weight.shape), weight.dtype, file)
    except Exception as error:  # whatever the library raises for what it cannot work with
        raise ValueError(f"the quantised head cannot be read ({first_line(error)})") from None
    return replace(checkpoint, tensors=tensors, loaded=loaded)


def head_format(checkpoint: Checkpoint) -> Format:
    """The format of a checkpoint."""
    speculators = speculators_type(checkpoint)
    for candidate in FORMATS:
        is_named = speculators is None or candidate.name == f"speculators {speculators}"
        if is_named and candidate.recognises(checkpoint):
            return candidate
    if not checkpoint.tensors:
        raise ValueError(f"it has no tensors: none of {INDEX}, {SINGLE} and {PICKLED} is there")
    content = f"tensors such as {sorted(checkpoint.tensors)[:3]}"
    if speculators:
        content = f"a speculators model of type {speculators[:40]!r}"
    names = "; ".join(format.name for format in sorted(FORMATS, key=lambda format: format.load is None))
    raise ValueError(
        f"{content} are not a draft head of a known format; known are {names}; a whole model drafts as "
        "DraftModelCandidates (--draft)"
    )
