"""Latency models: interpolation, files, and the assumed GPU profile."""

import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch

from hf_specgen import clock as clocks
from hf_specgen.call import memory
from hf_specgen.call_statistics import RowStep, StepRecord
from hf_specgen.decoding import DecodingTimer
from hf_specgen.depth import AdaptiveDepth, Bucket, CostCurve, DraftLatency, LatencyModel, calibrate
from hf_specgen.depth.latency import FORMAT, assumed_latency
from tests.helpers.depth import Clock, Model, Target, depth_call

GPU_LIKE = Path(__file__).parents[2] / "benchmarks" / "profiles" / "gpu_like.json"

DRAFT = DraftLatency((1, 16), (0.2, 0.9), 0.05)
MODEL = LatencyModel(
    (
        Bucket(CostCurve((1, 4, 64), (0.4, 0.3, 7.0), 100, 1), {"draft_model": DRAFT}),
        Bucket(CostCurve((1, 9), (2.0, 2.0), 9000, 16), {"draft_model": DraftLatency((1,), (0.0,), 0.5)}),
    ),
    "draft_model",
)


def test_model_survives_a_file(tmp_path: Path) -> None:
    """Would catch: a field that is not written, or read as another type."""
    MODEL.save(tmp_path / "latency.json")
    assert LatencyModel.load(tmp_path / "latency.json").for_drafter("draft_model") == MODEL


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 1000, 5000])
@pytest.mark.parametrize(("rows", "context"), [(1, 50), (3, 100), (16, 10_000), (100, 9000)])
def test_model_times_are_positive_and_do_not_fall_beyond_the_last_point(rows: int, context: int, tokens: int) -> None:
    """Would catch: a line beyond the measured points that falls below zero."""
    step = MODEL.at(rows, context)
    last = step.target.queries[-1] * step.target.batch
    beyond = [step.target.seconds_of(size) for size in (last, last + tokens, last + 2.0 * tokens)]
    assert step.target.seconds_of(tokens) > 0 and beyond == sorted(beyond)
    assert step.draft.draft_seconds([1, tokens]) >= step.draft.overhead


@pytest.mark.parametrize(
    ("rows", "context", "batch"), [(1, 100, 1), (2, 100, 1), (5, 300, 16), (16, 512, 16), (100, 9000, 16), (1, 0, 1)]
)
def test_model_uses_the_nearest_bucket(rows: int, context: int, batch: int) -> None:
    """Would catch: a bucket that is nearest by difference and not by ratio; a logarithm of 0 for prompts of padding."""
    curves = [CostCurve((1, 2), (1.0, 2.0), context=512, batch=batch) for batch in (1, 16)]
    assert LatencyModel.from_curves(*curves).at(rows, context).target.batch == batch


def test_selecting_a_drafter_that_the_profile_lacks_raises() -> None:
    """Would catch: another drafter's latencies taken instead, or a drafter without cost refused."""
    model = LatencyModel.load(GPU_LIKE)
    with pytest.raises(ValueError, match=r"no drafter 'crystal_ball'; it has .*'draft_model'"):
        model.for_drafter("crystal_ball")
    free = model.for_drafter("crystal_ball", negligible_draft_cost=True).at(1, 1).draft
    assert free.draft_seconds([1, 1, 1]) == 0.0


@pytest.mark.parametrize("kind", ["any", "ngram"])
def test_drafter_without_passes_takes_the_overhead_alone(kind: str) -> None:
    """Would catch: passes of other drafters, as an assumed latency has them, counted for n-grams."""
    latency = DraftLatency((1.0, 64.0), (0.3, 2.4), overhead=0.1)
    model = LatencyModel((Bucket(CostCurve((1, 64), (1.0, 8.0), 512, 1), {kind: latency}),))
    draft = model.for_drafter("ngram", negligible_draft_cost=True).at(1, 1).draft
    assert (draft.pass_seconds(1000), draft.draft_seconds([])) == (0.0, 0.1)
    assert model.for_drafter("ngram").at(1, 1).draft == latency


CURVE = {"queries": [1, 2], "seconds": [1.0, 1.5], "context": 1, "batch": 1}
ANY = {"tokens": [1], "seconds": [0.0], "overhead": 0.0, "prefill": 0.0}
VALID: dict[str, Any] = {"format": FORMAT, "slices": [{"target": CURVE, "drafters": {"any": ANY}}]}


