"""Every strategy with its default settings: speedups by domain, batch size and temperature, projected with a given
latency profile.
"""

from __future__ import annotations

from benchmarks.harness.plan import Plan, Suite

PROFILE = "benchmarks/profiles/gpu_like.json"
SUITE = Suite(
    Plan(
        strategies=("ngram", "auto", "layerskip", "medusa", "dflash", "eagle", "draft", "ngram+eagle", "ngram+draft"),
        default_settings=True,
        peers=(),
        domains=("embedded",),
        max_new_tokens=64,
        repeats=1,
        sweep_prompts=10,
        batches=(1, 4),
        temperatures=(0.0, 0.8),
        contexts=(),
        trace_texts=0,
        profile=PROFILE,
    ),
    table="projected by domain",
    # Speeds measured here are those of drafts for another machine.
    tables=("projected by domain", "projected by batch", "projected by temperature", "acceptance"),
)
