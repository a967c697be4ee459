"""T(q) of a target of 8B parameters in bfloat16 and quantised, as far as the libraries are there.

Kernels for quantised weights are often made for one token: then a pass over a few tokens takes as long as several plain
steps, and drafts gain little.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.micro.large_target import large_setup
from hf_specgen.evaluation.cost import QUERIES, measure_cost_curve


def quantised_cost(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """T(1) in milliseconds, and T(q) / T(1)."""
    setup = large_setup(quick)
    rows = []
    for name, model in _quantised(setup.model):
        try:
            curve = measure_cost_curve(model, repeats=1 + repeats)
        except Exception as error:  # kernels of other libraries fail in many ways, which the row says
            rows.append({"variant": name, "note": f"{type(error).__name__}: {error}"[:200]})
            continue
        row: dict[str, Any] = {"variant": name, "T(1), ms": 1e3 * curve.seconds[0]}
        rows.append(row | {f"T({q})/T(1)": curve.relative(q) for q in QUERIES})
    return rows


def _quantised(model: PreTrainedModel) -> Iterator[tuple[str, PreTrainedModel]]:
    """The model, then a copy in each way of quantising whose library can be imported."""
    yield "bfloat16", model
    for name, quantise in {
        "bitsandbytes 4-bit": _bitsandbytes_4_bit,
        "bitsandbytes 8-bit": _bitsandbytes_8_bit,
        "torchao int8": _torchao_int8,
        "torchao int4": _torchao_int4,
    }.items():
        try:
            copied = copy.deepcopy(model)
            quantise(copied)
        except Exception:  # the library is missing, or does not support this device
            continue
        yield name, copied
        del copied
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _replace_linear(model: PreTrainedModel, make: Callable[[torch.nn.Linear], torch.nn.Module]) -> None:
    """Replace the linear layers of the decoder layers."""
    stack: Any = model.model
    for parent in [*stack.layers.modules()]:
        for name, child in [*parent.named_children()]:
            if isinstance(child, torch.nn.Linear):
                setattr(parent, name, make(child))


def _bitsandbytes_4_bit(model: PreTrainedModel) -> None:
    from bitsandbytes.nn import Linear4bit, Params4bit

    def make(layer: torch.nn.Linear) -> torch.nn.Module:
        made = Linear4bit(layer.in_features, layer.out_features, bias=False, compute_dtype=layer.weight.dtype)
        made.weight = Params4bit(layer.weight.data.cpu(), requires_grad=False, quant_type="nf4")
        return made.to(layer.weight.device)

    _replace_linear(model, make)


def _bitsandbytes_8_bit(model: PreTrainedModel) -> None:
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    def make(layer: torch.nn.Linear) -> torch.nn.Module:
        made = Linear8bitLt(layer.in_features, layer.out_features, bias=False, has_fp16_weights=False)
        made.weight = Int8Params(layer.weight.data.cpu(), requires_grad=False, has_fp16_weights=False)
        return made.to(layer.weight.device)

    _replace_linear(model, make)


def _torchao_int8(model: PreTrainedModel) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())


def _torchao_int4(model: PreTrainedModel) -> None:
    from torchao.quantization import Int4WeightOnlyConfig, quantize_

    quantize_(model, Int4WeightOnlyConfig())
