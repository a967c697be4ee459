"""One small benchmark run with everything in it, for several files of tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.plan import Plan
from benchmarks.runner import Outcome, run
from rich.console import Console

from benchmarks import report
from benchmarks.results import result

SMALL = Plan(
    strategies=("ngram", "layerskip", "medusa"),
    domains=("edit", "chat"),
    prompts=1,
    tuning_prompts=1,
    max_new_tokens=5,
    repeats=2,
    sweep_prompts=1,
    batches=(3,),
    temperatures=(1.3,),
    contexts=(64,),
    trace_texts=1,
)


def measured(folder: Path) -> tuple[Outcome, dict[str, Any], Path]:
    """The outcome, what is saved of it, and its page."""
    outcome = run(SMALL, folder, Console(quiet=True))
    assert outcome is not None
    found = result(outcome)
    return outcome, found, report.write(found, folder)
