"""Measures latencies: T(q) of a target, passes of drafters.

Speculative decoding is fast where T(q) is nearly flat, which holds while decoding is limited by memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, cast

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from hf_specgen import compat
from hf_specgen.call_statistics import Statistics
from hf_specgen.candidates import Candidates
from hf_specgen.depth import CostCurve, FixedDepth, LatencyModel
from hf_specgen.depth.calibrate import prefilled_target, time_pass
from hf_specgen.depth.latency import ANY_DRAFTER, Bucket, DraftLatency
from hf_specgen.targets.model_parts import text_config
from hf_specgen.targets.support import check_model

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
    check_model(model)
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder, and only latencies of decoder-only models are measured "
            "before a call; leave latency= out, so that its calls measure them"
        )
    config = text_config(model)
    limit = getattr(config, "max_position_embeddings", None) or 2**31
    if context + queries[-1] > limit:
        raise ValueError(f"context {context} and {queries[-1]} queries need more than the model's {limit} positions")
    times: dict[int, list[float]] = {q: [] for q in queries}
    with torch.no_grad(), compat.default_device():
        tokens = torch.randint(config.vocab_size, (batch, context), generator=torch.Generator().manual_seed(0))
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
        ids = torch.arange(8, device=compat.input_device(model)).repeat(count, 4)
        arguments = {"attention_mask": torch.ones_like(ids), **settings}
        for candidates in strategies:
            if not candidates.negligible_draft_cost:
                for _ in range(2):
                    cast(Any, model).generate(ids, candidate_generator=candidates, **arguments)
                statistics = cast(Statistics, candidates.speculation)
                passes = sum(len(step.tokens_per_pass) for step in statistics.batch_steps)
                latency = DraftLatency(seconds=(statistics.seconds.get("draft", 0.0) / max(1, passes),))
                drafters[str(candidates.profile_key()[0])] = latency
        curve = measure_cost_curve(model, context=context, batch=count, progress_bar=progress_bar)
        buckets.append(Bucket(curve, drafters))
    return LatencyModel(tuple(buckets))
