"""Speed of a target of 8B parameters on a GPU, at batch 1.

The target is the bundled model in bfloat16, deepened and widened without changing its function.

PyTorch's attention kernels are chosen alike for all sides: without those of cuDNN, which plan anew for each length of
the text (see `hf_specgen.targets.attention`). Plain `generate` is measured with PyTorch's own choice too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import cache, partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.harness.rounds import measure_round
from benchmarks.harness.variants import PLAIN, check_level
from benchmarks.harness.wide import widen
from benchmarks.micro.operation_counter import each_step, recognised_passes
from hf_specgen import (
    Candidates,
    CombinedCandidates,
    DraftModelCandidates,
    EagleCandidates,
    FixedDepth,
    NgramCandidates,
    Statistics,
)
from hf_specgen.evaluation.measure import Sample, Variant
from hf_specgen.evaluation.workloads import BUNDLED_DRAFT, BUNDLED_EAGLE, DOMAINS, domain_prompts, encode, load

PARAMETERS, LAYERS = 8 * 10**9, 32
"""Of a target like Llama 3.1 8B: a pass takes as long as reading these parameters, or as the launch overhead of these
layers."""
QUICK_PARAMETERS, QUICK_LAYERS = 20 * 10**6, 9
NEW_TOKENS = 64
PLAINS = (PLAIN.name, "no drafts")
"""Beginnings of the names of plain decoding: by `generate`, and by calls that draft nothing, which can be captured."""


class Setup(NamedTuple):
    """The models, on the GPU if there is one."""

    model: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    device: str


def large_target(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """Speed of every strategy and of those of Transformers, eager."""
    setup = large_setup(quick)
    peers = {"prompt_lookup_num_tokens": 10, "assistant_model": setup.draft}
    variants = [Variant(name, partial(dict, {name: value})) for name, value in peers.items()]
    return _measure(setup, [PLAIN, *variants, *_variants(setup.draft, "eager", False)], repeats, quick)


def large_target_graphs(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """Speed with CUDA graphs, and the milliseconds of a step: target pass, drafter passes, rest.

    The limit is the time in which the target's weights can be read from memory. Without a GPU nothing is captured.
    """
    setup = large_setup(quick)
    limit = 1e3 * _read_bytes(setup.model) / bandwidth(setup.device)
    mode = "graphs" if setup.device == "cuda" else "auto"
    # On texts of a few tokens adaptive depth may find that drafting is not faster.
    variants = _variants(setup.draft, "graphs", mode, k=4 if quick else "auto")
    rows = {row["variant"]: row for row in _measure(setup, [PLAIN, *variants], repeats, quick)}
    for variant in variants:
        rows[variant.name] |= {**_split_steps(setup, variant, quick), "limit, ms": limit}
    return list(rows.values())


@cache
def large_setup(quick: bool) -> Setup:
    """The target of 8B parameters, a small one for a quick run, and its draft model."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    small, tokenizer = load(device=device, dtype="bfloat16")
    model = widen(deepen(small, QUICK_LAYERS if quick else LAYERS), QUICK_PARAMETERS if quick else PARAMETERS)
    draft, _ = load(str(BUNDLED_DRAFT), small.dtype, device)
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
    best = max(throughput([s for pairs in one.values() for s, _ in pairs]) for one in plains)
    return [_row(name, by_domain, best) for name, by_domain in samples.items()]


def run_prompts(setup: Setup, variants: list[Variant], turns: Sequence[int], quick: bool) -> Samples:
    """All variants on the prompts of these numbers in each domain."""
    samples: Samples = {variant.name: {} for variant in variants}
    for domain, texts in domain_prompts(1 + max(turns)).items():
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


def throughput(samples: Sequence[Sample]) -> float:
    """Tokens per second: the sum of tokens divided by the sum of time, never a mean of rates."""
    return sum(one.tokens for one in samples) / sum(one.seconds for one in samples)


