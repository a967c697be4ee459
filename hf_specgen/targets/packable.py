"""Which linear layers can run with packed weights on this machine; see `hf_specgen.targets.packed_weights`."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn


def is_packable(module: nn.Module) -> bool:
    """Whether a module is a linear layer whose weights can be packed."""
    if type(module) is not nn.Linear:
        return False
    weight = module._parameters.get("weight")  # not there where pruning computes it anew in every pass
    if type(weight) is not nn.Parameter or weight.device.type != "cpu" or weight.dtype not in packable_dtypes():
        return False
    return weight.layout is torch.strided and weight.numel() > 0


@cache
def packable_dtypes() -> tuple[torch.dtype, ...]:
    """The dtypes that oneDNN multiplies on this machine: bfloat16 where the processor has AVX-512."""
    if not torch.backends.mkldnn.is_available():
        return ()
    return (torch.float32, torch.bfloat16) if torch.ops.mkldnn._is_mkldnn_bf16_supported() else (torch.float32,)


def check_packable(model: nn.Module) -> None:
    """Raise if no layer of the model can run with packed weights.

    Raises:
        ValueError: naming the dtypes and devices of the model's parameters.
    """
    if any(map(is_packable, model.modules())):
        return
    kinds = sorted({f"{one.dtype} on {one.device}".removeprefix("torch.") for one in model.parameters()})
    raise ValueError(
        f"pack_weights=True works with torch.nn.Linear on a CPU, in float32 or, with AVX-512, in bfloat16; "
        f"{type(model).__name__} has no such layer (its parameters: {', '.join(kinds)}); leave it out"
    )
