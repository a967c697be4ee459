"""The table of checkpoint formats of draft heads, and `load_head`.

| layout | config.json | tensors |
|---|---|---|
| EAGLE-1/2, HASS | a Llama config | `fc` [H, 2H], `layers.0.*` without its first norm |
| EAGLE-3; SpecForge, ModelOpt, DeepSpec | Llama, Qwen3 or Gemma 4 | `fc` [H, states * H], `midlayer.*` or `layers.*` |
| P-EAGLE | the same, with a mask token | the same and `mask_hidden` |
| speculators `eagle3`, `peagle` | nested, with `transformer_layer_config` | `fc`, `layers.*` |
| DFlash of z-lab, JetSpec | a Qwen3 config with `dflash_config` | `fc`, `hidden_norm`, `layers.*` |
| speculators `dflash` | nested, with `transformer_layer_config` | the same |
| DSpark, DFlash2, Domino, LiLiCorr | as one of the two, with further fields | the same and those of the correction |
| Gemma 4 assistant | `text_config` | `model.layers.*` without keys and values |
| MTP layers, Medusa heads | of the target; any or none | see `hf_specgen.heads.mtp` and `medusa` |

A further format is a file like `hf_specgen.heads.block`, and an entry in `FORMATS`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Set
from pathlib import Path
from typing import NamedTuple

import torch

from hf_specgen.heads import config_keys
from hf_specgen.heads.base import DraftHead
from hf_specgen.heads.block import block_type, load_block
from hf_specgen.heads.checkpoint import (
    INDEX,
    PICKLED,
    SINGLE,
    Checkpoint,
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
from hf_specgen.heads.lilicorr import load_lilicorr
from hf_specgen.heads.medusa import is_medusa, load_medusa
from hf_specgen.heads.mtp import has_mtp_layers
from hf_specgen.heads.quantised import dequantised
from hf_specgen.heads.source import Source

STATES_NORM = "layers.0.hidden_norm.weight"
"""Only the first layer of EAGLE-3 normalises embedding and state beside each other."""
MASK_STATE = "mask_hidden"
QUERIES = "layers.0.self_attn.q_proj.weight"


class Format(NamedTuple):
    """A format of checkpoints."""

    name: str  # as in messages
    strategy: str  # the class of `hf_specgen.candidates` that drafts with it
    load: Callable[[HeadFile], DraftHead] | None  # None: it is read together with its target
    recognises: Callable[[HeadFile], bool]  # a checkpoint of this format that is not of speculators
    kind: str = ""  # the type that speculators calls it
    keys: Set[str] = config_keys.HEAD  # that are read in the config beside those of the layers


def _has(*names: str) -> Callable[[HeadFile], bool]:
    """Recognises a checkpoint with tensors of these names in our modules."""
    return lambda file: file.has(*names)


def _is_block(*types: str) -> Callable[[HeadFile], bool]:
    """Recognises a block head of one of these types; without any, every block head."""
    return lambda file: block_type(file) in types if types else block_type(file) is not None


FORMATS = (
    Format("Medusa heads", "MedusaCandidates", load_medusa, is_medusa, keys=config_keys.MEDUSA),
    Format("MTP layers", "MTPCandidates", None, lambda file: has_mtp_layers(file.checkpoint), "mtp"),
    Format("P-EAGLE", "PEagleCandidates", load_eagle3, _has(STATES_NORM, MASK_STATE), "peagle", config_keys.EAGLE3),
    Format("EAGLE-3", "EagleCandidates", load_eagle3, _has(STATES_NORM), "eagle3", config_keys.EAGLE3),
    Format("DSpark", "DFlashCandidates", load_dspark, _is_block("dspark"), "dspark", config_keys.DSPARK),
    Format("DFlash2", "DFlashCandidates", load_dflash2, _is_block("dflash2"), "dflash2", config_keys.DFLASH2),
    Format("LiLiCorr", "DFlashCandidates", load_lilicorr, _is_block("lilicorr"), keys=config_keys.LILICORR),
    Format("Domino", "DFlashCandidates", load_domino, _is_block("domino"), keys=config_keys.DOMINO),
    Format("DFlash, JetSpec", "DFlashCandidates", load_block, _is_block(), "dflash", config_keys.BLOCK),
    Format(
        "EAGLE-1, EAGLE-2, HASS", "EagleCandidates", load_eagle1, _has("fc.weight", QUERIES), keys=config_keys.EAGLE1
    ),
    Format("Gemma 4 assistant", "GemmaAssistantCandidates", load_assistant, is_assistant, keys=config_keys.ASSISTANT),
)
"""All formats, in the order in which they are tried."""


UNSUPPORTED = {
    "xpress": "xPress heads, whose refiner reads each block again,",
    "dflashlaguna": "DFlash heads of Laguna, with gates of attention and norms of each hidden state,",
    "kda1mla": "DSpark heads of Kimi K3 with recurrent layers (KDA)",
    "mlpspeculator": "MLP speculators of IBM and Snowflake",
    "lstmspeculator": "LSTM speculators of Snowflake",
    "mlpvariantspeculator": "LSTM speculators of Snowflake",
    "deepseekv4forcausallm": "the DSpark layers inside a DeepSeek-V4 checkpoint",
}
"""Formats that are known, but not read, by a part of what their config calls them."""


def check_supported(checkpoint: Checkpoint) -> None:
    """Raise a `ValueError` that names the format of a checkpoint if it is one of `UNSUPPORTED`."""
    config = checkpoint.config
    called = f"{config.get('architectures')} {config.get('speculators_model_type')}".lower()
    word = next((word for word in UNSUPPORTED if word in called), None)
    has_layers = any(name.startswith("mtp.") for name in checkpoint.tensors)
    if word is not None and (has_layers or not word.startswith("deepseek")):  # else it is a whole model
        raise ValueError(f"{UNSUPPORTED[word]} are not supported; load a head of another format, such as EAGLE-3")


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
        head = load_head(base.path_or_id, revision=base.revision, token=token, cache_dir=cache_dir, dtype=dtype)
        merge_adapter(head, source)
        return head
    return read_head(open_checkpoint(source), dtype)


def read_head(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> DraftHead:
    """The head that an opened checkpoint holds; on the meta device where its tensors are."""
    with named_errors(checkpoint.source):
        checkpoint = dequantised(checkpoint._replace(config=config_keys.with_layers_of_qwen3(checkpoint.config)))
        found = head_format(checkpoint)
        if found.load is None:
            raise ValueError(f"it holds {found.name}, which hf_specgen.heads.mtp.load_mtp reads with their target")
        return found.load(HeadFile(checkpoint, dtype, found.keys))


PACKED_WEIGHT = re.compile(r"\._?weight_(packed|qdata)$")


def head_format(checkpoint: Checkpoint) -> Format:
    """The format of a checkpoint, by its config and the names of its tensors."""
    check_supported(checkpoint)
    plain = {PACKED_WEIGHT.sub(".weight", name): info for name, info in checkpoint.tensors.items()}
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
