"""Measuring T(q) and the cost of a drafter's pass: within the budget, once per model, rolled back."""

from collections.abc import Callable
from typing import Any

import pytest

from hf_specgen import DraftModelCandidates, LayerSkipCandidates, MedusaCandidates, NgramCandidates
from hf_specgen.counters import RowStep, StepRecord
from hf_specgen.depth import AdaptiveDepth, CostCurve, calibrate
from hf_specgen.memory import memory
from tests.helpers import prompts, shared_draft, tiny_model
from tests.helpers.depth import Clock, Model, Target, depth_call
from tests.helpers.medusa import random_heads

CURVES: dict[str, Callable[[int], float]] = {
    "flat": lambda q: 1 + 0.002 * (q - 1),
    "line": lambda q: 1 + 0.05 * (q - 1),
    "steep": lambda q: 1 + 0.5 * (q - 1),
    "not monotonic": lambda q: {1: 1.0, 2: 2.1, 8: 1.6, 24: 2.1, 64: 5.0}[q],
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that measurements read."""
    clock = Clock()
    monkeypatch.setattr(calibrate, "thread_time", clock)
    return clock


@pytest.mark.parametrize("name", CURVES)
def test_target_curve_is_exact_and_takes_at_most_nine_plain_steps(name: str, clock: Clock) -> None:
    target: Any = Target(clock, CURVES[name])
    curve = calibrate.target_curve(depth_call(model=Model()), target)
    assert curve is not None and clock.now <= 9
    timed = set(target.passes)
    assert timed >= {1, 2, 8} and set(curve.queries) == timed | {64}
    seconds = {q: curve.seconds[curve.queries.index(q)] for q in curve.queries}
    assert [seconds[q] for q in timed] == [pytest.approx(CURVES[name](q)) for q in timed]
    assert 24 in timed or CURVES[name](24) > 3, "small enough to be timed"
    if 64 not in timed:
        largest = max(timed)
        assert seconds[64] == pytest.approx(seconds[largest] * 64 / largest), "untimed sizes count as compute-bound"


def test_target_curve_takes_the_minimum_of_several_times(clock: Clock) -> None:
    slow = iter([5.0, 0.4] + [0.0] * 100)
    target: Any = Target(clock, lambda q: 1.0 + (next(slow) if q == 1 else 0.0))
    curve = calibrate.target_curve(depth_call(model=Model()), target)
    assert curve is not None and curve.seconds[0] == pytest.approx(1.0)


def test_target_curve_is_measured_once_per_model_rows_and_context(clock: Clock) -> None:
    model, target = Model(), Target(clock, CURVES["flat"])
    sizes: list[tuple[int, int, bool]] = [
        (1, 100, True),
        (1, 300, False),
        (2, 100, True),
        (1, 600, False),
        (1, 3000, True),
    ]
    for rows, prompt, measured in sizes:
        before = len(target.passes)
        session = AdaptiveDepth().start(depth_call(rows, prompt, model=model))
        assert (session.latency is None) == measured, "known before the prefill"
        session.prefilled(target)  # type: ignore[arg-type]
        assert (len(target.passes) > before) == measured, (rows, prompt)


def test_target_curve_near_the_end_of_the_position_table(clock: Clock) -> None:
    short: Any = Target(clock, CURVES["flat"], last_position=11)
    assert calibrate.target_curve(depth_call(model=Model()), short) is None and not short.passes
    longer: Any = Target(clock, CURVES["flat"], last_position=20)
    curve = calibrate.target_curve(depth_call(model=Model()), longer)
    assert curve is not None and max(longer.passes) <= 11


@pytest.mark.parametrize("kind", ["ngram", "draft", "medusa", "skip"])
@pytest.mark.parametrize("batch", [1, 3])
def test_measuring_leaves_the_call_unchanged(kind: str, batch: int) -> None:
    """Would catch: passes that stay in the cache, or hidden states of a measured pass given to a draft head."""
    model = tiny_model("llama")
    candidates = {
        "ngram": lambda: NgramCandidates(),
        "draft": lambda: DraftModelCandidates(shared_draft(model)),
        "medusa": lambda: MedusaCandidates(random_heads(model)),
        "skip": lambda: LayerSkipCandidates(1),
    }[kind]()
    inputs = prompts(batch)
    expected = model.generate(**inputs, max_new_tokens=24)
    memory.clear()
    ids = model.generate(**inputs, max_new_tokens=24, candidate_generator=candidates)
    assert ids.equal(expected) and memory._entries[model], "nothing was measured"


def draft_record(seconds: float, load: float = 1.0, passes: tuple[int, ...] = (1, 4)) -> StepRecord:
    """A step with a draft of known time, on a machine that other processes slow down; the target's pass takes 2 s."""
    times = {"draft": load * seconds, "forward": load * 2.0}
    return StepRecord([4], [RowStep(3, 2, 1, 2)], 4, times, passes)


def test_drafter_timer_takes_the_median_without_the_first_draft() -> None:
    curve = CostCurve((1, 4), (1.0, 2.0), 256, 1)
    call = depth_call(model=Model(), negligible_cost=False)
    timer = calibrate.DrafterTimer(call, curve)
    assert timer.fraction == 0.3
    fractions = (9.0, 0.2, 0.3, 0.9, 0.3, 0.5)
    known = [timer.observe(draft_record(3.0 * value, load)) for load, value in enumerate(fractions, start=1)]
    assert known == [False, False, False, False, True, False]
    assert timer.fraction == pytest.approx(0.3)
    assert timer.latency().draft((1, 4)) == pytest.approx(0.9)
    assert calibrate.DrafterTimer(call, curve).fraction == pytest.approx(0.3), "kept for later calls"


def test_drafter_timer_without_passes_takes_the_time_of_a_draft() -> None:
    """Would catch: n-grams that propose nothing, whose search takes a tenth of every step and counts as free."""
    call, curve = depth_call(model=Model()), CostCurve((1, 4), (1.0, 2.0), 256, 1)
    timer = calibrate.DrafterTimer(call, curve)
    assert timer.latency().draft(()) == 0.0 and not timer.observe(draft_record(1.0))
    assert [timer.observe(draft_record(0.1, passes=())) for _ in range(5)][-1]
    assert timer.latency().draft(()) == pytest.approx(0.1)
    session = AdaptiveDepth().start(call)
    session._use(curve)
    for _ in range(99):
        depths = session.depths([99])
        session.observe(StepRecord(depths, [RowStep(0, 0, 0, 1)], 1, {}, ()))
    assert depths == [0], "drafting has lost the time of two plain steps"
