"""Every strategy with its default settings: speedups by domain, projected with a given latency profile."""

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
        batches=(),
        temperatures=(),
        contexts=(),
        trace_texts=0,
        profile=PROFILE,
    ),
    table="projected by domain",
    tables=("projected by domain", "acceptance"),  # speeds measured here are those of drafts for another machine
)
