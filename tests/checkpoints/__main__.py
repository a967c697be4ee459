"""Compares speculation with plain `generate()` through the class of every published checkpoint.

    python -m tests.checkpoints                          # all of them, about ten minutes
    python -m tests.checkpoints --names Qwen gpt-oss     # those whose name or type contains one of these
    python -m tests.checkpoints --cases n-grams eager    # cases whose name contains one of these
    python -m tests.checkpoints --write                  # and record the results for the documentation
    python -m tests.helpers.architecture_list            # which this writes into docs/architectures.md

The exit code is 1 if any case differs from plain `generate()` or raises an error that is no refusal.
"""

import argparse
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence

import transformers

from tests.checkpoints.cases import CASES, CRASH, DIFFERENT, SAME, Outcome, class_name, run_all, verdict
from tests.checkpoints.page import record, result
from tests.checkpoints.table import CHECKPOINTS


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.checkpoints", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--names", nargs="+", default=[""], help="parts of names or types of checkpoints")
    parser.add_argument("--cases", nargs="+", default=[""], help="parts of names of cases")
    parser.add_argument("--details", action="store_true", help="print every case that is not the same")
    parser.add_argument("--write", action="store_true", help="write the results to tests/assets/checkpoints.json")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(argv)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    chosen = [row for row in CHECKPOINTS if any(part in f"{row.name} {row.kind}" for part in options.names)]
    cases = [case for case in CASES if any(part in case.name for part in options.cases)]
    counts = {"float32": Counter[str](), "bfloat16": Counter[str]()}
    for number, checkpoint in enumerate(chosen, start=1):
        started = time.monotonic()
        outcomes = run_all(checkpoint, cases)
        seconds = time.monotonic() - started
        print(f"{number} of {len(chosen)}: {checkpoint.name} ({class_name(checkpoint)}, {seconds:.1f} s)")
        if options.write:
            record({checkpoint.name: result(outcomes)})
        for dtype, counter in counts.items():
            counter[_print(dtype, outcomes, options.details)] += 1
    for dtype, counter in counts.items():
        print(f"{dtype}: {', '.join(f'{count} {status}' for status, count in counter.most_common())}")
    return int(any(counter[status] for counter in counts.values() for status in (CRASH, DIFFERENT)))


def _print(dtype: str, outcomes: dict[str, Outcome], details: bool) -> str:
    """Print the verdicts of text and of images or audio; returns the one of both together."""
    of_dtype = {name: outcome for name, outcome in outcomes.items() if ("bfloat16" in name) == (dtype == "bfloat16")}
    for kind in dict.fromkeys(name.partition(":")[0] for name in of_dtype):
        result = verdict([outcome for name, outcome in of_dtype.items() if name.startswith(f"{kind}:")])
        print(f"  {dtype}, {kind}: {result.status}{': ' + result.reason if result.reason else ''}", flush=True)
    if details:
        reasons: dict[tuple[str, str], list[str]] = {}
        for name, outcome in of_dtype.items():
            if outcome.status != SAME or outcome.detail:
                reasons.setdefault((outcome.status, outcome.detail), []).append(name)
        for (status, detail), names in reasons.items():
            print(f"    {status}: {', '.join(names)}: {detail[:300]}", flush=True)
    return verdict(list(of_dtype.values())).status if of_dtype else "not tried"


if __name__ == "__main__":
    sys.exit(main())
