"""Writing draft heads: in the format of speculators, which vLLM serves, or in the layouts that other programs read.

| head | `save_head` | `export_head(to="eagle")` | `export_head(to="sglang")` |
|---|---|---|---|
| EAGLE-1 | original | original | original |
| EAGLE-3 | speculators `eagle3` | original | SpecForge |
| P-EAGLE | speculators `peagle` | | |
| DFlash | speculators `dflash` | | z-lab |
| JetSpec | z-lab | | z-lab |

A head with an option that a format cannot express is refused. Embeddings and output matrices that belong to the target
are not written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from hf_specgen.heads.base import DraftHead
from hf_specgen.heads.block import BlockHead
from hf_specgen.heads.eagle import Eagle1Head, Eagle3Head
from hf_specgen.heads.saved_configs import (
    Config,
    fits_speculators,
    flat_eagle3,
    original_eagle1,
    speculators_block,
    speculators_eagle,
    zlab_block,
)

PROGRAMS = ("eagle", "sglang", "vllm")


def save_head(head: DraftHead, folder: str | Path) -> list[Path]:
    """Write a head so that `load_head` and vLLM read it.

    Args:
        head: an EAGLE, P-EAGLE, DFlash or JetSpec head.
        folder: where to; files of the same names are overwritten.

    Returns:
        the files written.

    Raises:
        ValueError: if the head is of another kind, or has an option that the format cannot express.
    """
    if isinstance(head, Eagle3Head):
        return _write(head, folder, speculators_eagle(head), {})
    if isinstance(head, BlockHead) and fits_speculators(head):
        return _write(head, folder, speculators_block(head), {})
    if isinstance(head, BlockHead):
        return _write(head, folder, zlab_block(head), {})
    if isinstance(head, Eagle1Head):
        return _write(head, folder, original_eagle1(head), {})
    raise ValueError(f"{type(head).__name__} has no format of its own; it stays in the checkpoint that it came from")


def export_head(head: DraftHead, folder: str | Path, to: str) -> list[Path]:
    """Write a head in the layout that another program reads.

    Args:
        head: an EAGLE, P-EAGLE, DFlash or JetSpec head.
        folder: where to; it must not hold a config.json yet.
        to: "eagle" (the original implementation), "sglang" (the layouts of SpecForge and z-lab) or "vllm".

    Returns:
        the files written.

    Raises:
        ValueError: for another program, or a head that its layout cannot express.
    """
    if to not in PROGRAMS:
        raise ValueError(f"unknown export {to!r}; there are {', '.join(PROGRAMS)}")
    if (Path(folder) / "config.json").exists():
        raise ValueError(f"{folder} holds a config.json already; export to a folder of its own")
    if to == "vllm":
        return save_head(head, folder)
    if isinstance(head, Eagle1Head):
        return _write(head, folder, original_eagle1(head), {})
    if isinstance(head, Eagle3Head):
        return _write(head, folder, flat_eagle3(head, to), {"layers.0.": "midlayer."}, mapping=to == "sglang")
    if isinstance(head, BlockHead) and to == "sglang":
        return _write(head, folder, zlab_block(head), {})
    raise ValueError(f"there is no layout of {type(head).__name__} for {to!r}; use 'vllm'")


def _write(
    head: DraftHead, folder: str | Path, config: Config, renamed: Mapping[str, str], mapping: bool = False
) -> list[Path]:
    """Write config and tensors; `mapping` writes the mapping of the vocabulary even if it is the identity."""
    tensors = {}
    for name, tensor in head.state_dict().items():
        for ours, theirs in renamed.items():
            name = theirs + name[len(ours) :] if name.startswith(ours) else name
        tensors[name] = tensor.detach().cpu().contiguous().clone()
    ids = tensors.pop("draft_to_target", None)
    if ids is None and mapping:
        ids = torch.arange(head.config.vocab_size)
    if ids is not None:
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    dtype = str(next(head.parameters()).dtype).removeprefix("torch.")
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return [path / "config.json", path / "model.safetensors"]
