"""The planner against brute force over all depths."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specgen.depth import plan_depths


def expected_rate(accepted, proposed, seconds, empty: float, depths, rows) -> float:
    """Tokens per second with these depths, written down as in the docstring of `plan_depths`."""
    tokens = [1 + sum(accepted[row][i] for i in range(depths[row])) for row in rows]
    time = seconds[0] + (empty if any(depths) else 0.0)
    for i in range(max(depths)):
        nobody = prod(1 - proposed[row][i] for row in rows if i < depths[row])
        time += (1 - nobody) * (seconds[i + 1] - seconds[i])
    return len(rows) ** 2 / sum(1 / count for count in tokens) / time


@st.composite
def cases(draw: st.DrawFn, max_rows: int = 3, k: int = 4, certain: bool = False):
    rows = draw(st.integers(1, max_rows))
    unit = st.floats(0, 1)
    accepted, proposed = [], []
    for _ in range(rows):
        chain = np.cumprod([1.0] * k if certain else draw(st.lists(unit, min_size=k, max_size=k)))
        rates = draw(st.lists(unit, min_size=k, max_size=k))
        proposed.append(chain)
        accepted.append(chain * np.cumprod(rates))
    seconds = 1 + np.cumsum([0.0, *draw(st.lists(unit, min_size=k, max_size=k))])
    room = draw(st.lists(st.integers(0, k + 1), min_size=rows, max_size=rows))
    return np.array(accepted), np.array(proposed), seconds, room, draw(st.floats(0, 0.5))


@settings(max_examples=300, deadline=None)
@given(cases())
def test_plan_any_case_is_what_it_says_and_near_the_best_of_all_depths(case) -> None:
    accepted, proposed, seconds, room, empty = case
    plan = plan_depths(accepted, proposed, seconds, room, empty)
    rows = [row for row, free in enumerate(room) if free]
    assert all(0 <= depth <= free for depth, free in zip(plan.depths, room, strict=True))
    if not rows:
        return
    reference = expected_rate(accepted, proposed, seconds, empty, plan.depths, rows)
    assert plan.tokens_per_second == pytest.approx(reference)
    assert plan.speedup == pytest.approx(reference / (len(rows) / seconds[0]))
    options = product(*(range(min(free, accepted.shape[1]) + 1) for free in room))
    best = max(expected_rate(accepted, proposed, seconds, empty, depths, rows) for depths in options)
    # One pass over the rows is no exhaustive search; for one row it is.
    assert reference >= (1 - 1e-9) * best if len(rows) == 1 else reference >= 0.9 * best
    assert plan.speedup >= 1


@settings(max_examples=200, deadline=None)
@given(cases(certain=True))
def test_plan_drafts_that_always_come_is_the_best_of_all_depths(case) -> None:
    """Then one common depth is best: once one row is drafted that deep, the others add no time."""
    accepted, proposed, seconds, room, empty = case
    rows = [row for row, free in enumerate(room) if free]
    if not rows:
        return
    plan = plan_depths(accepted, proposed, seconds, room, empty)
    options = product(*(range(min(free, accepted.shape[1]) + 1) for free in room))
    best = max(expected_rate(accepted, proposed, seconds, empty, depths, rows) for depths in options)
    assert plan.tokens_per_second == pytest.approx(best)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_plan_is_at_least_the_best_common_depth(case) -> None:
    accepted, proposed, seconds, room, empty = case
    rows = [row for row, free in enumerate(room) if free]
    if not rows:
        return
    plan = plan_depths(accepted, proposed, seconds, room, empty)
    for depth in range(accepted.shape[1] + 1):
        common = [min(depth, free) for free in room]
        assert plan.tokens_per_second >= expected_rate(accepted, proposed, seconds, empty, common, rows) * (1 - 1e-9)


@settings(max_examples=100, deadline=None)
@given(cases(), st.floats(1e-6, 1e6))
def test_plan_does_not_depend_on_the_unit_of_time(case, unit: float) -> None:
    accepted, proposed, seconds, room, empty = case
    plans = [plan_depths(accepted, proposed, scale * seconds, room, scale * empty) for scale in (1.0, unit)]
    assert plans[0].speedup == pytest.approx(plans[1].speedup)


def test_plan_row_that_is_seldom_accepted_is_held_back() -> None:
    """Long drafts that are never accepted would widen the step for the row whose drafts are."""
    accepted = np.array([[0.9, 0.8, 0.7, 0.6], [0.0, 0.0, 0.0, 0.0]])
    proposed = np.array([[0.95, 0.9, 0.9, 0.9], [0.5, 0.5, 0.5, 0.5]])
    plan = plan_depths(accepted, proposed, np.array([1, 1.1, 1.2, 1.3, 1.4]), [9, 9])
    assert plan.depths[0] > 0 and plan.depths[1] == 0


def test_plan_batch_is_as_slow_as_its_slowest_row() -> None:
    """Of two rows one accepts nothing: drafting for the other takes time of both, and shortens nothing."""
    accepted, seconds = np.array([[0.9, 0.8, 0.7], [0.0, 0.0, 0.0]]), np.array([1, 1.4, 1.8, 2.2])
    assert plan_depths(accepted, np.ones((2, 3)), seconds, [9, 9]).depths == [0, 0]
    assert plan_depths(accepted, np.ones((2, 3)), seconds, [9, 0]).depths == [3, 0]


def test_plan_empty_drafts_are_paid_for() -> None:
    """Heads that seldom have a token to verify: what it takes to run them decides."""
    arguments = np.array([[0.3]]), np.array([[0.4]]), np.array([1.0, 1.5]), [1]
    assert plan_depths(*arguments).depths == [1]
    assert plan_depths(*arguments, empty_draft=0.4).depths == [0]


def test_plan_without_rows_is_plain() -> None:
    assert plan_depths(np.ones((2, 3)), np.ones((2, 3)), np.ones(4), [0, 0]).depths == [0, 0]
