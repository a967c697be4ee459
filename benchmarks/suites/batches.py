"""Every strategy in batches of mixed domains, against plain decoding of the same batches."""

from __future__ import annotations

from benchmarks.harness.plan import Plan, Suite

SUITE = Suite(
    Plan(
        domains=("embedded",),
        peers=(),
        prompts=1,
        repeats=1,
        max_new_tokens=128,
        sweep_prompts=4,
        batches=(1, 4, 8, 16),
        temperatures=(),
        contexts=(),
        trace_texts=0,
    ),
    table="batch",
)
