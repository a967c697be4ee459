"""Function-preserving widening: the same function with more parameters, to measure the latency of a larger target.

Every MLP gets additional neurons whose output columns are zero. They are computed like other neurons and contribute
nothing: acceptance is that of the small model, latency that of a larger one.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specgen.evaluation.cost import measure_cost_curve

PROBE_PARAMETERS, PROBES, PROBE_TOKENS = 64 * 10**6, 3, 8
"""Size of the model that dtypes are tried with, larger than the caches of a few cores; how often; tokens of a pass."""


NEURON_BLOCK = 128
"""The neurons of a widened MLP are a multiple of it, as in large models. For other numbers GPUs have slower kernels: a
pass over 8 tokens of an 8B model took 20 ms on an H100, one over a single token 11 ms."""


def widen(model: PreTrainedModel, parameters: int, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A model with about `parameters` parameters that computes the same function as `model`.

    Args:
        model: a Llama-like model, whose MLPs have `gate_proj`, `up_proj` and `down_proj`.
        parameters: size of the result; at least that of `model`.
        dtype: of the result; that of `model` if left out.

    Returns:
        A new model on the same device, in evaluation mode; `model` is unchanged.

    Raises:
        ValueError: if `model` is larger than that.
    """
    config = model.config
    missing = parameters - sum(p.numel() for p in model.parameters())
    if missing < 0:
        raise ValueError(f"parameters must be at least the model's {parameters - missing}, got {parameters}")
    wide = copy.deepcopy(model)
    for parameter in wide.parameters():  # `Module.to` would round the frequencies of rotary embeddings too
        parameter.data = parameter.data.to(dtype or model.dtype)
    neurons = config.intermediate_size + missing // (3 * config.hidden_size * config.num_hidden_layers)
    neurons = max(config.intermediate_size, neurons - neurons % NEURON_BLOCK)
    wide.config.intermediate_size = neurons
    for module in wide.modules():
        if hasattr(module, "gate_proj"):
            mlp = cast(Any, module)
            mlp.intermediate_size = neurons
            mlp.gate_proj = _with_outputs(mlp.gate_proj, neurons)
            mlp.up_proj = _with_outputs(mlp.up_proj, neurons)
            mlp.down_proj = _with_inputs(mlp.down_proj, neurons)
    return wide.eval()


@torch.no_grad()
def _with_outputs(layer: nn.Linear, outputs: int) -> nn.Linear:
    """The layer with further outputs, which repeat its own."""
    source = torch.arange(outputs, device=layer.weight.device) % layer.out_features
    wide = _empty(layer, layer.in_features, outputs)
    wide.weight.copy_(layer.weight[source])
    if layer.bias is not None:
        wide.bias.copy_(layer.bias[source])
    return wide


@torch.no_grad()
def _with_inputs(layer: nn.Linear, inputs: int) -> nn.Linear:
    """The layer with further inputs, which it multiplies by zero."""
    wide = _empty(layer, inputs, layer.out_features)
    wide.weight[:, : layer.in_features] = layer.weight
    wide.weight[:, layer.in_features :] = 0
    if layer.bias is not None:
        wide.bias.copy_(layer.bias)
    return wide


def _empty(like: nn.Linear, inputs: int, outputs: int) -> nn.Linear:
    """A layer whose memory is not initialised, which takes longer than everything else here."""
    return nn.utils.skip_init(
        nn.Linear,
        inputs,
        outputs,
        bias=like.bias is not None,
        device=like.weight.device,
        dtype=like.weight.dtype,
    )


def widen_in_fast_dtype(model: PreTrainedModel, parameters: int) -> tuple[PreTrainedModel, str]:
    """`widen`, in the dtype of `fast_dtype`.

    Args:
        model, parameters: as for `widen`.

    Returns:
        The model and the name of its dtype.
    """
    name = fast_dtype(model, parameters)
    return widen(model, parameters, getattr(torch, name)), name


def fast_dtype(model: PreTrainedModel, parameters: int) -> str:
    """The name of the dtype, bfloat16 or float32, that has the faster pass over several tokens on this machine.

    A processor without matrix instructions for bfloat16 takes five times as long for 8 tokens as for one.

    Args:
        model, parameters: as for `widen`.
    """
    size = max(sum(p.numel() for p in model.parameters()), min(parameters, PROBE_PARAMETERS))

    def seconds(name: str) -> float:
        probe = widen(model, size, getattr(torch, name))
        # Other load on the machine only adds time.
        return min(measure_cost_curve(probe, (1, PROBE_TOKENS), context=8, repeats=1).seconds[1] for _ in range(PROBES))

    return min(("bfloat16", "float32"), key=seconds)
