"""Compares speculation with plain `generate()` in random cases.

    python -m tests.fuzz --minutes 5 --seed 1       # as many cases as fit
    python -m tests.fuzz --cases 1000 --seed 2      # a number of cases
    python -m tests.fuzz --case '{"seed": 3, …}'    # one again, as a failure is printed

A long run is divided among processes by the number of the first case, and its counts are summed up:

    python -m tests.fuzz --cases 5000 --seed 2 --record 1.json
    python -m tests.fuzz --cases 5000 --seed 2 --start 5000 --record 2.json
    python -m tests.fuzz --merge 1.json 2.json

The exit code is 1 if any case differs from plain `generate()`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import count
from pathlib import Path
from typing import Any, Self
from zlib import crc32

import transformers

from benchmarks.harness.provenance import provenance
from tests.fuzz.cases import STRATEGIES, Case, draw
from tests.fuzz.checks import Difference
from tests.fuzz.comparison import Outcome, run
from tests.fuzz.models import ARCHITECTURES, device, use_device

CASES_BETWEEN_REPORTS = 100
SHRUNK_FAILURES = 10
"""How many failures are shrunk, at most one of each kind; all others are printed as they were drawn."""


def main(argv: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(argv)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    use_device(options.device)
    if options.case is not None:
        outcome = run_safely(Case.from_json(options.case))
        print(_summary(outcome))
        return int(outcome.status == "different")
    report = Report.merged(options.merge) if options.merge else _run_many(options)
    print(report.markdown())
    print(f"{report.total['cases']} cases, {len(report.failures)} failures")
    return int(bool(report.failures))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, help="stop after this time")
    parser.add_argument("--cases", type=int, help="number of cases (default 200, unless --minutes is given)")
    parser.add_argument("--seed", default="0", help="of the whole run: the same seed draws the same cases")
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", help="run one case, given as JSON, instead of random ones")
    parser.add_argument("--architectures", nargs="+", choices=ARCHITECTURES, metavar="NAME", help="draw only these")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, metavar="NAME", help="the same")
    parser.add_argument("--device", default="cpu", help="of the models: cpu, cuda …")
    parser.add_argument("--record", type=Path, help="write the counts to this file, as JSON, again and again")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="sum up such files instead of a run")
    return parser


def _run_many(options: argparse.Namespace) -> Report:
    report = Report({"seed": options.seed, "first_case": options.start, **provenance()})
    shrunk: set[tuple[str, str]] = set()
    limit, started = options.cases, time.monotonic()
    if limit is None and options.minutes is None:
        limit = 200
    for number, case in enumerate(_cases(options, limit), start=1):
        outcome = run_safely(case)
        if report.add(outcome) == "different":
            key = (outcome.differences[0].kind, case.strategy)
            if key not in shrunk and len(shrunk) < SHRUNK_FAILURES:
                shrunk.add(key)
                outcome = minimal(outcome)
            print(_summary(outcome), flush=True)
        if number % CASES_BETWEEN_REPORTS == 0:
            of, minutes = "" if limit is None else f" of {limit}", (time.monotonic() - started) / 60
            print(f"{number}{of} cases, {len(report.failures)} failures, {minutes:.1f} minutes", flush=True)
            if options.record is not None:
                report.write(options.record)
    if options.record is not None:
        report.write(options.record)
    return report


def _cases(options: argparse.Namespace, limit: int | None) -> Iterator[Case]:
    def case(number: int) -> Case:
        drawn = draw(f"{options.seed}:{number}", options.architectures, options.strategies)
        # A failed assertion of a CUDA kernel, which sampling from broken probabilities is, ends the whole process.
        return replace(drawn, broken_logits="") if device().type == "cuda" else drawn

    if options.minutes is None and limit is not None:
        yield from sorted(map(case, range(options.start, options.start + limit)), key=_model)
        return
    end = time.monotonic() + 60 * options.minutes
    for number in count(options.start):
        if time.monotonic() > end or (limit is not None and number == options.start + limit):
            return
        yield case(number)


def _model(case: Case) -> tuple[Any, ...]:
    """Cases with the same model follow each other, so that it is built once; models come in an arbitrary order."""
    model = (case.architecture, case.layers, case.attention, case.window, case.tight_positions)
    return crc32(repr(model).encode()), model


def run_safely(case: Case) -> Outcome:
    """Run a case; an error of the tester itself is a difference too, never a crash of the whole run."""
    try:
        return run(case)
    except Exception as error:
        detail = traceback.format_exception_only(error)[-1].strip() + traceback.format_exc(limit=-1)
        return Outcome(case, [Difference("error of the tester", detail)], "different")


def minimal(outcome: Outcome) -> Outcome:
    """The simplest case that fails in the same way; the outcome itself, where the case does not fail again."""
    kind = outcome.differences[0].kind

    def fails(case: Case) -> bool:
        other = run_safely(case)
        return other.status == "different" and any(difference.kind == kind for difference in other.differences)

    shrunk = run_safely(shrink(outcome.case, fails))
    return shrunk if shrunk.status == "different" else outcome


def _summary(outcome: Outcome) -> str:
    """What differs, and the line that repeats it."""
    reason = outcome.reason.partition("\n")[0]
    lines = [f"{outcome.status}{': ' + reason if reason else ''}"]
    lines += [f"  {difference.kind}: {difference.detail}" for difference in outcome.differences]
    lines += [f"  drafted {outcome.drafted}, accepted {outcome.accepted}"]
    return "\n".join([*lines, f"  python -m tests.fuzz --case '{outcome.case.to_json()}'"])


# Reduces a failing case to a minimal one: field by field is made simpler, as long as the case still fails alike

MAX_RUNS = 200


def shrink(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The simplest case found that still fails."""
    runs = count()
    while simpler := next((one for one in _simpler(case) if next(runs) < MAX_RUNS and fails(one)), None):
        case = simpler
    return case


