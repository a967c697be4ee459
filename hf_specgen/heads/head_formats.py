"""The table of checkpoint formats of draft heads, and `load_head`.

| layout | config.json | tensors |
|---|---|---|
| EAGLE-1/2, HASS | a Llama config | `fc` [H, 2H], `layers.0.*` without its first norm |
| EAGLE-3; SpecForge, ModelOpt, DeepSpec | a Llama or Qwen3 config | `fc` [H, states * H], `midlayer.*` or `layers.*` |
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
from pathlib import Path

import torch

from hf_specgen.heads import block, dflash2, domino, dspark, eagle, gemma_assistant, medusa, mtp
from hf_specgen.heads.base import DraftHead
from hf_specgen.heads.checkpoint import INDEX, PICKLED, SINGLE, Checkpoint, Source, open_checkpoint
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
        found = head_format(checkpoint)
        if found.load is None:
            raise ValueError(f"it holds {found.name}, which {found.reader} reads")
        return found.load(HeadFile(checkpoint, layers, dtype))
    except ValueError as error:
        raise ValueError(f"{checkpoint.source}: {error}") from None


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