def deepen(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """The model with `layers` layers: those added are computed like the last one and contribute nothing."""
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


def _variants(draft: PreTrainedModel, name: str, mode: Any, k: Any = "auto") -> list[Variant]:
    """Strategies with eager or with captured passes."""

    def small() -> Candidates:
        return DraftModelCandidates(draft, k=k)

    strategies: dict[str, Candidates] = {
        "no drafts": NgramCandidates(policy=FixedDepth(0)),
        "n-grams": NgramCandidates(),
        "n-grams + recycling": CombinedCandidates(),
        "EAGLE-3": EagleCandidates(str(BUNDLED_EAGLE), k=k),
        "draft model": small(),
        "n-grams + draft model": CombinedCandidates([NgramCandidates(), small()]),
    }
    return [
        Variant(f"{strategy}, {name}", partial(dict, candidate_generator=candidates, compile=mode))
        for strategy, candidates in strategies.items()
    ]


def _split_steps(setup: Setup, variant: Variant, quick: bool) -> dict[str, float]:
    """Milliseconds of a step after the prompt, and of its passes, on a prompt of each domain.

    The time of a step is that of an ordinary call. The passes are timed in a second call, which waits for the GPU
    before and after each of them, so that the rest includes what the first call overlaps.
    """
    statistics = [_call_statistics(setup, call) for call in _calls(setup, variant, quick)]
    steps = sum(len(one.batch_steps) for one in statistics)
    seconds = sum(one.seconds[part] for one in statistics for part in ("draft", "forward", "verify", "policy"))
    passes = [_pass_seconds(setup.model, call) for call in _calls(setup, variant, quick)]
    target, drafter = (sum(one[part] for one in passes) for part in (0, 1))
    total, target, drafter = (1e3 * value / max(1, steps) for value in (seconds, target, drafter))
    rest = total - target - drafter
    return {"step, ms": total, "target pass, ms": target, "drafter passes, ms": drafter, "rest, ms": rest}


def _calls(setup: Setup, variant: Variant, quick: bool) -> Iterator[dict[str, Any]]:
    """The arguments of a call for a prompt of each domain, each made before, so that it captures nothing."""
    for domain, texts in domain_prompts(1).items():
        inputs = {name: one.to(setup.device) for name, one in next(encode(setup.tokenizer, texts, 1)).items()}
        call = {**inputs, "max_new_tokens": 16 if quick else NEW_TOKENS, **DOMAINS[domain], **variant.arguments()}
        _call_statistics(setup, call)
        yield call
        if quick:
            return


def _call_statistics(setup: Setup, call: dict[str, Any]) -> Statistics:
    torch.manual_seed(0)
    cast(Any, setup.model).generate(**call)
    statistics: Statistics = call["candidate_generator"].speculation
    return statistics


def _pass_seconds(model: PreTrainedModel, call: dict[str, Any]) -> tuple[float, float]:
    """Seconds of the target's and of the drafter's passes after the prefill of a call."""
    torch.manual_seed(0)
    with recognised_passes(_synchronized) as passes, each_step(lambda: dict(passes.seconds)) as marks:
        cast(Any, model).generate(**call)
    decoding = {module: seconds - marks[0].get(module, 0.0) for module, seconds in marks[-1].items()}
    return decoding.pop(model, 0.0), sum(decoding.values())


def _synchronized() -> float:
    """The time once the GPU, if there is one, has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return perf_counter()


def bandwidth(device: str) -> float:
    """Bytes per second that the device reads: of copies between two buffers, the fastest of a few."""
    source = torch.zeros(2**28 if device == "cuda" else 2**24, dtype=torch.uint8, device=device)
    destination, times = torch.empty_like(source), []
    for _ in range(10):
        begin = _synchronized()
        destination.copy_(source)
        times.append(_synchronized() - begin)
    return 2 * source.numel() / min(times)


def _read_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights that a pass reads: without the table of embeddings, unless it is the output matrix too."""
    embeddings = cast(Any, model.get_input_embeddings()).weight
    is_shared = embeddings is cast(Any, model.get_output_embeddings()).weight
    weights = [one for one in model.parameters() if is_shared or one is not embeddings]
    return sum(one.numel() * one.element_size() for one in weights)


def _row(name: str, samples: dict[str, list[tuple[Sample, Sample]]], best_plain: float) -> dict[str, Any]:
    every = [pair for pairs in samples.values() for pair in pairs]
    times = [sample.seconds / (sample.tokens or 1) for sample, _ in every]
    row: dict[str, Any] = {"variant": name, "seconds per token": median(times)}
    row |= {"lowest": min(times), "highest": max(times)}
    row["over default plain"] = _speedup(every)
    row["over best plain"] = throughput([sample for sample, _ in every]) / best_plain
    steps = sum(s.speculation.steps for s, _ in every if s.speculation is not None)
    row["tokens per step"] = sum(s.tokens for s, _ in every) / steps if steps else 1.0
    row["same tokens"] = sum(_common(*pair) for pair in every) / (sum(plain.tokens for _, plain in every) or 1)
    return row | {domain: _speedup(pairs) for domain, pairs in samples.items()}


def _speedup(pairs: list[tuple[Sample, Sample]]) -> float:
    """By tokens per second: lengths can differ where outputs diverge."""
    ours, plain = ([pair[variant] for pair in pairs] for variant in (0, 1))
    return throughput(ours) / throughput(plain)


def _common(ours: Sample, plain: Sample) -> int:
    """Tokens of plain `generate` before the first that differs."""
    new = [sample.ids[0, sample.ids.shape[1] - sample.tokens :].tolist() for sample in (ours, plain)]
    differs = [number for number, pair in enumerate(zip(*new, strict=False)) if pair[0] != pair[1]]
    return differs[0] if differs else min(map(len, new))
