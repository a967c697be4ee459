"""Draft models and layer skip against Transformers' own, with the very same weights and the same k."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any, cast

from rich.progress import track
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.common import PLAIN, WIDE, Rows, spread
from benchmarks.throughput import domain_totals
from benchmarks.widen import widen
from hf_specgen import DraftModelCandidates, LayerSkipCandidates
from hf_specgen.evaluation.analysis import speedup_limit
from hf_specgen.evaluation.measure import Total, Variant
from hf_specgen.evaluation.workloads import DOMAINS, EMBEDDED_ADAPTER, EMBEDDED_DRAFT, WorkloadSettings, load
from hf_specgen.heads.exit_head import exit_layer_of

DRAFT_K, SKIP_K = 4, 1


def drafting(repeats: int, quick: bool, wide: bool = False) -> Rows:
    """Tokens per second over the five domains, batch 1."""
    settings = WorkloadSettings(prompts_per_domain=1 if quick or wide else 2, dtype="bfloat16" if wide else "float32")
    model, tokenizer = load(settings)
    if wide:
        model = widen(model, WIDE)
    variants = _variants(model)
    runs = [domain_totals(model, tokenizer, settings, variants, seed) for seed in track(range(repeats), "drafting")]
    rows: Rows = []
    for domain in (*DOMAINS, "all"):
        for variant in variants:
            totals = [run[domain][variant.name] for run in runs]
            plain = [run[domain][PLAIN.name] for run in runs]
            speedups = [t.tokens_per_second / p.tokens_per_second for t, p in zip(totals, plain, strict=True)]
            row: dict[str, Any] = {"domain": domain, "variant": variant.name}
            row |= {"tokens/s": median(total.tokens_per_second for total in totals), **spread(speedups, "speedup")}
            if totals[0].steps:
                limits = [_limit(total, base) for total, base in zip(totals, plain, strict=True)]
                row["tokens/step"] = median(total.tokens_per_step for total in totals)
                row["of limit"] = median(s / limit for s, limit in zip(speedups, limits, strict=True))
                row["identical"] = all(total.identical for total in totals)
            rows.append(row)
    return rows


def _variants(model: PreTrainedModel) -> list[Variant]:
    """Ours and theirs; what Transformers reads its k from is the generation config of the model that drafts."""
    draft = cast(Any, AutoModelForCausalLM.from_pretrained(EMBEDDED_DRAFT, dtype=model.dtype)).eval()
    exit_layer = exit_layer_of(EMBEDDED_ADAPTER)
    for drafting_model, k in ((draft, DRAFT_K), (cast(Any, model), SKIP_K)):
        drafting_model.generation_config.num_assistant_tokens = k
        drafting_model.generation_config.num_assistant_tokens_schedule = "constant"
        drafting_model.generation_config.assistant_confidence_threshold = 0.0
    ours = {
        "draft model": DraftModelCandidates(draft, k=DRAFT_K),
        "layer skip": LayerSkipCandidates(exit_layer, k=SKIP_K),
        "layer skip + adapter": LayerSkipCandidates(exit_layer, k=SKIP_K, adapter=str(EMBEDDED_ADAPTER)),
    }
    return [
        PLAIN,
        Variant("assistant_model", partial(dict, assistant_model=draft), batched=False),
        Variant("assistant_early_exit", partial(dict, assistant_early_exit=exit_layer), batched=False),
        *(Variant(name, partial(dict, candidate_generator=candidates)) for name, candidates in ours.items()),
    ]


def _limit(total: Total, plain: Total) -> float:
    """What `speedup_limit` gives for the steps that were measured."""
    seconds = [sample.speculation.seconds for sample in total.samples if sample.speculation is not None]
    forward, draft = (sum(s[part] for s in seconds) / total.steps for part in ("forward", "draft"))
    return speedup_limit(total.tokens_per_step, forward, draft, plain.seconds / plain.tokens)
