"""Compares speculation with plain `generate()` in random cases.

    python -m tests.fuzz --minutes 5 --seed 1       # as many cases as fit
    python -m tests.fuzz --cases 1000 --seed 2      # so many
    python -m tests.fuzz --case '{"seed": 3, …}'    # one again, as a failure is printed

A long run is divided among processes by the number of the first case, and its counts are summed up:

    python -m tests.fuzz --cases 5000 --seed 2 --record 1.json
    python -m tests.fuzz --cases 5000 --seed 2 --start 5000 --record 2.json
    python -m tests.fuzz --merge 1.json 2.json

The exit code is 1 if any case differs from plain `generate()`.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.fuzz import record
from tests.fuzz.cases import STRATEGIES, Case
from tests.fuzz.checks import Difference
from tests.fuzz.comparison import Outcome
from tests.fuzz.device import device, use_device
from tests.fuzz.draw import draw
from tests.fuzz.models import ARCHITECTURES, TESTED
from tests.fuzz.report import Report
from tests.fuzz.run import run
from tests.fuzz.shrink import shrink

WIDTH_OF_FILES = 120
SHRUNK_FAILURES = 10
"""Failures of the same kind as one that was shrunk already, and all after so many, are printed as they were drawn."""


def main(argv: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(argv)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    os.environ.setdefault("HF_SPECGEN_CACHE", tempfile.mkdtemp())  # measured latencies are not those of the user
    use_device(options.device)
    console = Console()
    console = console if console.is_terminal else Console(width=WIDTH_OF_FILES)
    if options.merge:
        merged = record.merge(options.merge)
        console.print(json.dumps(merged, indent=1), soft_wrap=True, markup=False, highlight=False)
        console.print(record.markdown(merged), soft_wrap=True, markup=False, highlight=False)
        return 0
    if options.case is not None:
        outcome = run_safely(Case.from_json(options.case))
        console.print(_summary(outcome), soft_wrap=True, markup=False)
        return int(outcome.status == "different")
    report = _run_many(options, console)
    for table in report.tables():
        console.print(table)
    console.print(f"{report.total.cases} cases, {len(report.failures)} failures, seed {options.seed}")
    return int(bool(report.failures))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, help="stop after so long")
    parser.add_argument("--cases", type=int, help="stop after so many cases (default 200, unless --minutes is given)")
    parser.add_argument("--seed", default="0", help="of the whole run: the same seed draws the same cases")
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", help="run one case, given as JSON, instead of random ones")
    parser.add_argument("--architectures", nargs="+", choices=ARCHITECTURES, metavar="NAME", help="draw only these")
    parser.add_argument("--device", default="cpu", help="of the models: cpu, cuda …")
    parser.add_argument("--tested", action="store_true", help="only the architectures that the package is tested with")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, metavar="NAME", help="the same")
    parser.add_argument("--threads", action="store_true", help="let some cases run in several threads")
    parser.add_argument("--no-shrink", action="store_true", help="print failures as they were drawn")
    parser.add_argument("--record", type=Path, help="write the counts to this file, as JSON, again and again")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="sum up such files instead of a run")
    return parser


def _run_many(options: argparse.Namespace, console: Console) -> Report:
    report, origin = Report(), record.origin(options.seed, options.start)
    shrunk: set[tuple[str, str]] = set()
    limit = options.cases if options.cases is not None or options.minutes is not None else 200
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    with bar:
        task = bar.add_task("no failures", total=limit)
        for case in _cases(options, limit):
            outcome = run_safely(case)
            if report.add(outcome) == "different":
                key = (outcome.differences[0].kind, case.strategy)
                if not options.no_shrink and key not in shrunk and len(shrunk) < SHRUNK_FAILURES:
                    shrunk.add(key)
                    bar.update(task, description="reducing a failure")
                    outcome = minimal(outcome)
                console.print(_summary(outcome), soft_wrap=True, markup=False)
            failures = len(report.failures)
            bar.update(task, advance=1, description=f"{failures or 'no'} failure{'s' if failures != 1 else ''}")
            if options.record is not None and report.total.cases % record.CASES_BETWEEN_WRITES == 0:
                record.write(options.record, report, origin)
    if options.record is not None:
        record.write(options.record, report, origin)
    return report


def _cases(options: argparse.Namespace, limit: int | None) -> Iterator[Case]:
    architectures = options.architectures or (list(TESTED) if options.tested else None)

    def case(number: int) -> Case:
        drawn = draw(f"{options.seed}:{number}", architectures, options.strategies, options.threads)
        # A failed assertion of a CUDA kernel, which sampling from broken probabilities is, ends the whole process.
        return replace(drawn, broken_logits="") if device().type == "cuda" else drawn

    if options.minutes is None and limit is not None:
        yield from grouped(map(case, range(options.start, options.start + limit)))
        return
    end = time.monotonic() + 60 * options.minutes
    for number in count(options.start):
        if time.monotonic() > end or (limit is not None and number == options.start + limit):
            return
        yield case(number)


def grouped(cases: Iterable[Case]) -> list[Case]:
    """The same cases, those with the same model one after another, so that it is built and checked once.

    Models follow in an arbitrary order, so that an interrupted run has tried architectures of all kinds.
    """

    def model(case: Case) -> tuple[Any, ...]:
        return (case.architecture, case.layers, case.attention, case.window, case.tight_positions)

    return sorted(cases, key=lambda case: (crc32(repr(model(case)).encode()), model(case)))


def run_safely(case: Case) -> Outcome:
    """Run a case; an error of the tester itself is a difference too, never a crash of the whole run."""
    try:
        return run(case)
    except Exception as error:
        detail = traceback.format_exception_only(error)[-1].strip() + traceback.format_exc(limit=-1)
        return Outcome(case, [Difference("error of the tester", detail)], "different")


def minimal(outcome: Outcome) -> Outcome:
    """The simplest case that fails in the same way."""
    kind = outcome.differences[0].kind

    def fails(case: Case) -> bool:
        other = run_safely(case)
        return other.status == "different" and any(difference.kind == kind for difference in other.differences)

    return run_safely(shrink(outcome.case, fails))


def _summary(outcome: Outcome) -> str:
    """What differs, and the line that repeats it."""
    lines = [f"{outcome.status}{': ' + outcome.reason if outcome.reason else ''}"]
    lines += [f"  {difference.kind}: {difference.detail}" for difference in outcome.differences]
    lines += [f"  drafted {outcome.drafted}, accepted {outcome.accepted}, {outcome.seconds:.1f} s"]
    return "\n".join([*lines, f"  python -m tests.fuzz --case '{outcome.case.to_json()}'"])


if __name__ == "__main__":
    sys.exit(main())
