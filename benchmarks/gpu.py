"""Everything that only a GPU can show, within a given time; each result is written as soon as it is there.

The stages run one after the other, each in processes of its own, so that one that fails or takes too long costs no
other one. The most important ones come first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from benchmarks.harness.provenance import provenance

FUZZ_PROCESSES = 8
LEAST_SECONDS = 20.0
"""Time left below which no further stage begins."""


@dataclass(frozen=True)
class Stage:
    """A part of the run."""

    name: str  # in the summary
    limit: float  # seconds after which it is ended
    commands: Callable[[Path, float], list[list[str]]]
    """Arguments of `python` for each process, given the folder for results and the seconds left for it."""


def _micro(name: str, *options: str) -> Callable[[Path, float], list[list[str]]]:
    return lambda out, seconds: [["-m", "benchmarks", "micro", name, "--out", str(out), *options]]


def _tests(out: Path, seconds: float) -> list[list[str]]:
    return [["-m", "pytest", "tests/cuda", "-q", "-p", "no:cacheprovider"]]


def _random_cases(out: Path, seconds: float) -> list[list[str]]:
    minutes = f"{max(0.1, (seconds - LEAST_SECONDS) / 60):.2f}"
    shared = ["-m", "tests.fuzz", "--device", "cuda", "--minutes", minutes]
    return [
        [*shared, "--seed", f"gpu {number}", "--record", str(out / f"fuzz-{number}.json")]
        for number in range(FUZZ_PROCESSES)
    ]


STAGES: tuple[Stage, ...] = (
    Stage("tests", 170.0, _tests),
    Stage("large-target-graphs", 120.0, _micro("large-target-graphs", "--repeats", "1")),
    Stage("known-acceptance", 100.0, _micro("known-acceptance", "--repeats", "1")),
    Stage("quantised-cost", 60.0, _micro("quantised-cost", "--repeats", "2")),
    Stage("random-cases", 600.0, _random_cases),
)


def run(out: Path, seconds: float, names: Sequence[str] = ()) -> bool:
    """Run the stages, all or those named; returns whether all of them succeeded.

    Writes for each stage `NAME.log`, the results of measurements as JSON, and `gpu.json` with the outcome of each.
    """
    if unknown := sorted(set(names) - {stage.name for stage in STAGES}):
        raise ValueError(f"there is no stage {unknown[0]!r}; there are {', '.join(stage.name for stage in STAGES)}")
    out.mkdir(parents=True, exist_ok=True)
    end = monotonic() + seconds
    outcomes: dict[str, str] = {}
    for stage in STAGES:
        if names and stage.name not in names:
            continue
        left = min(stage.limit, end - monotonic())
        outcomes[stage.name] = "no time was left" if left < LEAST_SECONDS else run_stage(stage, out, left)
        print(f"{stage.name}: {outcomes[stage.name]}", flush=True)
        summary = {"stages": outcomes, "provenance": provenance()}
        (out / "gpu.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return all(outcome.startswith("done") for outcome in outcomes.values())


def run_stage(stage: Stage, out: Path, seconds: float) -> str:
    """Run the processes of a stage side by side; returns the outcome in words."""
    begin = monotonic()
    commands = stage.commands(out, seconds)
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    with (out / f"{stage.name}.log").open("w", encoding="utf-8") as log:
        processes = [
            subprocess.Popen([sys.executable, *command], stdout=log, stderr=subprocess.STDOUT, env=environment)
            for command in commands
        ]
        codes: list[int | None] = []
        for process in processes:
            try:
                codes.append(process.wait(max(0.0, begin + seconds - monotonic())))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                codes.append(None)
    took = f"{monotonic() - begin:.0f} s"
    if all(code == 0 for code in codes):
        return f"done in {took}"
    if None in codes:
        return f"ended after {took}, not finished; see {stage.name}.log"
    return f"failed with exit code {next(code for code in codes if code)} after {took}; see {stage.name}.log"
