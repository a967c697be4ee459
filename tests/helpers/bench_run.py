"""One small benchmark run with all parts, for several test files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness.plan import Plan
from benchmarks.harness.runner import Outcome, run
from benchmarks.report import page
from benchmarks.report.results import result

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
)


def on_tiny_target(plan: Plan, folder: Path) -> Plan:
    """The plan with the tiny target of `tests.helpers.recipes.folder`; how fast and how good it is plays no part."""
    return replace(plan, model=str(folder / "target"))


def measured(plan: Plan, folder: Path) -> tuple[Outcome, dict[str, Any], Path]:
    """The outcome, the dictionary that is saved of it, and its page."""
    outcome = run(plan, folder, Console(quiet=True))
    assert outcome is not None
    found = result(outcome)
    return outcome, found, page.write(found, folder)
