"""Runs one case in several threads at once."""

import threading
from dataclasses import replace

import torch

from tests.fuzz import checks, settings
from tests.fuzz.cases import Case
from tests.fuzz.checks import Difference, Run
from tests.fuzz.comparison import Comparison, Outcome, equal
from tests.fuzz.settings import Ends
from tests.fuzz.surroundings import SECONDS_PER_CALL


def compare_threads(case: Case) -> Outcome:
    """Several threads generate with one model and one strategy object, each from prompts of its own.

    Only tokens are compared, and only greedy ones: all threads draw from the same random generator.
    """
    singles = [replace(case, seed=case.seed + thread, threads=1, do_sample=False) for thread in range(case.threads)]
    sides = [Comparison(single) for single in singles]
    inputs = [settings.prompts(single) for single in singles]
    ends = Ends(case.eos_ids, None)
    plain = [side.generate(given, ends, None) for side, given in zip(sides, inputs, strict=True)]
    first = sides[0]
    first.outcome.case = case
    if any(run.error is not None for run in plain) or not first.prepare(plain[0], inputs[0]):
        first.outcome.status = "raised"
        return first.outcome
    for side, run, given in zip(sides, plain, inputs, strict=True):
        assert run.ids is not None
        side.candidates = first.candidates
        first.answers.add(given, run.ids)
    for expected, got in zip(plain, _run_together(sides, inputs, ends), strict=True):
        _compare(first, expected, got)
    return first.outcome


def _run_together(sides: list[Comparison], inputs: list[dict[str, torch.Tensor]], ends: Ends) -> list[Run | None]:
    """Speculation in one thread for each side; None for one that does not come to its end."""
    runs: list[Run | None] = [None] * len(sides)

    def work(thread: int) -> None:
        runs[thread] = sides[thread].generate(inputs[thread], ends, None, speculation=True)

    threads = [threading.Thread(target=work, args=(thread,), daemon=True) for thread in range(len(sides))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS_PER_CALL)
    return runs


def _compare(first: Comparison, expected: Run, got: Run | None) -> None:
    outcome = first.outcome
    if got is None:
        outcome.differences.append(Difference("hang", f"no end after {SECONDS_PER_CALL} s"))
    elif got.error is not None:
        outcome.differences += checks.compare_errors(expected, got)
        outcome.status, outcome.reason = "refused", str(got.error)
    elif first.case.verification == "exact" and not equal(expected, got):
        assert expected.ids is not None and got.ids is not None
        detail = f"{got.ids.tolist()} instead of {expected.ids.tolist()}"
        outcome.differences.append(Difference("tokens", detail))
    else:
        first.count(got)
