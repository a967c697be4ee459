"""Tokens per second on real prompts: five domains at batch 1, and batches of mixed domains."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.progress import track
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.common import OURS, PEERS, PLAIN, WIDE, Rows, ours, spread
from benchmarks.widen import widen
from hf_specgen import NgramHistory
from hf_specgen.evaluation.measure import Total, Variant, interleave
from hf_specgen.evaluation.workloads import DOMAINS, WorkloadSettings, domain_prompts, encode, load


def variants() -> list[Variant]:
    """All sides; the history begins empty and learns from one prompt for the next."""
    history = NgramHistory()
    return [PLAIN, *PEERS, OURS, Variant("ours k=16, history", partial(ours, k=16, history=history))]


def domains(repeats: int, quick: bool, wide: bool = False) -> Rows:
    """Tokens per second in the five domains, batch 1."""
    prompts = 2 if quick or wide else 8
    settings = WorkloadSettings(prompts_per_domain=prompts, dtype="bfloat16" if wide else "float32")
    model, tokenizer = load(settings)
    if wide:
        model = widen(model, WIDE)
    totals = [domain_totals(model, tokenizer, settings, variants(), seed) for seed in track(range(repeats), "repeats")]
    rows: Rows = []
    for domain in (*DOMAINS, "all"):
        plain = [run[domain]["plain"].tokens_per_second for run in totals]
        for variant in variants():
            runs = [run[domain][variant.name] for run in totals]
            speedups = [run.tokens_per_second / base for run, base in zip(runs, plain, strict=True)]
            row = {"domain": domain, "variant": variant.name, "tokens/s": median(r.tokens_per_second for r in runs)}
            row |= spread(speedups, "speedup")
            if variant.name.startswith("ours"):
                row |= {
                    "tokens/step": median(r.tokens_per_step for r in runs),
                    "identical": all(r.identical for r in runs),
                }
            rows.append(row)
    return rows


def domain_totals(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: WorkloadSettings,
    variants: Sequence[Variant],
    seed: int,
) -> dict[str, dict[str, Total]]:
    """Totals by domain and variant, "all" included."""
    result: dict[str, dict[str, Total]] = {"all": {c.name: Total() for c in variants}}
    for domain, prompts in domain_prompts(settings).items():
        result[domain] = {c.name: Total() for c in variants}
        generation = {"max_new_tokens": settings.max_new_tokens, **DOMAINS[domain]}
        for samples in interleave(
            model, encode(tokenizer, prompts, settings.batch_size), variants, generation, 1000 * seed
        ):
            for name, sample in samples.items():
                result[domain][name].add(sample, samples[PLAIN.name])
        for name, total in result[domain].items():
            result["all"][name] += total
    return result


def batch(repeats: int, quick: bool) -> Rows:
    """Batches of 8 prompts of mixed domains, greedy and sampled."""
    settings = WorkloadSettings(prompts_per_domain=8)
    rows: Rows = []
    for wide in (False, True):
        model, tokenizer = load(WorkloadSettings(dtype="bfloat16" if wide else "float32"))
        model = widen(model, WIDE) if wide else model
        mixed = [prompt for group in zip(*domain_prompts(settings).values(), strict=True) for prompt in group]
        prompts = mixed[: 8 if quick or wide else 16]
        sides = [PLAIN, Variant("ours k=5", partial(ours, k=5))]
        for name, generation in (("greedy", {}), ("sampled", DOMAINS["math"])):
            runs = [
                list(interleave(model, encode(tokenizer, prompts, 8), sides, {"max_new_tokens": 128, **generation}, s))
                for s in track(range(repeats), f"batch {name}")
            ]
            for variant in sides[1:]:
                speedups = [_ratio(run, variant.name) for run in runs]
                same = all(torch.equal(s[variant.name].ids, s["plain"].ids) for run in runs for s in run)
                target = "300M bf16" if wide else "embedded fp32"
                row = {"target": target, "generation": name, "variant": variant.name}
                rows.append({**row, **spread(speedups, "speedup"), "identical": same})
    return rows


def _ratio(run: list[dict[str, Any]], name: str) -> float:
    """Throughput over plain: all write the same number of tokens for each batch if they write the same tokens."""
    rates = {n: sum(s[n].tokens for s in run) / sum(s[n].seconds for s in run) for n in (name, "plain")}
    return rates[name] / rates["plain"]
