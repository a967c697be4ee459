"""Loads a draft head of any known format from a folder or a Hub repository."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from hf_specgen.heads.assistant_format import is_assistant, load_assistant
from hf_specgen.heads.base import DraftHead
from hf_specgen.heads.block_format import is_block, load_speculators_block, load_zlab_block
from hf_specgen.heads.checkpoint import INDEX, PICKLED, SINGLE, Checkpoint, Source, open_checkpoint
from hf_specgen.heads.eagle_format import is_eagle1, is_eagle3, load_eagle1, load_eagle3
from hf_specgen.heads.medusa import MedusaConfig

Load = Callable[[Checkpoint, "tuple[int, ...] | None", "torch.dtype | None"], DraftHead]


class Format(NamedTuple):
    """A format of checkpoints: how it is recognised, and how it is loaded."""

    name: str
    recognises: Callable[[Checkpoint], bool]
    load: Load


def speculators_type(checkpoint: Checkpoint) -> str | None:
    """The type of a checkpoint in the speculators format; None for every other one."""
    kind = checkpoint.config.get("speculators_model_type")
    return str(kind) if kind is not None else None


def is_medusa(checkpoint: Checkpoint) -> bool:
    """Whether it holds Medusa heads, which `hf_specgen.heads.load_medusa` reads."""
    kind = checkpoint.config.get("model_type")
    return "medusa_num_heads" in checkpoint.config or kind in ("medusa", MedusaConfig.model_type)


MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
"""Files that only Medusa heads have; some come without a config."""


def holds_medusa(source: Source) -> bool:
    """Whether a folder or repository holds Medusa heads.

    Raises:
        FileNotFoundError: if there is no such folder or repository.
        ValueError: if it has neither these files nor a readable config.
    """
    return any(source.file(name) for name in MEDUSA_FILES) or is_medusa(open_checkpoint(source))


FORMATS = (
    Format("speculators eagle3", lambda found: speculators_type(found) == "eagle3", load_eagle3),
    Format("speculators peagle", lambda found: speculators_type(found) == "peagle", load_eagle3),
    Format("speculators dflash", lambda found: speculators_type(found) == "dflash", load_speculators_block),
    Format("Gemma 4 assistant", is_assistant, load_assistant),
    Format("EAGLE-3 (original, SpecForge, ModelOpt, DeepSpec, P-EAGLE)", is_eagle3, load_eagle3),
    Format("EAGLE-1, EAGLE-2, HASS", is_eagle1, load_eagle1),
    Format("DFlash, JetSpec", is_block, load_zlab_block),
)
"""All formats, in the order in which they are tried."""


def load_head(
    path_or_id: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    subfolder: str | None = None,
    cache_dir: str | Path | None = None,
    taps: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> DraftHead:
    """Load a draft head; its format is recognised by config.json and the names of the tensors.

    Args:
        path_or_id: a folder, or the id of a Hub repository.
        revision, token, subfolder, cache_dir: as for `from_pretrained`.
        taps: `hidden_states` indices of the target to read, instead of those that the checkpoint names.
        dtype: of the head; None for the dtype of the file.

    Returns:
        The head, on the CPU, frozen, in evaluation mode; `head.attach(target)` makes it ready to draft.

    Raises:
        FileNotFoundError: if there is no such folder or repository.
        ValueError: if the format is unknown, or a file is damaged or inconsistent.
    """
    checkpoint = open_checkpoint(Source(str(path_or_id), revision, token, subfolder, _text(cache_dir)))
    chosen = None if taps is None else tuple(taps)
    try:
        return head_format(checkpoint).load(checkpoint, chosen, dtype)
    except ValueError as error:
        raise ValueError(f"{checkpoint.source}: {error}") from None


def head_format(checkpoint: Checkpoint) -> Format:
    """The format of a checkpoint.

    Raises:
        ValueError: if it is unknown; the message names the known formats.
    """
    kind = speculators_type(checkpoint)
    if is_medusa(checkpoint):
        raise ValueError("it holds Medusa heads, which hf_specgen.heads.load_medusa reads")
    if not checkpoint.tensors:
        raise ValueError(f"it has no tensors: none of {INDEX}, {SINGLE} and {PICKLED} is there")
    for candidate in FORMATS:
        if (kind is None or candidate.name == f"speculators {kind}") and candidate.recognises(checkpoint):
            return candidate
    found = (
        f"a speculators model of type {kind[:40]!r}" if kind else f"tensors such as {sorted(checkpoint.tensors)[:3]}"
    )
    raise ValueError(
        f"{found} are not a draft head of a known format; known are {'; '.join(known.name for known in FORMATS)}"
    )


def _text(path: str | Path | None) -> str | None:
    return None if path is None else str(path)
