"""Measures T(q): the latency of a forward pass of the target over q tokens per row.

Speculative decoding is fast where T(q) is nearly flat, which holds while decoding is limited by memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from time import perf_counter

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_specgen import compat
from hf_specgen.depth import CostCurve
from hf_specgen.evaluation.measure import wait
from hf_specgen.targets.target import Target
from hf_specgen.tree import DraftTree

QUERIES = (1, 2, 4, 8, 16, 32)
"""Tokens per row of the timed passes: up to a draft of 31 tokens and the pending token."""


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
    _check_queries(queries)
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
                seconds = _forward(target, tokens, q)
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


def _forward(target: Target, tokens: torch.Tensor, queries: int) -> float:
    """Seconds of one pass over the pending token and `queries - 1` draft tokens, all of which are rolled back."""
    tree = DraftTree.chains([row[: queries - 1] for row in tokens.repeat(1, 1 + queries // tokens.shape[1]).tolist()])
    pending = tokens[:, 0].to(target.device)
    wait(target.device)
    begin = perf_counter()
    target.forward(tree, pending)
    wait(target.device)
    seconds = perf_counter() - begin
    target.rewind([0] * len(tokens))
    return seconds


def _check_queries(queries: Sequence[int]) -> None:
    if not queries or queries[0] != 1 or any(b <= a for a, b in pairwise(queries)):
        raise ValueError(f"queries must increase from 1, got {list(queries)}")
