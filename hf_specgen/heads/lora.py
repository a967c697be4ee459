"""LoRA adapters from files that are not trusted.

PEFT builds modules of the sizes that a config states, so these are compared with the tensors' shapes first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf, sqrt
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import nn

from hf_specgen.heads.checkpoint import Names, Source, TensorInfo, number_field, read_json, read_tensors, tensor_infos

Shape = tuple[int, ...]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""PEFT puts this before the names of the adapted module's tensors."""
HEAD_MATRIX = re.compile(re.escape(PREFIX) + r"heads\.(\d{1,6})\.lora_([AB])\.weight$")
UNSUPPORTED = ("rank_pattern", "alpha_pattern", "use_dora", "lora_bias")


def shared_linear(matrix: nn.Linear) -> nn.Linear:
    """A linear layer in the memory of another one, whose own parameters can be frozen without freezing the other's."""
    twin = nn.Linear(matrix.in_features, matrix.out_features, bias=matrix.bias is not None, device="meta")
    twin.weight = nn.Parameter(matrix.weight.detach(), requires_grad=False)
    if matrix.bias is not None:
        twin.bias = nn.Parameter(matrix.bias.detach(), requires_grad=False)
    return twin


def load_adapter(module: nn.Module, source: Source, adapted: Sequence[str], saved: Sequence[str] = ()) -> Any:
    """Load a LoRA adapter onto linear layers of a module, and whole submodules that it has saved; a `PeftModel`."""
    peft = _peft()
    config_path, weights_path = _adapter_files(source)
    config = read_json(config_path)
    rank = _check_config(config, config_path)
    infos = tensor_infos(weights_path)
    saved = [name for name in saved if any(key.startswith(f"{PREFIX}{name}.") for key in infos)]
    _check_shapes(infos, _expected_shapes(module, rank, adapted, saved), config_path, weights_path)
    lora = peft.LoraConfig(
        r=rank,
        lora_alpha=config.get("lora_alpha", rank),
        use_rslora=bool(config.get("use_rslora")),
        target_modules=list(adapted),
        modules_to_save=list(saved) or None,
    )
    model = peft.get_peft_model(cast(Any, module), lora, autocast_adapter_dtype=False)
    peft.set_peft_model_state_dict(model, read_tensors(weights_path))
    return model


def base_of_adapter(source: Source) -> str | None:
    """The draft head or draft model that the LoRA adapter in a folder or repository belongs to; None without one."""
    path = source.file(CONFIG)
    base = None if path is None else read_json(path).get("base_model_name_or_path")
    if base is not None and not isinstance(base, str):
        raise ValueError(f"{path}: base_model_name_or_path must be a string, got {base!r:.80}")
    return base


def merge_adapter(module: nn.Module, source: Source) -> nn.Module:
    """A module with the LoRA adapter in a folder or repository merged into its linear layers."""
    infos = tensor_infos(_adapter_files(source)[1])
    linear = (name for name, part in module.named_modules() if isinstance(part, nn.Linear))
    adapted = [name for name in linear if f"{PREFIX}{name}.lora_A.weight" in infos]
    if not adapted:
        raise ValueError(f"{source} adapts no linear layer of a {type(module).__name__}; load the head it was made for")
    return cast(nn.Module, load_adapter(module, source, adapted).merge_and_unload())


def _check_config(config: dict[str, Any], path: Path) -> int:
    """The rank, if the adapter is a plain LoRA."""
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{path}: peft_type must be 'LORA', got {config.get('peft_type')!r:.80}; train a LoRA adapter")
    for name in UNSUPPORTED:
        if config.get(name):
            raise ValueError(f"{path}: {name}={config[name]!r:.80} is not supported; train a plain LoRA adapter")
    alpha = config.get("lora_alpha", 1)
    if not isinstance(alpha, int | float) or not 0 < alpha < inf:
        raise ValueError(f"{path}: lora_alpha must be a positive number, got {alpha!r:.80}")
    return number_field(config, "r", path)


def _expected_shapes(module: nn.Module, rank: int, adapted: Sequence[str], saved: Sequence[str]) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for name in adapted:
        linear = cast(nn.Linear, module.get_submodule(name))
        shapes[f"{PREFIX}{name}.lora_A.weight"] = (rank, linear.in_features)
        shapes[f"{PREFIX}{name}.lora_B.weight"] = (linear.out_features, rank)
    for name in saved:
        for key, tensor in module.get_submodule(name).state_dict().items():
            shapes[f"{PREFIX}{name}.{key}"] = tuple(tensor.shape)
    return shapes


def _check_shapes(infos: dict[str, TensorInfo], expected: dict[str, Shape], config: Path, weights: Path) -> None:
    actual = {name: info.shape for name, info in infos.items()}
    for name in sorted({*actual, *expected}):
        if actual.get(name) != expected.get(name):
            raise ValueError(
                f"{weights} does not fit {config.name} and the target: tensor {name[:120]!r} should be "
                f"{expected.get(name, 'absent')}, but is {actual.get(name, 'absent')}; load the adapter that belongs "
                "to this target"
            )


def _adapter_files(source: Source) -> tuple[Path, Path]:
    """The paths of an adapter's config and of its tensors."""
    config, weights = (source.required_file(name, "; copy the whole adapter there") for name in (CONFIG, WEIGHTS))
    return config, weights


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ImportError("LoRA adapters need peft: pip install 'hf-specgen[adapters]'") from None
    return peft


class LowRank(NamedTuple):
    """The matrices of an adapter with one LoRA matrix for each Medusa head, and their names in `MedusaHeads`."""

    scale: float
    tensors: dict[str, TensorInfo]
    names: Names


def read_low_rank(source: Source) -> LowRank:
    """Check an adapter that PEFT has written for a list `heads` of linear layers; its tensors are not read."""
    config_path, weights_path = _adapter_files(source)
    config = read_json(config_path)
    rank, infos = _check_config(config, config_path), tensor_infos(weights_path)
    matches = {name: HEAD_MATRIX.match(name) for name in infos}
    for name, match in matches.items():
        if match is None or rank not in infos[name].shape:
            shape = infos[name].shape
            raise ValueError(
                f"{weights_path} does not fit {config_path.name} of rank {rank}: {name[:120]!r} is {shape}"
            )
    alpha = float(config.get("lora_alpha", rank))
    scale = alpha / (sqrt(rank) if config.get("use_rslora") else rank)
    names = {f"lora_{match[2]}.{int(match[1])}.weight": name for name, match in matches.items() if match}
    return LowRank(scale, infos, names)
