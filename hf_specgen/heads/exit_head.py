"""Exit heads: predict the next token from the hidden state after an early layer of the target."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from hf_specgen.heads.base import check_target
from hf_specgen.heads.checkpoint import Fields, load_adapter, named_errors, read_json
from hf_specgen.heads.source import Source
from hf_specgen.targets.model_parts import decoder_layers, final_norm, output_matrix

EXIT_CONFIG = "exit_config.json"


class ExitHead(nn.Module):
    """A norm, then the target's output matrix, which may have a LoRA adapter.

    A new head computes exactly the logits of the target cut off after that layer. Its output matrix shares the target's
    memory, but neither training nor loading an adapter changes the target.
    """

    down: torch.Tensor | None
    up: torch.Tensor | None

    def __init__(self, norm: nn.Module, head: nn.Linear, exit_layer: int | None = None):
        super().__init__()
        self.norm = norm
        self.head = head
        self.exit_layer = exit_layer
        self.register_buffer("down", None)
        self.register_buffer("up", None)

    @classmethod
    def from_target(cls, model: PreTrainedModel, exit_layer: int | None = None) -> ExitHead:
        """A new head: a copy of the target's final norm, and its output matrix, in the target's memory but frozen."""
        layers = len(decoder_layers(model))
        matrix = output_matrix(model)
        if exit_layer is not None and not 0 < exit_layer < layers:
            raise ValueError(f"exit_layer must be between 1 and {layers - 1} for this target, got {exit_layer}")
        with torch.device("meta"):
            shared = nn.Linear(matrix.in_features, matrix.out_features, bias=matrix.bias is not None)
        shared.load_state_dict(matrix.state_dict(), assign=True)
        return cls(copy.deepcopy(final_norm(model)), shared.requires_grad_(False), exit_layer)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[..., hidden]` to `[..., vocab]`."""
        normed = self.norm(hidden)
        logits: torch.Tensor = self.head(normed)
        if self.down is None or self.up is None:
            return logits
        return logits + linear(linear(normed, self.down), self.up)


def save_exit_head(adapter: Any, folder: str | Path, target: PreTrainedModel, base_model: str) -> None:
    """Write a trained head: PEFT's two files, and `exit_config.json` with the target's sizes."""
    adapter.save_pretrained(folder, safe_serialization=True)
    config = {"exit_layer": adapter.base_model.model.exit_layer, "base_model": base_model, **_sizes(target)}
    (Path(folder) / EXIT_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_exit_head(target: PreTrainedModel, path_or_id: str | Path) -> ExitHead:
    """Load a trained head for its target. The files are not trusted: sizes are checked before allocating.

    Args:
        target: the model that the head was trained for; it is not changed.
        path_or_id: a folder, or a repository of the Hub, as written by `recipes/train_layer_skip.py`.
    """
    fields, path = _config(path_or_id)
    with named_errors(path):
        sizes = [(name, fields.integer(name), value) for name, value in _sizes(target).items()]
        check_target(sizes, str(fields.get("base_model")))
        head = ExitHead.from_target(target, fields.integer("exit_layer"))
    matrix = output_matrix(target).weight
    tensors = load_adapter(head, Source(os.path.expanduser(path_or_id)), saved=["norm"])
    head.down, head.up = (tensors.pop(f"head.lora_{part}.weight") for part in "AB")
    head.norm.load_state_dict({name.removeprefix("norm."): tensor for name, tensor in tensors.items()}, strict=False)
    return head.to(device=matrix.device, dtype=matrix.dtype).requires_grad_(False).eval()


def exit_layer_of(path_or_id: str | Path) -> int:
    """The layer that a trained head was made for."""
    fields, path = _config(path_or_id)
    with named_errors(path):
        return fields.integer("exit_layer")


def _config(path_or_id: str | Path) -> tuple[Fields, Path]:
    """The config of a trained head, and its file."""
    remedy = ": not an exit head written by recipes/train_layer_skip.py"
    path = Source(os.path.expanduser(path_or_id)).required_file(EXIT_CONFIG, remedy)
    return Fields(read_json(path)), path


def _sizes(model: PreTrainedModel) -> dict[str, int]:
    matrix = output_matrix(model)
    return {
        "hidden_size": matrix.in_features,
        "vocab_size": matrix.out_features,
        "num_hidden_layers": len(decoder_layers(model)),
    }
