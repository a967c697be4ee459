"""N-grams by task domain, against plain decoding and prompt lookup, on more prompts and longer answers."""

from __future__ import annotations

from benchmarks.harness.plan import Plan, Suite

SUITE = Suite(
    Plan(
        strategies=("ngram",),
        domains=("embedded",),
        prompts=8,
        max_new_tokens=128,
        repeats=3,
        batches=(),
        temperatures=(),
        contexts=(),
        trace_texts=0,
    )
)
