"""The formulas, against simulation and against each other; the cost curve, by shape and by file."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.analysis import estimated_alpha, expected_accepted, expected_speedup, optimal_k, speedup_limit
from hf_specgen.counters import RowStep, Statistics
from hf_specgen.depth import CostCurve, calibrate
from hf_specgen.evaluation.cost import measure_cost_curve
from tests.helpers import tiny_model

ALPHAS = st.floats(0, 1)
LENGTHS = st.integers(0, 20)
CURVES = st.lists(st.floats(0.001, 1), min_size=6, max_size=6).map(
    lambda seconds: CostCurve((1, 2, 4, 8, 16, 32), tuple(sorted(seconds)), context=1, batch=1)
)


def simulate(alpha: float, k: int, steps: int) -> Statistics:
    """Drafts of k tokens, each accepted with probability alpha until one is not."""
    generator = random.Random(0)
    made = []
    for _ in range(steps):
        accepted = next((i for i in range(k) if generator.random() >= alpha), k)
        made.append(RowStep(k, k, accepted, accepted + 1))
    return Statistics([made])


@pytest.mark.parametrize(("alpha", "k"), [(0.3, 4), (0.7, 8), (0.95, 5)])
def test_formulas_match_a_simulation(alpha: float, k: int) -> None:
    """40,000 steps: the standard error of the mean is under 0.02 tokens, of alpha under 0.003; 5 of them allowed."""
    drawn = simulate(alpha, k, 40_000)
    assert drawn.tokens_per_step == pytest.approx(1 + expected_accepted(alpha, k), abs=0.1)
    assert estimated_alpha(drawn) == pytest.approx(alpha, abs=0.015)
    shares = drawn.acceptance_rate_per_position
    assert expected_accepted(shares, k) == pytest.approx(drawn.accepted / drawn.drafts)


def test_naive_estimate_is_wrong_where_ours_is_right() -> None:
    """accepted / drafted counts draft tokens that were not judged: at alpha 0.7 and k=8 it says 0.27."""
    drawn = simulate(0.7, 8, 40_000)
    assert drawn.acceptance_rate < 0.3
    assert estimated_alpha(drawn) > 0.68


def test_a_draft_cut_off_by_a_stop_is_no_rejection() -> None:
    cut = Statistics([[RowStep(4, 4, 4, 5), RowStep(4, 4, 2, 2)]])
    assert estimated_alpha(cut) == 1.0
    assert estimated_alpha(Statistics([[RowStep(0, 0, 0, 1)]])) == 0.0


@given(ALPHAS, LENGTHS)
def test_closed_form(alpha: float, k: int) -> None:
    closed = k if alpha == 1 else alpha * (1 - alpha**k) / (1 - alpha)
    assert expected_accepted(alpha, k) == pytest.approx(closed, abs=1e-9, rel=1e-6)
    assert expected_accepted([alpha**i for i in range(1, k + 1)], k) == pytest.approx(expected_accepted(alpha, k))


@given(ALPHAS, st.integers(1, 20), st.floats(0, 2))
def test_speedup_is_leviathans_theorem(alpha: float, k: int, c: float) -> None:
    tokens = k + 1 if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)
    assert expected_speedup(alpha, k, draft_cost=c) == pytest.approx(tokens / (k * c + 1), rel=1e-6)


@given(ALPHAS, CURVES, st.floats(0, 0.1), st.floats(0, 0.1))
def test_best_k_is_at_least_as_good_as_every_other(
    alpha: float, curve: CostCurve, draft_cost: float, overhead: float
) -> None:
    best = optimal_k(alpha, curve, draft_cost, overhead, max_k=20)

    def speed(k: int) -> float:
        return expected_speedup(alpha, k, curve, draft_cost, overhead if k else 0)

    assert speed(best) >= 1  # k = 0 is plain decoding
    assert all(speed(best) >= speed(k) for k in range(21))


@given(st.floats(0, 0.9), st.floats(0, 0.1), LENGTHS)
def test_more_acceptance_brings_more(alpha: float, more: float, k: int) -> None:
    assert expected_accepted(alpha + more, k) >= expected_accepted(alpha, k)
    assert expected_accepted(alpha, k + 1) >= expected_accepted(alpha, k)


def test_best_k_known_cases() -> None:
    assert optimal_k(1.0, max_k=7) == 7
    assert optimal_k(0.0, draft_cost=0.1) == 0
    assert optimal_k(0.9, lambda q: float(q)) == 0  # verification that costs as much as decoding
    assert optimal_k([0.9, 0.8, 0.0, 0.0], lambda q: 1 + 0.05 * q) == 2


def test_limit() -> None:
    assert speedup_limit(2.0, 0.012, 0.004, 0.010) == pytest.approx(1.25)
    with pytest.raises(ValueError, match="positive"):
        speedup_limit(2.0, 0.0, 0.0, 0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.5, 3), "between 0 and 1, got 1.5"),
        ((0.5, -1), "k must be at least 0, got -1"),
        (([0.5, 0.6], 2), "must not increase"),
        (([0.5], 2), "given for 1 positions, but k is 2"),
    ],
)
def test_bad_acceptance(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expected_accepted(*arguments)


def test_bad_costs() -> None:
    with pytest.raises(ValueError, match="draft_cost must be at least 0, got -1"):
        expected_speedup(0.5, 2, draft_cost=-1)
    with pytest.raises(ValueError, match="max_k"):
        optimal_k(0.5, max_k=-1)


@given(CURVES, st.floats(1, 60), st.floats(0, 10))
def test_curve_goes_through_its_points_and_never_falls(curve: CostCurve, q: float, more: float) -> None:
    assert [curve(point) for point in curve.queries] == pytest.approx(list(curve.seconds))
    assert curve(q + more) >= curve(q) - 1e-9


def test_curve_beyond_its_end_goes_on_as_it_ended() -> None:
    curve = CostCurve((1, 2, 4), (1.0, 1.5, 2.5), context=8, batch=2)
    assert curve(3) == pytest.approx(2.0)
    assert curve(8) == pytest.approx(4.5)
    assert curve.relative(4) == pytest.approx(2.5)
    assert CostCurve((1,), (2.0,), context=8, batch=1)(9) == 2.0


@pytest.mark.parametrize(
    ("queries", "seconds", "message"),
    [
        ((2, 4), (1.0, 1.0), r"increase from 1, got \[2, 4\]"),
        ((1, 4, 4), (1.0, 1.0, 1.0), "increasing numbers of tokens"),
        ((1, 2), (1.0,), "seconds for each"),
        ((1, 2), (1.0, 0.0), "0.0"),
    ],
)
def test_bad_curves(queries: tuple, seconds: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostCurve(queries, seconds, context=1, batch=1)


def test_measured_curve_runs_the_passes_it_says() -> None:
    """One prefill, then a warm-up and `repeats` turns, each a pass over 1, 2 and 8 tokens behind 12 cached ones."""
    model = tiny_model("llama")
    shapes = []
    handle = model.get_input_embeddings().register_forward_hook(lambda _, inputs, __: shapes.append(inputs[0].shape))
    try:
        curve = measure_cost_curve(model, queries=(1, 2, 8), context=12, batch=3, repeats=2)
    finally:
        handle.remove()
    assert shapes == [(3, 12)] + 3 * [(3, 1), (3, 2), (3, 8)]
    assert (curve.queries, curve.context, curve.batch) == ((1, 2, 8), 12, 3)


def test_curve_is_the_median_of_what_passes_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that a pass over q tokens moves by q seconds, and by 100 on the first turn and one other."""
    model, now, passes = tiny_model("llama"), 0.0, 0

    def tick(_, inputs, __) -> None:
        nonlocal now, passes
        queries, passes = inputs[0].shape[1], passes + 1
        now += 100 if passes in (2, 3, 6, 7) else queries

    monkeypatch.setattr(calibrate, "thread_time", lambda: now)
    handle = model.get_input_embeddings().register_forward_hook(tick)
    try:
        curve = measure_cost_curve(model, queries=(1, 4), context=4, repeats=3)
    finally:
        handle.remove()
    assert curve.seconds == (1, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"queries": (2,)}, "increase from 1"),
        ({"context": 0}, "context must be at least 1, got 0"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"context": 10**6}, "positions"),
    ],
)
def test_bad_measurement(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure_cost_curve(tiny_model("llama"), **arguments)
