"""Speed of a 300M target on a CPU with and without packed weights, at batch 1."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.harness.variants import PLAIN
from benchmarks.micro.spread import spread
from hf_specgen import (
    Candidates,
    CombinedCandidates,
    DraftModelCandidates,
    EagleCandidates,
    FixedDepth,
    NgramCandidates,
)
from hf_specgen.evaluation.measure import Variant, measure_round
from hf_specgen.evaluation.widen import widen
from hf_specgen.evaluation.workloads import (
    DOMAINS,
    EMBEDDED_DRAFT,
    EMBEDDED_EAGLE,
    WorkloadSettings,
    domain_prompts,
    encode,
    load,
)

PARAMETERS, QUICK_PARAMETERS, NEW_TOKENS = 300 * 10**6, 20 * 10**6, 64


def packed_weights(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """Speed of every side in float32, and in bfloat16 where this processor multiplies it."""
    with_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    dtypes = (torch.float32, torch.bfloat16) if with_bfloat16 else (torch.float32,)
    return [row for dtype in dtypes for row in _of_dtype(dtype, repeats, quick)]


def _of_dtype(dtype: torch.dtype, repeats: int, quick: bool) -> list[dict[str, Any]]:
    """On prompts of five domains, after a first prompt of each from which latencies are learnt."""
    small, tokenizer = load(WorkloadSettings(dtype=str(dtype).removeprefix("torch.")))
    draft = AutoModelForCausalLM.from_pretrained(EMBEDDED_DRAFT, dtype=small.dtype).eval()
    model = widen(small, QUICK_PARAMETERS if quick else PARAMETERS)
    strategies: dict[str, Callable[[], Candidates]] = {
        "no drafts": lambda: NgramCandidates(policy=FixedDepth(0)),
        "n-grams + recycling": CombinedCandidates,
        "EAGLE-3": lambda: EagleCandidates(str(EMBEDDED_EAGLE)),
        "draft model": lambda: DraftModelCandidates(draft),
        "n-grams + draft model": lambda: CombinedCandidates([NgramCandidates(), DraftModelCandidates(draft)]),
    }
    ordinary = ("draft model",)
    variants = [
        PLAIN,
        Variant("assistant_model", lambda: {"assistant_model": draft}),
        *(
            Variant(name, partial(dict, candidate_generator=strategies[name](), pack_weights=False))
            for name in ordinary
        ),
        *(
            Variant(f"{name}, packed", partial(dict, candidate_generator=build(), pack_weights=True))
            for name, build in strategies.items()
        ),
    ]
    prompts = domain_prompts(WorkloadSettings(prompts_per_domain=1 + repeats))
    seconds: dict[str, dict[str, list[float]]] = {
        variant.name: {domain: [] for domain in prompts} for variant in variants
    }
    identical = {variant.name: True for variant in variants}
    for turn in range(2 if quick else 1 + repeats):
        for number, (domain, texts) in enumerate(prompts.items()):
            if quick and number > 0:
                continue
            inputs = next(encode(tokenizer, texts[turn : turn + 1], 1))
            generation = {"max_new_tokens": 8 if quick else NEW_TOKENS, **DOMAINS[domain]}
            samples = measure_round(model, inputs, variants, generation, turn, first=turn + number)
            if turn == 0:  # models are checked, weights packed, latencies learnt
                continue
            for name, sample in samples.items():
                identical[name] &= sample.ids.equal(samples[PLAIN.name].ids)
                seconds[name][domain].append(sample.seconds / (sample.tokens or 1))
    rows = [_row(name, by_domain, seconds[PLAIN.name], identical[name]) for name, by_domain in seconds.items()]
    return [{"dtype": str(dtype).removeprefix("torch."), **row} for row in rows]


def _row(name: str, seconds: dict[str, list[float]], plain: dict[str, list[float]], identical: bool) -> dict[str, Any]:
    every = [value for values in seconds.values() for value in values]
    speedups = {domain: sum(plain[domain]) / sum(values) for domain, values in seconds.items() if values}
    row = {"variant": name, **spread(every, "seconds per token"), "identical": identical}
    return {**row, "over plain": sum(map(sum, plain.values())) / sum(every), **speedups}
