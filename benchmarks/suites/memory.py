"""Peak memory of plain decoding and of every strategy at 8,000 tokens of context, without and with output_scores."""

from __future__ import annotations

from benchmarks.harness.plan import Plan, Suite

SUITE = Suite(
    Plan(peers=(), domains=(), batches=(), temperatures=(), contexts=(), trace_texts=0, memory_context=8000),
    table="memory",
)
