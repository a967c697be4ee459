"""Measures latencies: T(q) of a target, passes of drafters; and pads a model to the latency of a larger one.

Speculative decoding is fast where T(q) is nearly flat, which holds while decoding is limited by memory bandwidth.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from statistics import median
from typing import Any, cast

import numpy as np
import torch
from torch.nn.functional import pad
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from hf_specgen import compat
from hf_specgen.call_statistics import Statistics
from hf_specgen.candidates import Candidates
from hf_specgen.depth import CostCurve, FixedDepth, LatencyModel
from hf_specgen.depth.calibrate import prefilled_target, time_pass
from hf_specgen.depth.latency import ANY_DRAFTER, Bucket, DraftLatency
from hf_specgen.targets.model_parts import text_config

QUERIES = (1, 2, 4, 8, 24, 64)


def measure_cost_curve(
    model: PreTrainedModel,
    queries: Sequence[int] = QUERIES,
    context: int = 256,
    batch: int = 1,
    repeats: int = 7,
    progress_bar: bool = False,
) -> CostCurve:
    """Time the target's forward pass as the decoding loop runs it: the same cache and masks, a chain of draft tokens.

    The sizes are interleaved within each repeat, so that other load on the machine affects all of them; the first
    repeat is a warm-up and not counted; each time is the median over the repeats.
    """
    config = text_config(model)
    limit = getattr(config, "max_position_embeddings", None) or 2**31
    if context + queries[-1] > limit:
        raise ValueError(f"context {context} and {queries[-1]} queries need more than the model's {limit} positions")
    tokens = torch.randint(config.vocab_size, (batch, context), generator=torch.Generator().manual_seed(0))
    times: dict[int, list[float]] = {q: [] for q in queries}
    with torch.no_grad():
        target = prefilled_target(model, tokens)
        for repeat in tqdm(range(repeats + 1), f"batch size {batch}", disable=not progress_bar, unit="round"):
            for q in queries:
                seconds = time_pass(target, tokens[:, 0].tolist(), q)
                if repeat:
                    times[q].append(seconds)
    return CostCurve(tuple(queries), tuple(median(times[q]) for q in queries), context, batch)


def least_acceptance(curve: CostCurve) -> tuple[float, int]:
    """The acceptance rate of a draft token above which free drafts gain at their best depth, and that depth.

    Where every draft token is accepted with probability a, a chain of k draft tokens yields 1 + a + … + a^k tokens in
    the time T(1 + k). Drafts that take time of their own need a higher one.

    Example:
        >>> least_acceptance(CostCurve((1, 2, 8, 24), (1.0, 1.4, 3.1, 3.0), context=256, batch=1))
        (0.4, 1)
        >>> least_acceptance(CostCurve((1, 2, 4, 24), (1.0, 1.9, 2.8, 3.0), context=256, batch=1))
        (0.66, 11)
    """
    depths = np.arange(1, curve.queries[-1])
    seconds = np.array([curve.relative(1 + int(depth)) for depth in depths])
    acceptance = np.arange(0.01, 1.0, 0.01)[:, None]
    tokens = (1 - acceptance ** (1 + depths)) / (1 - acceptance)
    gains = tokens / seconds
    paying = np.flatnonzero(gains.max(axis=1) >= 1)
    if not len(paying):
        return 1.0, int(depths[-1])
    return round(float(acceptance[paying[0], 0]), 2), int(depths[gains[paying[0]].argmax()])


def measure_latency(
    model: PreTrainedModel,
    strategies: Sequence[Candidates],
    *,
    rows: Sequence[int] = (1,),
    context: int = 256,
    progress_bar: bool = False,
) -> LatencyModel:
    """The latency model of a target, and of the drafters of strategies, for `AdaptiveDepth(latency=…)`.

    That of a drafter is the mean time of its forward passes in the second of two short calls.
    """
    buckets = []
    settings = {"policy": FixedDepth(4), "max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    for count in rows:
        drafters = {ANY_DRAFTER: DraftLatency()}
        ids = torch.arange(8).repeat(count, 4).to(compat.input_device(model))
        arguments = {"attention_mask": torch.ones_like(ids), **settings}
        for candidates in strategies:
            if not candidates.negligible_draft_cost:
                for _ in range(2):
                    cast(Any, model).generate(ids, candidate_generator=candidates, **arguments)
                statistics = cast(Statistics, candidates.speculation)
                passes = sum(len(step.passes) for step in statistics.passes)
                latency = DraftLatency(seconds=(statistics.seconds.get("draft", 0.0) / max(1, passes),))
                drafters[str(candidates.profile_key()[0])] = latency
        curve = measure_cost_curve(model, context=context, batch=count, progress_bar=progress_bar)
        buckets.append(Bucket(curve, drafters))
    return LatencyModel(tuple(buckets))


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
