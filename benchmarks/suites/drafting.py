"""Draft models and layer skip, against Transformers' assisted decoding with the same weights."""

from __future__ import annotations

from benchmarks.harness.plan import Plan, Suite

SUITE = Suite(
    Plan(
        strategies=("draft", "layerskip=4", "layerskip"),
        domains=("embedded",),
        max_new_tokens=128,
        repeats=3,
        batches=(),
        temperatures=(),
        contexts=(),
        trace_texts=0,
    )
)
