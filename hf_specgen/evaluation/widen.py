"""Function-preserving widening: the same function with more parameters, to measure the latency of a larger target.

Every MLP gets additional neurons whose output columns are zero. They are computed like other neurons and contribute
nothing: acceptance is that of the small model, latency that of a larger one.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specgen.evaluation.cost import measure_cost_curve

SLOW_STEP = 4.0
"""T(8) / T(1) above which bfloat16 is not used: 5.6 on a processor without matrix instructions for it, else below 2."""


def widen(model: PreTrainedModel, parameters: int) -> PreTrainedModel:
    """A model with about `parameters` parameters that computes the same function as `model`.

    Args:
        model: a Llama-like model, whose MLPs have `gate_proj`, `up_proj` and `down_proj`.
        parameters: size of the result; at least that of `model`.

    Returns:
        A new model with the same dtype and device; `model` is unchanged.

    Raises:
        ValueError: if `model` is larger than that.
    """
    config = copy.deepcopy(model.config)
    per_neuron = 3 * config.hidden_size * config.num_hidden_layers
    missing = parameters - sum(p.numel() for p in model.parameters())
    if missing < 0:
        raise ValueError(f"parameters must be at least the model's {parameters - missing}, got {parameters}")
    config.intermediate_size += missing // per_neuron
    wide = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    weights = model.state_dict()
    with torch.no_grad():
        for name, tensor in wide.state_dict().items():
            source = weights[name]
            if tensor.shape == source.shape:
                tensor.copy_(source)
            elif name.endswith("down_proj.weight"):
                tensor.zero_()
                tensor[:, : source.shape[1]] = source
            else:
                tensor[: source.shape[0]] = source
    wide.generation_config = cast(Any, model).generation_config
    return cast(Any, wide).to(model.device).eval()


def widen_in_fast_dtype(model: PreTrainedModel, parameters: int) -> tuple[PreTrainedModel, str]:
    """`widen`, in bfloat16 where this machine has fast kernels for passes over several tokens, else in float32.

    Args:
        model, parameters: as for `widen`.

    Returns:
        The model and the name of its dtype.
    """
    wide = widen(model, parameters)
    half = cast(PreTrainedModel, copy.deepcopy(wide).to(torch.bfloat16))  # type: ignore[arg-type]
    curve = measure_cost_curve(half, (1, 8), context=32, repeats=3)
    return (half, "bfloat16") if curve.relative(8) <= SLOW_STEP else (wide, "float32")
