"""Measures T(q): the latency of a forward pass of the target over q tokens per row.

Speculative decoding is fast where T(q) is nearly flat, which holds while decoding is limited by memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_specgen import compat
from hf_specgen.depth import CostCurve
from hf_specgen.depth.calibrate import QUERIES, time_pass
from hf_specgen.targets.base import Target
from hf_specgen.tree import DraftTree


def measure_cost_curve(
    model: PreTrainedModel,
    queries: Sequence[int] = QUERIES,
    context: int = 256,
    batch: int = 1,
    repeats: int = 7,
) -> CostCurve:
    """Time the target's forward pass as the decoding loop runs it: the same cache and masks, a chain of draft tokens.

    The sizes are interleaved within each repeat, so that other load on the machine affects all of them; the first
    repeat is a warm-up and not counted; each time is the median over the repeats.

    Args:
        model: the target.
        queries: tokens per row to time, increasing from 1 (verifying k draft tokens takes T(k + 1)).
        context: cached tokens in each row.
        batch: rows.
        repeats: counted repeats.

    Raises:
        ValueError: if a number is out of range, or the model has fewer positions than context + queries.

    Example:
        >>> # curve = measure_cost_curve(model); curve.relative(6)  # T(6) / T(1): verification of 5 draft tokens
    """
    if not queries or queries[0] != 1 or sorted(set(queries)) != list(queries):
        raise ValueError(f"queries must increase from 1, got {list(queries)}")
    for name, value in (("context", context), ("batch", batch), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31
    if context + queries[-1] > limit:
        raise ValueError(f"context {context} and {queries[-1]} queries need more than the model's {limit} positions")
    tokens = torch.randint(
        model.config.get_text_config().vocab_size, (batch, context), generator=torch.Generator().manual_seed(0)
    )
    times: dict[int, list[float]] = {q: [] for q in queries}
    with torch.no_grad():
        target = _read(model, tokens)
        for repeat in range(repeats + 1):
            for q in queries:
                seconds = time_pass(target, tokens[:, 0].tolist(), q)
                if repeat:
                    times[q].append(seconds)
    return CostCurve(tuple(queries), tuple(median(times[q]) for q in queries), context, batch)


def _read(model: PreTrainedModel, tokens: torch.Tensor) -> Target:
    """The target with `tokens`, `[batch, context]`, in its cache."""
    tokens = tokens.to(compat.input_device(model))
    positions = torch.arange(tokens.shape[1], device=compat.input_device(model))[None].expand(len(tokens), -1)
    arguments = {"attention_mask": torch.ones_like(tokens), "position_ids": positions, "use_cache": True}
    target = Target(model, tokens, GenerationConfig(), arguments)
    target.prefill(DraftTree.empty(len(tokens)))
    return target
