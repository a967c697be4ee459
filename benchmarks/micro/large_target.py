"""Speed of a target of 8B parameters on a GPU, at batch 1.

The target is the embedded model in bfloat16, deepened and widened without changing its function.

PyTorch's attention kernels are chosen alike for all sides: without those of cuDNN, which plan anew for each length of
the text (see `hf_specgen.targets.attention`). Plain `generate` is measured with PyTorch's own choice too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.harness.variants import PLAIN, check_level
from benchmarks.micro.spread import spread
from hf_specgen import (
    Candidates,
    CombinedCandidates,
    DraftModelCandidates,
    EagleCandidates,
    FixedDepth,
    NgramCandidates,
)
from hf_specgen.evaluation import WorkloadSettings
from hf_specgen.evaluation.cost import measure_cost_curve, widen
from hf_specgen.evaluation.measure import Sample, Variant, measure_round
from hf_specgen.evaluation.workloads import (
    DOMAINS,
    EMBEDDED_DRAFT,
    EMBEDDED_EAGLE,
    domain_prompts,
    encode,
    load,
    load_model,
)

PARAMETERS, LAYERS = 8 * 10**9, 32
"""Of a target like Llama 3.1 8B: a pass takes as long as reading so many parameters, or the launch overhead of so many
layers."""
QUICK_PARAMETERS, QUICK_LAYERS = 20 * 10**6, 9
NEW_TOKENS, CONTEXT, WIDTHS = 64, 256, (1, 2, 4, 8, 16, 32, 64)
PLAINS = (PLAIN.name, "no drafts")
"""Beginnings of the names of plain decoding: by `generate`, and by calls that draft nothing, which can be captured."""


class Setup(NamedTuple):
    """The models, on the GPU if there is one."""

    model: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    device: str


def large_target(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """Speed of every variant, eager."""
    setup = _setup(quick)
    return _measure(setup, _eager(setup.draft), repeats, quick)


def large_target_graphs(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """Speed of passes captured as CUDA graphs; needs a GPU."""
    setup = _setup(quick)
    return _measure(setup, _captured(setup.draft), repeats, quick)


def large_target_latency(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """Latency of an eager pass by its number of tokens."""
    curve = measure_cost_curve(_setup(quick).model, WIDTHS, context=CONTEXT, repeats=2 * repeats + 1)
    return [
        {"tokens": width, "milliseconds": 1e3 * seconds, "over one token": curve.relative(width)}
        for width, seconds in zip(WIDTHS, curve.seconds, strict=True)
    ]


@cache
def _setup(quick: bool) -> Setup:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    small, tokenizer = load(WorkloadSettings(device=device, dtype="bfloat16"))
    model = widen(deepen(small, QUICK_LAYERS if quick else LAYERS), QUICK_PARAMETERS if quick else PARAMETERS)
    draft, _ = load_model(str(EMBEDDED_DRAFT), small.dtype, device)
    return Setup(model, draft, tokenizer, device)


Samples = dict[str, dict[str, list[tuple[Sample, Sample]]]]
"""By variant and domain, each with plain `generate` on the same prompt."""


def _measure(setup: Setup, variants: list[Variant], repeats: int, quick: bool) -> list[dict[str, Any]]:
    """Speed on prompts of five domains, after a prompt of each in which latencies are measured.

    All strategies run alike, eagerly or captured; the best plain setting is that of `PLAINS` which was fastest.

    In bfloat16 the target's own passes over one token and over several round differently, so that outputs diverge
    where two tokens are equally likely: `same tokens` is the share of the tokens before the first difference.
    """
    check_level(variants)
    variants, before = _with_kernels(variants), torch.backends.cuda.cudnn_sdp_enabled()
    try:
        run_prompts(setup, variants, [0], quick)
        samples = run_prompts(setup, variants, range(1, 1 + repeats), quick)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    plains = [by_domain for name, by_domain in samples.items() if name.startswith(PLAINS)]
    best = max(_tokens_per_second([s for pairs in one.values() for s, _ in pairs]) for one in plains)
    return [_row(name, by_domain, best) for name, by_domain in samples.items()]


def run_prompts(setup: Setup, variants: list[Variant], turns: Sequence[int], quick: bool) -> Samples:
    """All variants on the prompts of these numbers in each domain."""
    samples: Samples = {variant.name: {} for variant in variants}
    for domain, texts in domain_prompts(WorkloadSettings(prompts_per_domain=1 + max(turns))).items():
        for turn in turns:
            encoded = next(encode(setup.tokenizer, texts[turn : turn + 1], 1))
            inputs = {name: tensor.to(setup.device) for name, tensor in encoded.items()}
            generation = {"max_new_tokens": 16 if quick else NEW_TOKENS, **DOMAINS[domain]}
            measured = measure_round(setup.model, inputs, variants, generation, turn, first=turn)
            for name, sample in measured.items():
                samples[name].setdefault(domain, []).append((sample, measured[PLAIN.name]))
        if quick:
            break
    return samples


def deepen(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """The same function with so many layers: those added are computed like the last one and contribute nothing."""
    deep = copy.deepcopy(model)
    stack: Any = deep.model.layers
    for number in range(len(stack), layers):
        layer = copy.deepcopy(stack[-1])
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            for parameter in projection.parameters():  # weight and, in some models, bias
                torch.nn.init.zeros_(parameter)
        layer.self_attn.layer_idx = number
        stack.append(layer)
    kinds = getattr(deep.config, "layer_types", None)
    deep.config.num_hidden_layers = layers
    if kinds:
        deep.config.layer_types = [*kinds, *[kinds[-1]] * (layers - len(kinds))]
    return deep


def _with_kernels(variants: list[Variant]) -> list[Variant]:
    """The variants without cuDNN's attention, and plain `generate` with it, which is PyTorch's default on an H100."""

    def arguments(variant: Variant, cudnn: bool) -> dict[str, Any]:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        return variant.arguments()

    by_kernel = [(variant.name, variant, False) for variant in variants]
    by_kernel.append((f"{PLAIN.name}, cuDNN attention", PLAIN, True))
    return [Variant(name, partial(arguments, variant, cudnn)) for name, variant, cudnn in by_kernel]


def _eager(draft: PreTrainedModel) -> list[Variant]:
    strategies: dict[str, Callable[[], Candidates]] = {
        "n-grams": NgramCandidates,
        "n-grams + recycling": CombinedCandidates,
        "EAGLE-3": lambda: EagleCandidates(str(EMBEDDED_EAGLE)),
        "draft model": lambda: DraftModelCandidates(draft),
        "n-grams + draft model": lambda: CombinedCandidates([NgramCandidates(), DraftModelCandidates(draft)]),
    }
    return [
        PLAIN,
        Variant("prompt_lookup_num_tokens", lambda: {"prompt_lookup_num_tokens": 10}),
        Variant("assistant_model", lambda: {"assistant_model": draft}),
        *(Variant(name, partial(dict, candidate_generator=build())) for name, build in strategies.items()),
    ]


def _captured(draft: PreTrainedModel) -> list[Variant]:
    draft_model = DraftModelCandidates(draft, compile="graphs")
    strategies: dict[str, Candidates] = {
        "no drafts": NgramCandidates(policy=FixedDepth(0)),
        "n-grams": NgramCandidates(),
        "n-grams + recycling": CombinedCandidates(),
        "EAGLE-3": EagleCandidates(str(EMBEDDED_EAGLE)),
        "draft model": draft_model,
        "n-grams + EAGLE-3": CombinedCandidates([NgramCandidates(), EagleCandidates(str(EMBEDDED_EAGLE))]),
        "n-grams + draft model": CombinedCandidates([NgramCandidates(), draft_model]),
    }
    captured = (
        Variant(f"{name}, graphs", partial(dict, candidate_generator=strategy, compile="graphs"))
        for name, strategy in strategies.items()
    )
    return [PLAIN, *captured]


def _row(name: str, samples: dict[str, list[tuple[Sample, Sample]]], best_plain: float) -> dict[str, Any]:
    every = [pair for pairs in samples.values() for pair in pairs]
    row = {"variant": name, **spread([s.seconds / (s.tokens or 1) for s, _ in every], "seconds per token")}
    row["over default plain"] = _speedup(every)
    row["over best plain"] = _tokens_per_second([sample for sample, _ in every]) / best_plain
    steps = sum(s.speculation.steps for s, _ in every if s.speculation is not None)
    row["tokens per step"] = sum(s.tokens for s, _ in every) / steps if steps else 1.0
    row["same tokens"] = sum(_common(*pair) for pair in every) / (sum(plain.tokens for _, plain in every) or 1)
    return {**row, **{domain: _speedup(pairs) for domain, pairs in samples.items()}}


def _speedup(pairs: list[tuple[Sample, Sample]]) -> float:
    """By tokens per second: lengths can differ where outputs diverge."""
    ours, plain = ([pair[variant] for pair in pairs] for variant in (0, 1))
    return _tokens_per_second(ours) / _tokens_per_second(plain)


def _tokens_per_second(samples: list[Sample]) -> float:
    return sum(sample.tokens for sample in samples) / sum(sample.seconds for sample in samples)


def _common(ours: Sample, plain: Sample) -> int:
    """Tokens of plain `generate` before the first that differs."""
    new = [sample.ids[0, sample.ids.shape[1] - sample.tokens :].tolist() for sample in (ours, plain)]
    differs = [number for number, pair in enumerate(zip(*new, strict=False)) if pair[0] != pair[1]]
    return differs[0] if differs else min(map(len, new))
