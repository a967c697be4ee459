"""Suites: a plan and the tables that it is made for. `python -m benchmarks suite NAME`."""

from typing import Any

from benchmarks.harness.plan import Plan, Suite
from hf_specgen.evaluation.published import PUBLISHED

NO_SWEEPS: dict[str, Any] = {"batches": (), "temperatures": (), "contexts": ()}
BY_DOMAIN: dict[str, Any] = {"domains": ("embedded",), "max_new_tokens": 128, "repeats": 3, **NO_SWEEPS}

EAGLE = "benchmarks/assets/smollm2-eagle3-head"
MEDUSA = "benchmarks/assets/smollm2-medusa-heads"
"""For the published model; paths are those of a clone."""
SUITES: dict[str, Suite] = {
    # The strategies of `Plan` and their peers in Transformers, by domain, batch size, temperature and context length.
    "full": Suite(Plan()),
    # N-grams against prompt lookup, on more prompts and longer answers.
    "domains": Suite(Plan(strategies=("ngram",), prompts=8, **BY_DOMAIN)),
    # Strategies with default settings in batches of mixed domains, against plain decoding of the same batches.
    "batches": Suite(
        Plan(
            strategies=("ngram", "auto", "draft", "eagle"),
            default_settings=True,
            **{**BY_DOMAIN, "peers": (), "prompts": 1, "repeats": 1, "batches": (1, 4, 8, 16)},
        ),
        table="batch",
    ),
    # A published model: strategies that need no draft, and heads that were trained here, against prompt lookup.
    "published": Suite(
        Plan(
            model=PUBLISHED,
            strategies=(
                *(
                    "ngram",
                    "auto",
                    f"eagle={EAGLE}",
                    f"ngram+eagle={EAGLE}",
                    f"medusa={MEDUSA}",
                    f"ngram+medusa={MEDUSA}",
                ),
            ),
            default_settings=True,
            domains=("everyday", "spec-bench"),
            prompts=2,
            max_new_tokens=64,
            repeats=1,
            **NO_SWEEPS,
        )
    ),
    # Draft models and layer skip, against Transformers' assisted decoding with the same weights.
    "drafting": Suite(Plan(strategies=("draft", "layerskip=4", "layerskip"), **BY_DOMAIN)),
    # Medusa heads alone, and combined with n-grams.
    "heads": Suite(Plan(strategies=("medusa", "ngram+medusa"), **{**BY_DOMAIN, "batches": (1, 4)})),
    # Peak memory at 1,700 tokens of context, without and with output_scores.
    "memory": Suite(Plan(peers=(), domains=(), memory_context=1700, **NO_SWEEPS), table="memory"),
    # Default settings; speedups by domain, batch size and temperature, projected with a given latency profile.
    "projected": Suite(
        Plan(
            strategies=(
                *("ngram", "auto", "layerskip", "medusa", "dspark", "eagle", "draft", "ngram+eagle", "ngram+draft"),
            ),
            default_settings=True,
            peers=(),
            domains=("embedded",),
            max_new_tokens=64,
            repeats=1,
            sweep_prompts=10,
            batches=(1, 4),
            temperatures=(0.0, 0.8),
            contexts=(),
            profile="benchmarks/profiles/gpu_like.json",
        ),
        table="projected by domain",
        # Speeds measured here are those of drafts for another machine.
        tables=("projected by domain", "projected by batch", "projected by temperature", "acceptance"),
    ),
}