def _changed(path: str, value: Any) -> dict[str, Any]:
    data = copy.deepcopy(VALID)
    place: Any = data
    *parents, last = path.split(".")
    for name in parents:
        place = place[int(name) if name.isdigit() else name]
    place[last] = value
    return data


@pytest.mark.parametrize(
    "data",
    [
        *(None, [], "text", {}, {"format": VALID["format"]}),
        _changed("format", "something else"),
        _changed("slices", []),
        _changed("slices", [VALID["slices"][0]] * 1000),
        _changed("slices.0.target.queries", [2, 1]),
        _changed("slices.0.target.queries", ["a", "b"]),
        _changed("slices.0.target.seconds", [1.0]),
        _changed("slices.0.target.seconds", [1.0, float("nan")]),
        _changed("slices.0.target.seconds", [1.0, -1.0]),
        _changed("slices.0.target.batch", 0),
        _changed("slices.0.target.context", None),
        _changed("slices.0.drafters", None),
        _changed("slices.0.drafters.any.seconds", [float("inf")]),
        _changed("slices.0.drafters.any.overhead", "much"),
        _changed("slices.0.drafters.any.overhead", -1.0),
        _changed("slices.0.drafters.any", {**ANY, "tokens": [], "seconds": []}),
        _changed("slices.0.drafters.any", {"tokens": [1], "seconds": [1.0]}),
    ],
)
def test_model_of_invalid_data_raises_a_value_error(data: Any, tmp_path: Path) -> None:
    """Would catch: a damaged file that fails in a step of a call, or that is read in part."""
    (tmp_path / "file.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="not a latency file"):
        LatencyModel.load(tmp_path / "file.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((1, 2), (1.0,)), "seconds for each"),
        (((2, 3), (1.0, 1.0)), "increase from 1"),
        (((1, 1), (1.0, 1.0)), "increasing numbers"),
        (((1, 2), (1.0, 0.0)), "positive"),
    ],
)
def test_cost_curve_of_bad_points_raises(arguments: tuple[Any, Any], message: str) -> None:
    """Would catch: a curve without T(1), or with a time of zero to divide by."""
    with pytest.raises(ValueError, match=message):
        CostCurve(*arguments, context=256, batch=1)


def test_shared_latency_is_the_part_of_one_row() -> None:
    """Would catch: rows of `generate_many` that take their passes for free, or each for the whole."""
    curve = CostCurve((1, 8, 64), (1.0, 1.6, 7.0), context=256, batch=1)
    other = CostCurve((1, 64), (9.0, 9.0), context=256, batch=64)
    model = LatencyModel.from_curves(curve, other, draft_token=0.1)
    for drafts_together, seconds in ((False, 0.1), (True, 0.025)):
        shared = model.at(4, 100).per_row(4, drafts_together)
        assert [shared.target(q) for q in (1, 8)] == pytest.approx([curve(4) / 4, curve(32) / 4])
        assert shared.draft.draft_seconds([1]) == pytest.approx(seconds)


# Measuring T(q) and the cost of a drafter's pass: within the budget, once per model, rolled back

