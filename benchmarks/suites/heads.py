"""Medusa: the embedded heads against plain `generate`, and what training them costs."""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.progress import track
from transformers import PreTrainedModel

from benchmarks.common import PEERS, PLAIN, WIDE, Rows, spread
from benchmarks.throughput import domain_totals
from benchmarks.widen import widen
from hf_specgen import AutoCandidates, MedusaCandidates, NgramCandidates
from hf_specgen.adaptive import Fixed
from hf_specgen.evaluation.calibration import measure_cost
from hf_specgen.evaluation.measure import Total, Variant
from hf_specgen.evaluation.workloads import DOMAINS, EMBEDDED_HEADS, WorkloadSettings, load
from hf_specgen.heads import load_medusa
from hf_specgen.target.model_parts import decoder

GREEDY_DOMAINS = [domain for domain, generation in DOMAINS.items() if not generation["do_sample"]]


def medusa(repeats: int, quick: bool, wide: bool = False, batch_size: int = 1) -> Rows:
    """Tokens per second in the five domains; the tree is chosen for the T(q) measured in this run."""
    prompts = batch_size if quick or wide else 4
    settings = WorkloadSettings(
        prompts_per_domain=prompts, dtype="bfloat16" if wide else "float32", batch_size=batch_size
    )
    model, tokenizer = load(settings)
    if wide:
        model = widen(model, WIDE)
    variants = _variants(model)
    if batch_size > 1:
        variants = [variant for variant in variants if variant.batched]
    runs = [domain_totals(model, tokenizer, settings, variants, seed) for seed in track(range(repeats), "medusa")]
    rows: Rows = []
    for domain in (*DOMAINS, "greedy domains", "all"):
        for variant in variants:
            totals = [_total(run, domain, variant.name) for run in runs]
            plain = [_total(run, domain, PLAIN.name) for run in runs]
            speedups = [t.tokens_per_second / p.tokens_per_second for t, p in zip(totals, plain, strict=True)]
            row: dict[str, Any] = {"domain": domain, "variant": variant.name}
            row |= {"tokens/s": median(total.tokens_per_second for total in totals), **spread(speedups, "speedup")}
            if totals[0].steps:
                row["tokens/step"] = median(total.tokens_per_step for total in totals)
                row["beyond forward"] = median(map(_beyond_forward, totals))
                row["identical"] = all(total.identical for total in totals)
            rows.append(row)
    return rows


def _variants(model: PreTrainedModel) -> list[Variant]:
    heads = load_medusa(EMBEDDED_HEADS, model)
    heads.config.cost = asdict(measure_cost(model))
    sides = {
        "Medusa": MedusaCandidates(heads, policy=Fixed()),
        "n-grams or Medusa": AutoCandidates([NgramCandidates(k=16), MedusaCandidates(heads)]),
    }
    ours = [Variant(name, partial(dict, candidate_generator=candidates)) for name, candidates in sides.items()]
    return [PLAIN, PEERS[0], *ours]


def _total(run: dict[str, dict[str, Total]], domain: str, variant: str) -> Total:
    if domain == "greedy domains":
        return sum((run[name][variant] for name in GREEDY_DOMAINS), Total())
    return run[domain][variant]


def _beyond_forward(total: Total) -> float:
    """What a step takes beyond the target's forward pass, as a share of that."""
    seconds = [sample.speculation.seconds for sample in total.samples if sample.speculation is not None]
    forward = sum(s["forward"] for s in seconds)
    return sum(s["total"] - s["prefill"] for s in seconds) / forward - 1


def medusa_training(repeats: int, quick: bool) -> Rows:
    """Stage 1's throughput beside that of the bare target's forward pass on the same tokens.

    Forward, loss, backward and optimizer step of all heads, as `recipes/train_medusa.py` does them, in bf16.
    """
    sys.path.append(str(Path(__file__).resolve().parents[1] / "recipes"))
    from accelerate import Accelerator

    import train_medusa
    from common import parse_config
    from distillation import answers, load_target, target_states

    config = Path(__file__).resolve().parents[1] / "recipes" / "configs" / "medusa_reference.yaml"
    settings = parse_config(train_medusa.Settings, None, ["--config", str(config), "--precision", "bf16"])
    rows: Rows = []
    for name in ("embedded", "300M"):
        accelerator = Accelerator(mixed_precision="bf16")
        target, tokenizer = load_target(settings.target, accelerator)
        target = target if name == "embedded" else widen(target, WIDE).requires_grad_(False)
        heads, lora = train_medusa.make_heads(settings, target, tokenizer)
        module: Any = train_medusa.HeadsTraining(heads, lora)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3)
        loader = answers(settings, tokenizer, accelerator)
        ratios = []
        batches = iter(loader)
        for turn in range(1 + (1 if quick else 2 * repeats)):
            batch = next(batches)
            begin = perf_counter()
            with torch.no_grad():
                hidden = decoder(target)(batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)
                target.get_output_embeddings()(hidden.last_hidden_state)
            bare = perf_counter() - begin
            begin = perf_counter()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = module(batch, [target], target_states(target, batch)[0])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if turn:  # the first warms up
                ratios.append(bare / (perf_counter() - begin))
        rows.append({"target": name, **spread(ratios, "throughput / bare forward")})
    return rows
