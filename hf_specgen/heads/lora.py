"""LoRA adapters from files that are not trusted, as written by PEFT: checked, then read without PEFT."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any, cast

import torch
from torch import nn

from hf_specgen.heads.checkpoint import Fields, Source, named_errors, read_json, tensor_infos

CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base_model_name_or_path"
PREFIX = "base_model.model."
"""PEFT puts this before the names of the adapted module's tensors."""
UNSUPPORTED = ("rank_pattern", "alpha_pattern", "use_dora", "lora_bias")


def load_adapter(module: nn.Module, source: Source, saved: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """The tensors of a plain LoRA adapter by their names in the module, with `lora_B` scaled.

    Args:
        module: whose linear layers it adapts.
        source: where it lies.
        saved: submodules of which it may hold whole new weights.
    """
    path, weights = (source.required_file(name, "; copy the whole adapter there") for name in (CONFIG, WEIGHTS))
    with named_errors(path):
        rank, scale = _rank_and_scale(Fields(read_json(path)))
    tensors = tensor_infos(weights)
    expected: dict[str, tuple[int, ...]] = {}
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear) and f"{PREFIX}{name}.lora_A.weight" in tensors:
            expected[f"{PREFIX}{name}.lora_A.weight"] = (rank, part.in_features)
            expected[f"{PREFIX}{name}.lora_B.weight"] = (part.out_features, rank)
    if not expected:
        raise ValueError(f"{source} adapts no linear layer of a {type(module).__name__}; load the head it was made for")
    for name in saved:
        if any(key.startswith(f"{PREFIX}{name}.") for key in tensors):
            own = module.get_submodule(name).state_dict().items()
            expected |= {f"{PREFIX}{name}.{key}": tuple(tensor.shape) for key, tensor in own}
    for name in sorted({*tensors, *expected}):
        found, fitting = tensors[name].shape if name in tensors else "absent", expected.get(name, "absent")
        if found != fitting:
            raise ValueError(
                f"{weights} does not fit {path.name} and the target: tensor {name[:120]!r} should be {fitting}, but is "
                f"{found}; load the adapter that belongs to this target"
            )
    scales = {name: scale if ".lora_B." in name else 1.0 for name in expected}
    return {name.removeprefix(PREFIX): info.read() * scales[name] for name, info in tensors.items()}


def _rank_and_scale(config: Fields) -> tuple[int, float]:
    """The rank of the matrices of a plain LoRA, and the factor of the products of `lora_B` and `lora_A`."""
    if config.get("peft_type") != "LORA":
        raise ValueError(f"peft_type must be 'LORA', got {config.get('peft_type')!r:.80}; train a LoRA adapter")
    for name in UNSUPPORTED:
        if config.get(name):
            raise ValueError(f"{name}={config.get(name)!r:.80} is not supported; train a plain LoRA adapter")
    rank = config.integer("r")
    alpha = Fields(config.values, {"lora_alpha": rank}).number("lora_alpha")
    return rank, alpha / (sqrt(rank) if config.get("use_rslora") else rank)


def base_of_adapter(source: Source) -> str | None:
    """The draft head or draft model that the LoRA adapter in a folder or repository belongs to; None without one."""
    if (path := source.file(CONFIG)) is None:
        return None
    with named_errors(path):
        return Fields(read_json(path)).text(BASE) or None


@torch.no_grad()
def merge_adapter(module: nn.Module, source: Source) -> None:
    """Add the LoRA matrices in a folder or repository to the linear layers of a module."""
    tensors = load_adapter(module, source)
    for name, up in tensors.items():
        if name.endswith(".lora_B.weight"):
            layer = name.removesuffix(".lora_B.weight")
            weight = cast(Any, module.get_submodule(layer)).weight
            weight += (up.float() @ tensors[f"{layer}.lora_A.weight"].float()).to(weight)