CURVES: dict[str, Callable[[int], float]] = {
    "flat": lambda q: 1 + 0.002 * (q - 1),
    "line": lambda q: 1 + 0.05 * (q - 1),
    "steep": lambda q: 1 + 0.5 * (q - 1),
    "not monotonic": lambda q: {1: 1.0, 2: 2.1, 8: 1.6, 24: 2.1, 64: 5.0}[q],
    "step": lambda q: {1: 1.0, 2: 1.1, 8: 3.1, 24: 3.0, 64: 4.1}[q],
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that measurements read."""
    clock = Clock()
    monkeypatch.setattr(time, "thread_time", clock)
    return clock


def measured(target: Any) -> CostCurve:
    """The curve of a target."""
    curve = calibrate.measured_curve(depth_call(model=Model()), target)
    assert curve is not None
    return curve


@pytest.mark.parametrize("name", CURVES)
def test_target_curve_is_exact_and_takes_at_most_thirteen_plain_steps(name: str, clock: Clock) -> None:
    """Would catch: a first call that is seconds slower, a size that is not rolled back, or an estimate far off."""
    target: Any = Target(clock, CURVES[name])
    curve = measured(target)
    assert clock.now <= 13
    timed = set(target.passes)
    assert timed >= {1, 2, 8} and set(curve.queries) == timed | {64}
    seconds = {q: curve.seconds[curve.queries.index(q)] for q in curve.queries}
    assert [seconds[q] for q in timed] == [pytest.approx(CURVES[name](q)) for q in timed]
    assert 24 in timed or CURVES[name](24) > 4, "small enough to be timed"
    if 64 not in timed:
        largest = max(timed)
        assert seconds[64] == pytest.approx(seconds[largest] * 64 / largest), "untimed sizes count as compute-bound"


def test_target_curve_where_the_time_of_threads_advances_in_coarse_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a division by the time of a pass that took less than a step, 15.6 ms on Windows."""

    def coarse() -> float:
        return perf_counter() // 0.0156 * 0.0156

    monkeypatch.setattr("time.thread_time", coarse)
    clocks._is_coarse.cache_clear()
    now = Clock()
    monkeypatch.setattr(time, "perf_counter", now)
    try:
        target: Any = Target(now, CURVES["flat"])
        assert measured(target).seconds[0] == pytest.approx(1.0)
    finally:
        clocks._is_coarse.cache_clear()


def test_time_of_threads_that_stands_still_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a call that waits for ever for the time to advance, as in a program that freezes clocks."""
    monkeypatch.setattr(time, "thread_time", lambda: 5.0)
    clocks._is_coarse.cache_clear()
    try:
        assert clocks.thread_clock() is time.perf_counter
    finally:
        clocks._is_coarse.cache_clear()


def test_drafter_timer_with_a_clock_that_goes_backwards_takes_no_time_below_zero() -> None:
    """Would catch: seconds below 0, of which no curve can be made, so that the call raises."""
    estimator = calibrate.DrafterLatencyEstimator(
        depth_call(model=Model(), negligible_draft_cost=False), CostCurve((1, 8), (1.0, 1.0), 8, 1)
    )
    for _ in range(5):
        clock = DecodingTimer()
        clock.add("draft", -100.0)
        clock.add("forward", 1.0)
        estimator.observe(StepRecord([1], [RowStep(1, 1, 0, 1)], 2, clock.step, (1,)))
    assert estimator.is_known and estimator.fraction == 0.0
    estimator.latency()


def test_target_curve_takes_the_minimum_of_several_times(clock: Clock) -> None:
    """Would catch: T(1) with a delay by another process, after which drafts always seem cheap."""
    slow = iter([5.0, 0.4] + [0.0] * 100)
    target: Any = Target(clock, lambda q: 1.0 + (next(slow) if q == 1 else 0.0))
    assert measured(target).seconds[0] == pytest.approx(1.0)


def test_target_curve_of_an_accelerator_leaves_out_captures(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: T(8) with the time in which its graph was captured, after which drafting never seems to pay."""
    captured: set[int] = set()

    def seconds(q: int) -> float:
        return CURVES["flat"](q) + (0.0 if q in captured or captured.add(q) else 20.0)  # type: ignore[func-returns-value]

    target: Any = Target(clock, seconds)
    target.device = torch.device("cuda")
    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    curve = measured(target)
    assert curve.seconds == tuple(pytest.approx(CURVES["flat"](q)) for q in curve.queries)


def test_target_curve_near_the_end_of_the_position_table(clock: Clock) -> None:
    """Would catch: timed passes over positions that the model does not have."""
    short: Any = Target(clock, CURVES["flat"], last_position=11)
    assert calibrate.measured_curve(depth_call(model=Model()), short) is None and not short.passes
    longer: Any = Target(clock, CURVES["flat"], last_position=20)
    assert measured(longer) and max(longer.passes) <= 11


def draft_record(seconds: float, load: float = 1.0, passes: tuple[int, ...] = (1, 4)) -> StepRecord:
    """A step with a draft of known time, on a machine that other processes slow down; the target's pass takes 2 s."""
    times = {"draft": load * seconds, "forward": load * 2.0}
    return StepRecord([4], [RowStep(3, 2, 1, 2)], 4, times, passes)


def test_drafter_timer_takes_the_median_without_the_first_draft() -> None:
    """Would catch: the drafter's prefill, or one delayed draft, taken for the time of every draft."""
    curve = CostCurve((1, 4), (1.0, 2.0), 256, 1)
    call = depth_call(model=Model(), negligible_draft_cost=False)
    estimator = calibrate.DrafterLatencyEstimator(call, curve)
    assert estimator.fraction == 0.3
    fractions = (9.0, 0.2, 0.3, 0.9, 0.3, 0.5)
    known = [estimator.observe(draft_record(3.0 * value, load)) for load, value in enumerate(fractions, start=1)]
    assert known == [False, False, False, False, True, False]
    assert estimator.fraction == pytest.approx(0.3)
    assert estimator.latency().at(1, 100).draft.draft_seconds((1, 4)) == pytest.approx(0.9)
    assert calibrate.DrafterLatencyEstimator(call, curve).fraction == pytest.approx(0.3), "kept for later calls"


def test_drafter_timer_of_an_accelerator_leaves_out_captures() -> None:
    """Some drafts capture graphs; until 16 are known, the fastest one so far counts if it is less than assumed."""
    curve, call = CostCurve((1, 4), (1.0, 2.0), 256, 1), depth_call(model=Model(), negligible_draft_cost=False)
    estimator = calibrate.DrafterLatencyEstimator(call, curve)
    estimator._is_cpu = False
    assert not estimator.observe(draft_record(0.1)) and estimator.fraction == 0.3
    for fraction, fastest in ((9.0, 0.3), (0.2, 0.2), (5.0, 0.2), (0.1, 0.1), *[(0.5, 0.1)] * 10, (0.5, 0.5)):
        assert estimator.observe(draft_record(3.0 * fraction))
        assert estimator.fraction == pytest.approx(fastest)
    assert estimator.is_known and not estimator.observe(draft_record(0.0))


def test_target_curve_that_was_delayed_is_measured_again(clock: Clock) -> None:
    """Would catch: T(q) of a moment at which other processes ran, kept as long as the model."""
    call, delayed = depth_call(model=Model()), CostCurve((1, 8), (0.1, 0.04), 8, 1)
    key = calibrate.curve_key(call)
    memory.store(call.model, key, delayed)
    estimator = calibrate.DrafterLatencyEstimator(call, delayed)
    for tokens, seconds in ((8, 0.05), (8, 0.021), (64, 0.001), (1, 0.06)):
        estimator.forget_slow_curve(StepRecord([7], [RowStep(7, 7, 0, 1)], tokens, {"forward": seconds}, (), 8))
        assert calibrate.recalled_curve(call) == delayed, "no proof: at least half of the time, or another size"
    estimator.forget_slow_curve(StepRecord([7], [RowStep(7, 7, 0, 1)], 8, {"forward": 0.019}, (), 8))
    assert calibrate.recalled_curve(call) is None
    target = Target(clock, lambda q: 0.05)
    curve = calibrate.measured_curve(call, target)
    assert curve is not None and curve(1) == pytest.approx(0.05) and curve(8) == pytest.approx(0.04)


def test_drafter_timer_without_passes_takes_the_time_of_a_draft() -> None:
    """Would catch: n-grams that propose nothing, whose search takes a tenth of every step and counts as free."""
    call, curve = depth_call(model=Model()), CostCurve((1, 4), (1.0, 2.0), 256, 1)
    estimator = calibrate.DrafterLatencyEstimator(call, curve)
    assert estimator.latency().at(1, 100).draft.draft_seconds(()) == 0.0 and not estimator.observe(draft_record(1.0))
    assert [estimator.observe(draft_record(0.1, passes=())) for _ in range(5)][-1]
    assert estimator.latency().at(1, 100).draft.draft_seconds(()) == pytest.approx(0.1)
    session = AdaptiveDepth().start(call)
    session._use_curves(curve)
    for _ in range(99):
        depths = session.depths([99])
        session.observe(StepRecord(depths, [RowStep(0, 0, 0, 1)], 1, {}, ()))
    assert depths == [0], "drafting has lost the time of two plain steps"


def test_assumed_pass_of_uno_takes_as_long_as_the_targets() -> None:
    """Would catch: drafts by passes of the target itself that seem to take 0.3 of it, and never pause."""
    step = assumed_latency(torch.device("cpu")).for_drafter("uno").at(1, 1)
    assert step.draft.pass_seconds(8) == step.target.seconds_of(8)
