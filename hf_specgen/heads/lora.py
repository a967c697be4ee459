"""LoRA adapters from files that are not trusted, as written by PEFT: checked, then read without PEFT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from hf_specgen.heads.checkpoint import Source, TensorInfo, number_field, read_json, read_tensors, tensor_infos

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""PEFT puts this before the names of the adapted module's tensors."""
UNSUPPORTED = ("rank_pattern", "alpha_pattern", "use_dora", "lora_bias")


@dataclass(frozen=True)
class Adapter:
    """An adapter whose config was checked, but whose tensors were not read.

    Args:
        rank: of all its LoRA matrices.
        scale: factor of the products of `lora_B` and `lora_A`.
        tensors: of the file, by name.
        config, weights: its files.
    """

    rank: int
    scale: float
    tensors: dict[str, TensorInfo]
    config: Path
    weights: Path

    def check(self, expected: dict[str, tuple[int, ...]]) -> None:
        """Raise unless the tensors have exactly these names and shapes."""
        actual = {name: info.shape for name, info in self.tensors.items()}
        for name in sorted({*actual, *expected}):
            if actual.get(name) != expected.get(name):
                raise ValueError(
                    f"{self.weights} does not fit {self.config.name} and the target: tensor {name[:120]!r} should be "
                    f"{expected.get(name, 'absent')}, but is {actual.get(name, 'absent')}; load the adapter that "
                    "belongs to this target"
                )


def open_adapter(source: Source) -> Adapter:
    """Read the config of an adapter, which has to be a plain LoRA, and the shapes of its tensors."""
    path, weights = (source.required_file(name, "; copy the whole adapter there") for name in (CONFIG, WEIGHTS))
    config = read_json(path)
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{path}: peft_type must be 'LORA', got {config.get('peft_type')!r:.80}; train a LoRA adapter")
    for name in UNSUPPORTED:
        if config.get(name):
            raise ValueError(f"{path}: {name}={config[name]!r:.80} is not supported; train a plain LoRA adapter")
    rank = number_field(config, "r", path)
    alpha = config.get("lora_alpha", rank)
    if not isinstance(alpha, int | float) or not 0 < alpha < inf:
        raise ValueError(f"{path}: lora_alpha must be a positive number, got {alpha!r:.80}")
    scale = alpha / (sqrt(rank) if config.get("use_rslora") else rank)
    return Adapter(rank, scale, tensor_infos(weights), path, weights)


def load_adapter(module: nn.Module, source: Source, saved: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """The tensors of an adapter by their names in the module, with `lora_B` scaled.

    Args:
        module: whose linear layers it adapts.
        source: where it lies.
        saved: submodules of which it may hold whole new weights.
    """
    adapter = open_adapter(source)
    expected: dict[str, tuple[int, ...]] = {}
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear) and f"{PREFIX}{name}.lora_A.weight" in adapter.tensors:
            expected[f"{PREFIX}{name}.lora_A.weight"] = (adapter.rank, part.in_features)
            expected[f"{PREFIX}{name}.lora_B.weight"] = (part.out_features, adapter.rank)
    if not expected:
        raise ValueError(f"{source} adapts no linear layer of a {type(module).__name__}; load the head it was made for")
    for name in saved:
        if any(key.startswith(f"{PREFIX}{name}.") for key in adapter.tensors):
            own = module.get_submodule(name).state_dict().items()
            expected |= {f"{PREFIX}{name}.{key}": tuple(tensor.shape) for key, tensor in own}
    adapter.check(expected)
    scales = {name: adapter.scale if ".lora_B." in name else 1.0 for name in expected}
    read = read_tensors(adapter.weights).items()
    return {name.removeprefix(PREFIX): tensor * scales[name] for name, tensor in read}


def base_of_adapter(source: Source) -> str | None:
    """The draft head or draft model that the LoRA adapter in a folder or repository belongs to; None without one."""
    path = source.file(CONFIG)
    base = None if path is None else read_json(path).get("base_model_name_or_path")
    if base is not None and not isinstance(base, str):
        raise ValueError(f"{path}: base_model_name_or_path must be a string, got {base!r:.80}")
    return base


@torch.no_grad()
def merge_adapter(module: nn.Module, source: Source) -> None:
    """Add the LoRA matrices in a folder or repository to the linear layers of a module."""
    tensors = load_adapter(module, source)
    for name, up in tensors.items():
        if name.endswith(".lora_B.weight"):
            layer = name.removesuffix(".lora_B.weight")
            weight = cast(Any, module.get_submodule(layer)).weight
            weight += (up.float() @ tensors[f"{layer}.lora_A.weight"].float()).to(weight)
