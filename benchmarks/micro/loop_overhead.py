"""Time that a decoding step takes between two forward passes of the target, at batch 1."""

from __future__ import annotations

from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from benchmarks.harness.variants import ours
from benchmarks.micro.spread import spread
from hf_specgen import NgramCandidates
from hf_specgen.evaluation import WorkloadSettings
from hf_specgen.evaluation.measure import Variant
from hf_specgen.evaluation.workloads import SAMPLED, domain_prompts, encode, load

GENERATION: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "repetition penalty": {"repetition_penalty": 1.1},
}
VARIANTS = (
    Variant("prompt lookup k=10 n=2", partial(dict, prompt_lookup_num_tokens=10, max_matching_ngram_size=2)),
    Variant("n-grams k=16", ours(NgramCandidates(k=16))),
)


def loop_overhead(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """Milliseconds per step outside the target's forward pass."""
    model, tokenizer = load(WorkloadSettings())
    inputs = next(encode(tokenizer, domain_prompts(WorkloadSettings())["edit"][:1], 1))
    rows = []
    for name, arguments in GENERATION.items():
        for variant in VARIANTS:
            times = [
                _between_forwards(model, inputs, {**arguments, **variant.arguments(), "max_new_tokens": 128})
                for _ in range(2 if quick else 4 * repeats)
            ]
            rows.append({"generation": name, "variant": variant.name, **spread(times, "ms a step")})
    return rows


def _between_forwards(model: PreTrainedModel, inputs: dict[str, torch.Tensor], arguments: dict[str, Any]) -> float:
    """Milliseconds from the end of one forward pass to the start of the next, the median over the steps."""
    starts: list[float] = []
    ends: list[float] = []
    before = model.register_forward_pre_hook(lambda *_: starts.append(perf_counter()))
    after = model.register_forward_hook(lambda *_: ends.append(perf_counter()))
    try:
        torch.manual_seed(0)
        cast(Any, model).generate(**inputs, **arguments)
    finally:
        before.remove()
        after.remove()
    return 1000 * median(start - end for end, start in zip(ends, starts[1:], strict=False))
