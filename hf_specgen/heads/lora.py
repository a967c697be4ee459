"""A LoRA matrix for each head on the output matrix that all share, trained and saved through PEFT."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers.utils.hub import cached_file

from hf_specgen.heads.exit_head import shared_linear

FOLDER = "lora"


class HeadOutputs(nn.Module):
    """The target's output matrix, as many times as there are heads, in the target's own memory."""

    def __init__(self, matrix: nn.Linear, num_heads: int):
        super().__init__()
        self.heads = nn.ModuleList(shared_linear(matrix) for _ in range(num_heads))


def copy_lora(source: str, folder: Path) -> None:
    """Copy the adapter of a set of heads, from a folder or the Hub, beside another copy of them."""
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        path = cached_file(source, name, subfolder=FOLDER)
        if path is not None and Path(path).resolve() != (folder / FOLDER / name).resolve():
            shutil.copyfile(path, folder / FOLDER / name)


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ImportError(
            "these heads have LoRA matrices, which need peft: pip install 'hf-specgen[adapters]'"
        ) from None
    return peft


def new_lora(matrix: nn.Linear, num_heads: int, rank: int) -> Any:
    """A `PeftModel` around `HeadOutputs` whose deltas are zero."""
    peft = _peft()
    config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=r"heads\.\d+")
    return peft.get_peft_model(cast(Any, HeadOutputs(matrix, num_heads)), config)


def load_lora(matrix: nn.Linear, num_heads: int, source: str) -> Any:
    """The adapter that lies in the folder `lora` of a set of heads.

    Args:
        matrix: the target's output matrix.
        num_heads: of the set.
        source: folder or Hub id of the set.
    """
    peft = _peft()
    local = Path(source) / FOLDER
    place: dict[str, Any] = {"model_id": str(local)} if local.is_dir() else {"model_id": source, "subfolder": FOLDER}
    try:
        return peft.PeftModel.from_pretrained(
            cast(Any, HeadOutputs(matrix, num_heads)), **place, autocast_adapter_dtype=False
        )
    except ValueError:
        raise FileNotFoundError(
            f"the heads in {source} have a LoRA matrix each, but no folder {FOLDER} is there; copy it beside them"
        ) from None


def output_of(adapter: Any, head: int) -> nn.Module:
    """The output matrix of one head, with its delta; from hidden state to vocabulary."""
    return cast(nn.Module, adapter.base_model.model.heads[head])


def stacked_deltas(adapter: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The deltas of all heads, for one product instead of one for each head.

    Returns:
        `[heads, hidden, rank]` and `[heads, rank, vocab]`, scaled; their product is what a head adds to the matrix.
    """
    layers = [cast(Any, layer) for layer in adapter.base_model.model.heads]
    down = torch.stack([layer.lora_A["default"].weight.detach().T for layer in layers])
    up = torch.stack([layer.lora_B["default"].weight.detach().T * layer.scaling["default"] for layer in layers])
    return down, up
