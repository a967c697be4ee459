"""Reduces a failing case to a minimal one: field by field is made simpler, as long as the case still fails alike."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from tests.fuzz.cases import Case

KEPT = {"seed"}
"""Fields that have no simpler value."""
SIMPLER_STRATEGIES = ("oracle", "oracle_tree", "random", "ngram", "draft")
MAX_RUNS = 400


def shrink(case: Case, fails: Callable[[Case], bool], max_runs: int = MAX_RUNS) -> Case:
    """The simplest case found that still fails."""
    runs = 0
    found = True
    while found:
        found = False
        for simpler in _simpler(case):
            runs += 1
            if runs > max_runs:
                return case
            if fails(simpler):
                case, found = simpler, True
                break
    return case


def _simpler(case: Case) -> Iterator[Case]:
    """Simpler cases, the boldest first: many fields back at their defaults, then single ones, then smaller values."""
    given = Case()
    changed = [f.name for f in fields(Case) if f.name not in KEPT and getattr(case, f.name) != getattr(given, f.name)]
    size = len(changed)
    while size:
        for first in range(0, len(changed), size):
            yield replace(case, **{name: getattr(given, name) for name in changed[first : first + size]})
        size //= 2
    for name in changed:
        for value in _between(name, getattr(case, name), getattr(given, name)):
            yield replace(case, **{name: value})
    yield from (replace(case, lengths=lengths) for lengths in _shorter(case.lengths))


def _between(name: str, value: Any, default: Any) -> Iterator[Any]:
    """Values simpler than `value`, other than the default."""
    if name == "strategy":
        yield from SIMPLER_STRATEGIES[: SIMPLER_STRATEGIES.index(value) if value in SIMPLER_STRATEGIES else None]
    elif name == "lengths":
        return
    elif isinstance(value, tuple):
        yield from (value[:place] + value[place + 1 :] for place in range(len(value)) if len(value) > 1)
        if name == "bad_words":
            yield value[: len(value) // 2]
    elif isinstance(value, int) and not isinstance(value, bool):
        least = 0 if default in (0, None) else 1
        yield from sorted({number for number in (1, 2, value // 2, value - 1) if least <= number < value})


def _shorter(lengths: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for place in range(len(lengths)):
        if len(lengths) > 1:
            yield lengths[:place] + lengths[place + 1 :]
        for length in sorted({1, lengths[place] // 2, lengths[place] - 1}):
            if 1 <= length < lengths[place]:
                yield (*lengths[:place], length, *lengths[place + 1 :])
