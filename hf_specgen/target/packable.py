"""Which layers can be multiplied with packed weights on this machine; see `hf_specgen.target.packed_weights`."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn


def is_packable(module: nn.Module) -> bool:
    """Whether a module is a linear layer whose weights can be packed."""
    if type(module) is not nn.Linear:
        return False
    weight = module._parameters.get("weight")  # pruning computes it anew in every pass
    return type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.dtype in packable_dtypes()


@cache
def packable_dtypes() -> tuple[torch.dtype, ...]:
    """The dtypes that oneDNN multiplies on this machine: bfloat16 where the processor has AVX-512."""
    if not torch.backends.mkldnn.is_available():
        return ()
    return (torch.float32, torch.bfloat16) if torch.ops.mkldnn._is_mkldnn_bf16_supported() else (torch.float32,)


def check_packable(model: nn.Module) -> None:
    """Raise unless some weights of the model can be packed.

    Raises:
        ValueError: if none can.
    """
    if any(map(is_packable, model.modules())):
        return
    kinds = sorted({f"{one.dtype} on {one.device}".removeprefix("torch.") for one in model.parameters()})
    raise ValueError(
        f"pack_weights=True works with linear layers on a CPU, in float32 or, with AVX-512, in bfloat16; "
        f"{type(model).__name__} has none (its weights: {', '.join(kinds)}); leave it out"
    )
