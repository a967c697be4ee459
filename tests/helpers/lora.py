"""LoRA adapters with random weights, in the format of PEFT."""

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

LINEAR = ("q_proj", "v_proj", "down_proj", "lm_head")
"""Linear layers of Llama that an adapter changes."""


def write_lora(model: Any, folder: Path, modules: tuple[str, ...] = LINEAR, **changes: Any) -> Path:
    """Write an adapter of rank 2 that changes what the layers of these names compute; returns the folder."""
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": list(modules), "bias": "none"}
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name.endswith(modules):
            rows, columns = layer.weight.shape
            for part, shape in (("A", (2, columns)), ("B", (rows, 2))):
                tensors[f"base_model.model.{name}.lora_{part}.weight"] = torch.randn(shape, generator=generator) / 3
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@cache
def shared_lora(make_model: Any) -> str:
    """An adapter of the model that a function returns, in a folder that lasts as long as the process."""
    folder = tempfile.TemporaryDirectory()
    _folders.append(folder)
    return str(write_lora(make_model(), Path(folder.name)))


_folders: list[Any] = []
