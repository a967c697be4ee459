"""Time of a decoding step at 4,000 cached tokens, with a draft of 5 tokens and without a draft."""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from benchmarks.harness.variants import PLAIN, ours
from benchmarks.micro.spread import spread
from benchmarks.workloads.scripted import AlwaysRejected
from hf_specgen import FixedDepth
from hf_specgen.evaluation import WorkloadSettings
from hf_specgen.evaluation.measure import Variant
from hf_specgen.evaluation.workloads import load

CONTEXT, NEW_TOKENS = 4000, 32
VARIANTS = (
    PLAIN,
    Variant("speculative, no drafts", ours(AlwaysRejected(policy=FixedDepth(0)))),
    Variant("speculative, drafts of 5 tokens", ours(AlwaysRejected(k=5, token=3))),
)


def long_context(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """Milliseconds per step, whatever is accepted."""
    model, _ = load(WorkloadSettings())
    model.config.max_position_embeddings = CONTEXT + 2 * NEW_TOKENS  # what it generates does not matter
    ids = torch.randint(5, 8000, (1, CONTEXT), generator=torch.Generator().manual_seed(0))
    times: dict[str, list[float]] = {variant.name: [] for variant in VARIANTS}
    for _ in range(2 if quick else 3 * repeats):
        for variant in VARIANTS:
            times[variant.name].append(_step_time(model, ids, variant.arguments()))
    return [{"variant": name, **spread(values, "ms a step")} for name, values in times.items()]


def _step_time(model: PreTrainedModel, ids: torch.Tensor, arguments: dict[str, Any]) -> float:
    """Milliseconds per step, the median without the first two steps."""
    starts: list[float] = []
    handle = model.register_forward_pre_hook(lambda *_: starts.append(perf_counter()))
    try:
        cast(Any, model).generate(ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, **arguments)
    finally:
        handle.remove()
    return 1000 * median(after - before for before, after in pairwise(starts[2:]))
