"""Pads a model to the latency of a larger one that computes the same function."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from hf_specgen.evaluation.cost import measure_cost_curve


def widen(model: PreTrainedModel, parameters: int, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A model with about `parameters` parameters that computes the same function as `model`.

    Every MLP gets additional neurons whose weights are zero: acceptance is that of the small model, latency that
    of a larger one. `model`, which stays as it is, has the layers `gate_proj`, `up_proj` and `down_proj` of Llama.
    """
    config = model.config
    missing = parameters - sum(p.numel() for p in model.parameters())
    if missing < 0:
        raise ValueError(f"parameters must be at least the model's {parameters - missing}, got {parameters}")
    wide = copy.deepcopy(model)
    for parameter in wide.parameters():  # `Module.to` would round the frequencies of rotary embeddings too
        parameter.data = parameter.data.to(dtype or model.dtype)
    neurons = config.intermediate_size + missing // (3 * config.hidden_size * config.num_hidden_layers)
    # A multiple of 128, as in large models: for other numbers GPUs have slower kernels (20 instead of 11 ms for 8
    # tokens of an 8B model on an H100).
    neurons = max(config.intermediate_size, neurons - neurons % 128)
    wide.config.intermediate_size = neurons
    more = neurons - config.intermediate_size
    for mlp in (cast(Any, module) for module in wide.modules() if hasattr(module, "gate_proj")):
        mlp.intermediate_size = neurons
        for layer, inputs, outputs in ((mlp.gate_proj, 0, more), (mlp.up_proj, 0, more), (mlp.down_proj, more, 0)):
            layer.in_features = layer.in_features + inputs
            layer.out_features = layer.out_features + outputs
            layer.weight.data = pad(layer.weight.data, (0, inputs, 0, outputs))
            if layer.bias is not None:
                layer.bias.data = pad(layer.bias.data, (0, outputs))
    return wide.eval()


def fast_dtype(model: PreTrainedModel, parameters: int) -> str:
    """The name of the dtype, bfloat16 or float32, that has the faster pass over several tokens on this machine.

    A processor without matrix instructions for bfloat16 takes five times as long for 8 tokens as for one. Tried with a
    model of at most 64M parameters, which is larger than the caches of a few cores.
    """
    size = max(sum(p.numel() for p in model.parameters()), min(parameters, 64 * 10**6))

    def seconds(name: str) -> float:
        probe = widen(model, size, getattr(torch, name))
        # Other load on the machine only adds time.
        return min(measure_cost_curve(probe, (1, 8), context=8, repeats=1).seconds[1] for _ in range(3))

    return min(("bfloat16", "float32"), key=seconds)