def _simpler(case: Case) -> Iterator[Case]:
    """Simpler cases, the boldest first: many fields back at their defaults, then single ones, then fewer rows."""
    given = Case(seed=case.seed)
    changed = [field.name for field in fields(Case) if getattr(case, field.name) != getattr(given, field.name)]
    size = len(changed)
    while size:
        for first in range(0, len(changed), size):
            yield replace(case, **{name: getattr(given, name) for name in changed[first : first + size]})
        size //= 2
    if len(case.lengths) > 1:
        yield from (
            replace(case, lengths=case.lengths[:row] + case.lengths[row + 1 :]) for row in range(len(case.lengths))
        )


COLUMNS = ("cases", "drafting", "drafted", "accepted", "rejected", "same", "refused", "raised", "different")
"""Of the printed table; differences that are gone in float64 count as "same" and as "rounding"."""

TABLES = ("strategy", "architecture", "situation")
"""What outcomes are counted by."""


class Report:
    """Sums outcomes up; `origin` is what is needed to repeat the run: seed, first case, commit, versions, machine."""

    def __init__(self, origin: dict[str, Any] | None = None) -> None:
        self.origins = [] if origin is None else [origin]
        self.counts: dict[str, defaultdict[str, Counter[str]]] = {}
        """By the fields of `TABLES`; of refusals, and of errors that both sides raised, by reason."""
        for name in (*TABLES, "reasons"):
            self.counts[name] = defaultdict(Counter)
        self.failures: list[str] = []
        """Cases, as JSON."""

    @property
    def total(self) -> Counter[str]:
        """The counts of all cases."""
        return sum(self.counts["strategy"].values(), Counter())

    def add(self, outcome: Outcome) -> str:
        """Count an outcome; returns its status."""
        case, status = outcome.case, outcome.status
        if status == "different":
            self.failures.append(case.to_json())
        if status in ("refused", "raised"):
            self.counts["reasons"][status][_without_names(outcome.reason)] += 1
        counts = {"cases": 1, "drafting": int(outcome.drafted > 0), "faults raised": int(outcome.fault_raised)}
        counts |= {"drafted": outcome.drafted, "accepted": outcome.accepted}
        counts |= {"rejected": outcome.drafted - outcome.accepted, status: 1}
        if status == "rounding":
            counts["same"] = 1
        for name in TABLES:
            self.counts[name][getattr(case, name)].update(counts)
        return status

    def write(self, path: Path) -> None:
        """Write the counts so far; the file is replaced as a whole, so an interrupted run leaves a complete one."""
        temporary = path.with_suffix(".part")
        temporary.write_text(json.dumps({"total": self.total, **vars(self)}, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)

    @classmethod
    def merged(cls, paths: Sequence[Path]) -> Self:
        """The sum of several records."""
        merged = cls()
        for path in paths:
            record = json.loads(path.read_text(encoding="utf-8"))
            merged.origins += record["origins"]
            merged.failures += record["failures"]
            for name, rows in record["counts"].items():
                for key, counts in rows.items():
                    merged.counts[name][key].update(counts)
        return merged

    def markdown(self) -> str:
        """Tables by strategy, architecture and situation, and the reasons of refusals and errors."""
        parts = []
        for name in TABLES:
            rows = [(name, *COLUMNS), ("---", *["--:"] * len(COLUMNS))]
            for label, row in [*sorted(self.counts[name].items()), ("**all**", self.total)]:
                rows.append((label, *(f"{row[column]:,}" for column in COLUMNS)))
            parts.append("\n".join("| " + " | ".join(row) + " |" for row in rows))
        for status, reasons in self.counts["reasons"].items():
            parts.append("\n".join(f"{count} {status}: {reason}" for reason, count in reasons.most_common()))
        return "\n\n".join(parts)


def _without_names(reason: str) -> str:
    """A reason that is the same for all models and numbers."""
    first = reason.strip().splitlines()[0] if reason.strip() else "(no reason)"
    first = re.sub(r"\b\w+(ForCausalLM|LMHeadModel|LMHead|Decoder)\b", "<model>", first)
    return re.sub(r"\d+", "N", first)[:150]


if __name__ == "__main__":
    sys.exit(main())
