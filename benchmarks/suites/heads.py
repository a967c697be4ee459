"""Medusa heads alone, and combined with n-grams."""

from __future__ import annotations

from benchmarks.harness.plan import Plan, Suite

SUITE = Suite(
    Plan(
        strategies=("medusa", "ngram+medusa"),
        domains=("embedded",),
        max_new_tokens=128,
        repeats=3,
        batches=(1, 4),
        temperatures=(),
        contexts=(),
        trace_texts=0,
    ),
)
