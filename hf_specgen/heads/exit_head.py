"""Exit heads: predict the next token from the hidden state behind an early layer of the target."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from hf_specgen.target.model_parts import decoder_layers, final_norm, output_matrix

EXIT_CONFIG = "exit_config.json"
WEIGHTS = "adapter_model.safetensors"


class ExitHead(nn.Module):
    """A norm of its own, then the target's output matrix, on which an adapter may sit.

    A fresh head is exactly what the target itself would say if it stopped at that layer. The matrix shares the
    target's memory but is a module of its own: neither training nor loading an adapter touches the target.

    Args:
        norm: from hidden state to hidden state.
        head: from hidden state to vocabulary.
        exit_layer: how many of the target's layers come before it; None if it has not been placed.

    Example:
        >>> head = ExitHead(nn.LayerNorm(4), nn.Linear(4, 9, bias=False))
        >>> head(torch.zeros(2, 3, 4)).shape
        torch.Size([2, 3, 9])
    """

    def __init__(self, norm: nn.Module, head: nn.Linear, exit_layer: int | None = None):
        super().__init__()
        self.norm, self.head, self.exit_layer = norm, head, exit_layer

    @classmethod
    def from_target(cls, model: PreTrainedModel, exit_layer: int | None = None) -> ExitHead:
        """A fresh head: a copy of the target's final norm, and its output matrix.

        Raises:
            ValueError: if the target has no such parts, or no layer `exit_layer`.
        """
        layers = len(decoder_layers(model))
        if exit_layer is not None and not 0 < exit_layer < layers:
            raise ValueError(f"exit_layer must be between 1 and {layers - 1} for this target, not {exit_layer}.")
        return cls(copy.deepcopy(final_norm(model)), shared_linear(output_matrix(model)), exit_layer)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[..., hidden]` to `[..., vocab]`."""
        return cast(torch.Tensor, self.head(self.norm(hidden)))


def save_exit_head(adapter: Any, folder: str | Path, target: PreTrainedModel, base_model: str) -> None:
    """Write a trained head: PEFT's two files and `exit_config.json`, which says what it belongs to.

    Args:
        adapter: the `PeftModel` around an `ExitHead`.
        folder: where to.
        target: the model it was trained for.
        base_model: that model's Hub id or path.
    """
    adapter.save_pretrained(folder, safe_serialization=True)
    config = {"exit_layer": adapter.base_model.model.exit_layer, "base_model": base_model, **_sizes(target)}
    (Path(folder) / EXIT_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_exit_head(target: PreTrainedModel, path_or_id: str | Path) -> ExitHead:
    """A trained head, placed on its target.

    Args:
        target: the model that the head was trained for; it is not changed.
        path_or_id: a folder, or a repository of the Hub, as written by `recipes/train_layer_skip.py`.

    Returns:
        the head, frozen, in the target's dtype and on the device of its output matrix.

    Raises:
        FileNotFoundError: if `exit_config.json` or the safetensors file is not there.
        ValueError: if the head was made for a target of other sizes.
    """
    from peft import PeftModel

    source = str(path_or_id)
    config = _config(source)
    _file(source, WEIGHTS)
    for name, value in _sizes(target).items():
        if config[name] != value:
            raise ValueError(
                f"{source} was trained for {config['base_model']} with {name} {config[name]}, "
                f"but this target has {value}; load the head that belongs to it."
            )
    matrix = output_matrix(target)
    fresh = ExitHead.from_target(target, config["exit_layer"])
    adapted = PeftModel.from_pretrained(cast(Any, fresh), source, autocast_adapter_dtype=False)
    head = cast(ExitHead, adapted.base_model.model)
    return head.to(device=matrix.weight.device, dtype=matrix.weight.dtype).requires_grad_(False).eval()


def exit_layer_of(path_or_id: str | Path) -> int:
    """The layer that a trained head was made for.

    Raises:
        FileNotFoundError: if there is no `exit_config.json`.
    """
    return int(_config(str(path_or_id))["exit_layer"])


def _config(source: str) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(Path(_file(source, EXIT_CONFIG)).read_text(encoding="utf-8")))


def _sizes(model: PreTrainedModel) -> dict[str, int]:
    matrix = output_matrix(model)
    return {
        "hidden_size": matrix.in_features,
        "vocab_size": matrix.out_features,
        "num_hidden_layers": len(decoder_layers(model)),
    }


def shared_linear(matrix: nn.Linear) -> nn.Linear:
    """The same numbers in the same memory under parameters of their own, so that freezing them stays ours."""
    twin = nn.Linear(matrix.in_features, matrix.out_features, bias=matrix.bias is not None, device="meta")
    twin.weight = nn.Parameter(matrix.weight.detach(), requires_grad=False)
    if matrix.bias is not None:
        twin.bias = nn.Parameter(matrix.bias.detach(), requires_grad=False)
    return twin


def _file(source: str, name: str) -> str:
    try:
        found = cached_file(source, name)
    except OSError:
        found = None
    if found is None:
        raise FileNotFoundError(f"{source} has no {name}: not an exit head written by recipes/train_layer_skip.py.")
    return str(found)
