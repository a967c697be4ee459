"""Latency models: interpolation, files, the assumed GPU profile, and what is learnt from the times of steps."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specgen.counters import RowStep
from hf_specgen.depth import CostCurve, DraftLatency, LatencyModel, Slice, StepRecord
from hf_specgen.depth.latency import StepLatency, slice_of
from hf_specgen.depth.recorder import (
    DRAFTED_NEEDED,
    PLAIN_NEEDED,
    PLAIN_NEEDED_AGAIN,
    SELDOM_DRAFTED,
    STEPS_NEEDED,
    LatencyRecorder,
)

GPU_LIKE = Path(__file__).parents[2] / "benchmarks" / "profiles" / "gpu_like.json"
positive = st.floats(1e-6, 1e3)


@st.composite
def models(draw: st.DrawFn) -> LatencyModel:
    slices = []
    for _ in range(draw(st.integers(1, 4))):
        queries = sorted({1, *draw(st.lists(st.integers(2, 300), max_size=5))})
        seconds = draw(st.lists(positive, min_size=len(queries), max_size=len(queries)))
        curve = CostCurve(tuple(queries), tuple(seconds), draw(st.integers(1, 10**5)), draw(st.integers(1, 64)))
        widths = sorted(draw(st.sets(st.integers(1, 64), min_size=1, max_size=4)))
        times = draw(st.lists(st.floats(0, 10), min_size=len(widths), max_size=len(widths)))
        draft = DraftLatency(tuple(widths), tuple(times), draw(st.floats(0, 1)), draw(st.floats(0, 1)))
        slices.append(Slice(curve, {"draft_model": draft}))
    return LatencyModel(tuple(slices), "draft_model", {"target": "some model"})


@settings(max_examples=100, deadline=None)
@given(models())
def test_model_survives_a_file(model: LatencyModel) -> None:
    assert LatencyModel.from_dict(json.loads(json.dumps(model.to_dict())), "draft_model") == model


@settings(max_examples=100, deadline=None)
@given(models(), st.integers(1, 100), st.integers(1, 10**5), st.integers(1, 5000))
def test_model_times_are_positive_and_do_not_fall_beyond_the_last_point(
    model: LatencyModel, rows: int, context: int, tokens: int
) -> None:
    step = model.at(rows, context)
    last = step.target.queries[-1] * step.target.batch
    beyond = step.target.by_tokens(np.array([last, last + tokens, last + 2.0 * tokens]))
    assert float(step.target.by_tokens(tokens)) > 0
    assert (np.diff(beyond) >= -1e-9).all()
    assert step.drafter.draft([1, tokens]) >= step.drafter.overhead


@settings(max_examples=100, deadline=None)
@given(models(), st.integers(1, 64), st.floats(0.5, 500))
def test_seconds_of_one_number_of_tokens_equal_those_of_an_array(model: LatencyModel, rows: int, tokens: float) -> None:
    target, drafter = model.at(rows, 1)
    for size in (tokens, *target.queries):
        assert target.seconds_of(size) == pytest.approx(float(target.by_tokens(size)))
        assert target(size) == pytest.approx(float(target.by_tokens(size * target.batch)))
        assert drafter.seconds_of(size) == pytest.approx(float(drafter.by_tokens(size)))


@pytest.mark.parametrize(
    ("rows", "context", "batch"), [(1, 100, 1), (2, 100, 1), (5, 300, 16), (16, 512, 16), (100, 9000, 16)]
)
def test_model_uses_the_nearest_slice(rows: int, context: int, batch: int) -> None:
    curves = [CostCurve((1, 2), (1.0, 2.0), context=512, batch=batch) for batch in (1, 16)]
    assert LatencyModel.from_curves(*curves).at(rows, context).target.batch == batch


@pytest.mark.parametrize("rows", [1, 3, 4, 17])
@pytest.mark.parametrize("context", [1, 512, 513, 40_000])
def test_slice_of_any_call_is_not_smaller_and_finds_itself(rows: int, context: int) -> None:
    place = slice_of(rows, context)
    assert place[0] >= rows and place[1] >= context and slice_of(*place) == place


def test_model_rows_count_as_tokens() -> None:
    """A pass over 4 tokens in each of 4 rows takes as long as one over 16 tokens in one row."""
    step = LatencyModel.from_curves(CostCurve((1, 16), (1.0, 2.5), context=512, batch=1)).at(4, 100)
    assert float(step.target.by_tokens(4 * 4)) == 2.5


def test_selecting_a_drafter_that_the_profile_lacks_raises() -> None:
    model = LatencyModel.load(GPU_LIKE)
    with pytest.raises(ValueError, match=r"no drafter 'crystal_ball'; it has .*'draft_model'"):
        model.select("crystal_ball")
    free = model.select("crystal_ball", negligible_draft_cost=True).at(1, 1).drafter
    assert free.draft([1, 1, 1]) == 0.0


@pytest.mark.parametrize("tokens", [1, 2, 17, 64, 256, 257, 512, 2048])
def test_gpu_like_profile_follows_its_formula(tokens: int) -> None:
    """T(q)/T(1) = 1 + 0.002 (q - 1) for q = rows x tokens up to 256, rising as q/256 beyond."""
    expected = 1 + 0.002 * (min(tokens, 256) - 1)
    expected *= max(1.0, tokens / 256)
    for rows, context in ((1, 10), (16, 100_000)):
        step = LatencyModel.load(GPU_LIKE).select("draft_model").at(rows, context)
        assert float(step.target.by_tokens(tokens)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [("draft_model", 0.05), ("head", 0.02), ("layer_skip", 0.5), ("ngram", 0.0)],
)
def test_gpu_like_profile_has_every_kind_of_drafter(kind: str, seconds: float) -> None:
    drafter = LatencyModel.load(GPU_LIKE).select(kind).at(1, 1).drafter
    assert drafter.draft([1]) == drafter.draft([64]) == pytest.approx(seconds)


def test_gpu_like_profile_medusa_heads_run_once_or_once_per_level() -> None:
    """A draft of heads that read the path has a further pass for each level after the first."""
    drafter = LatencyModel.load(GPU_LIKE).select("medusa").at(1, 1).drafter
    assert drafter.draft([]) == pytest.approx(0.01) and drafter.draft([4, 64]) == pytest.approx(0.03)


@pytest.mark.parametrize(("depth", "tokens", "speedup"), [(5, 3.14, 2.5), (16, 4.58, 3.4)])
def test_gpu_like_profile_projects_known_figures(depth: int, tokens: float, speedup: float) -> None:
    """A chain of 5, and a tree of 16 nodes in 6 levels, of the 8M draft model, with their tokens per step."""
    step = LatencyModel.load(GPU_LIKE).select("draft_model").at(1, 256)
    passes = {5: [1] * 5, 16: [1, 4, 4, 4, 4, 4]}[depth]
    seconds = float(step.target.by_tokens(1 + depth)) + step.drafter.draft(passes)
    assert tokens / seconds == pytest.approx(speedup, abs=0.06)


def test_gpu_like_profile_calls_itself_an_assumption() -> None:
    assert "assumption" in LatencyModel.load(GPU_LIKE).description["assumption"]


VALID: dict[str, Any] = LatencyModel.from_curves(CostCurve((1, 2), (1.0, 1.5), context=1, batch=1)).to_dict()


def _changed(path: str, value: Any) -> dict[str, Any]:
    data = json.loads(json.dumps(VALID))
    place: Any = data
    *parents, last = path.split(".")
    for name in parents:
        place = place[int(name) if name.isdigit() else name]
    place[int(last) if last.isdigit() else last] = value
    return data


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        "text",
        {},
        {"format": VALID["format"]},
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
        _changed("slices.0.drafters.any", {"tokens": [1], "seconds": [1.0], "surprise": 1}),
        _changed("description", 5),
    ],
)
def test_model_of_invalid_data_raises_a_value_error(data: Any) -> None:
    with pytest.raises(ValueError, match="not a latency profile"):
        LatencyModel.from_dict(copy.deepcopy(data))


def test_cost_curve_survives_json_and_refuses_other_text() -> None:
    curve = CostCurve((1, 4), (0.010, 0.016), context=256, batch=2)
    assert CostCurve.from_json(curve.to_json()) == curve
    for text in ("", "{}", "[1]", '{"queries": 1}'):
        with pytest.raises(ValueError, match="not a saved cost curve"):
            CostCurve.from_json(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((1, 2), (1.0,)), "2 queries need as many seconds"),
        (((2, 3), (1.0, 1.0)), "increase from 1"),
        (((1, 1), (1.0, 1.0)), "increase from 1"),
        (((1, 2), (1.0, 0.0)), "seconds must be positive"),
    ],
)
def test_cost_curve_of_bad_points_raises(arguments: tuple[Any, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostCurve(*arguments, context=256, batch=1)


# What is learnt from steps.

PRIOR = StepLatency(CostCurve((1, 2), (1.0, 1.08), context=1, batch=1), DraftLatency(seconds=(0.1,)))


def _step(width: int, seconds: float, draft: float = 0.0, rows: int = 1, passes: list[int] | None = None) -> StepRecord:
    depth = width - 1
    outcome = RowStep(depth, depth, 0, 1)
    times = {"draft": draft, "forward": seconds, "verify": 0.0}
    return StepRecord([depth] * rows, [outcome] * rows, width, times, passes)


def _recorder(rows: int = 1, measured: bool = False) -> LatencyRecorder:
    return LatencyRecorder(rows, 512, PRIOR, measured)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("slope", [0.0, 0.0005, 0.004])
def test_recorder_learns_a_line_also_beyond_what_was_measured(rows: int, slope: float) -> None:
    recorder = _recorder(rows)
    for width in [1, 4, 24] * 4:
        recorder.add(_step(width, 0.010 + slope * width, rows=rows), unread=0)
    target = recorder.estimate().target
    for width in (1, 2, 4, 16, 24, 32, 64):
        expected = 0.010 + slope * width
        assert float(target.by_tokens(rows * width)) == pytest.approx(expected, rel=1e-6 if width <= 24 else 0.04)


def test_recorder_a_slow_second_token_does_not_count_for_larger_sizes() -> None:
    """T(2) is twice T(1) where a kernel for one token is faster; larger drafts cost little more."""
    recorder = _recorder()
    for width in [1, 4, 16] * 4:
        recorder.add(_step(width, 0.010 if width == 1 else 0.020 + 0.0005 * width), unread=0)
    target = recorder.estimate().target
    assert float(target.by_tokens(48)) == pytest.approx(0.044, rel=0.05)


@pytest.mark.parametrize("seconds", [0.009, 0.010])
def test_recorder_of_a_fast_step_of_two_tokens_does_not_take_tokens_for_free(seconds: float) -> None:
    """Would catch: the next draft is a tree of 64 nodes, in a first call."""
    recorder = _recorder()
    for _ in range(3):
        recorder.add(_step(1, 0.010), unread=0)
        recorder.add(_step(2, seconds), unread=0)
    assert recorder.estimate().target.relative(64) > 3


def test_recorder_drops_the_first_step_of_each_size() -> None:
    """In the first, kernels are prepared."""
    recorder = _recorder()
    for seconds in (9.0, 1.0, 1.1):
        recorder.add(_step(1, seconds), unread=0)
    assert float(recorder.estimate().target.by_tokens(1)) == pytest.approx(1.0)


def test_recorder_one_disturbed_step_in_five_changes_nothing() -> None:
    recorder = _recorder()
    for seconds in (0.010, 0.010, 0.010, 0.500, 0.010, 0.010):
        recorder.add(_step(1, seconds), unread=0)
        recorder.add(_step(4, 1.3 * seconds), unread=0)
    target = recorder.estimate().target
    assert target.relative(4) == pytest.approx(1.3) and target.seconds[0] == pytest.approx(0.010)


def test_recorder_keeps_a_dent_but_no_step_below_plain() -> None:
    """Kernels for a few tokens are slow on some machines, T(3) > T(8): then 7 draft tokens are better than 2."""
    recorder = _recorder()
    for _ in range(8):
        for width, seconds in ((1, 0.010), (3, 0.015), (8, 0.012), (12, 0.009)):
            recorder.add(_step(width, seconds), unread=0)
    target = recorder.estimate().target
    assert float(target.by_tokens(3)) > float(target.by_tokens(8)) > float(target.by_tokens(1))
    assert float(target.by_tokens(12)) == pytest.approx(0.010)


@pytest.mark.parametrize("slow", [1.4, 3.0])
def test_recorder_of_a_machine_whose_speed_changes_keeps_the_ratios(slow: float) -> None:
    """Would catch: wide drafts for good because they were measured while the machine was fast."""
    recorder = _recorder()
    for width in [4, 8] * 5 + [16] * 5:
        speed = slow if width < 16 else 1.0
        recorder.add(_step(1, 0.010 * speed), unread=0)
        recorder.add(_step(width, (0.010 + 0.0005 * width) * speed, draft=0.002 * speed, passes=[1]), unread=0)
    target, drafter = recorder.estimate()
    for width in (4, 8, 16):
        assert target.relative(width) == pytest.approx(1 + 0.05 * width, rel=0.02)
    assert drafter.draft([1]) / target.seconds[0] == pytest.approx(0.2, rel=0.02)


def test_recorder_without_wide_steps_has_the_shape_of_the_prior() -> None:
    recorder = _recorder()
    for _ in range(4):
        recorder.add(_step(1, 0.020), unread=0)
    assert recorder.estimate().target.relative(11) == pytest.approx(1.8)
    assert recorder.estimate().drafter.draft([1]) == pytest.approx(0.002)


@pytest.mark.parametrize(("per_pass", "overhead"), [(0.002, 0.0), (0.002, 0.001), (0.0, 0.004)])
def test_recorder_tells_passes_from_the_overhead_of_a_draft(per_pass: float, overhead: float) -> None:
    """A draft model takes time in proportion to its passes, heads that run once the same for any draft."""
    recorder = _recorder()
    for depth in [3, 0, 1, 5] * 4:
        step = _step(1 + depth, 0.010, overhead + per_pass * depth)
        recorder.add(StepRecord([5], step.rows, step.tokens_per_row, step.seconds), unread=0)
    drafter = recorder.estimate().drafter
    for depth in (0, 2, 8):
        assert drafter.draft([1] * depth) == pytest.approx(overhead + per_pass * depth, rel=0.05, abs=1e-5)


def test_recorder_learns_passes_by_width() -> None:
    recorder = _recorder()
    for passes in [[1], [8, 8], [64]] * 4:
        recorder.add(_step(3, 0.010, draft=sum(0.001 + 0.0001 * tokens for tokens in passes), passes=passes), unread=0)
    drafter = recorder.estimate().drafter
    for tokens in (1, 8, 64):
        assert drafter.draft([tokens]) == pytest.approx(0.001 + 0.0001 * tokens, rel=0.001)
    assert drafter.draft([128]) > drafter.draft([64])


@pytest.mark.parametrize("place", [1, 4, 9])
def test_recorder_one_disturbed_step_of_a_rare_size_changes_little(place: int) -> None:
    """Would catch: drafting that is turned off for good by one slow pass, the only one of its size."""
    recorder = _recorder()
    for number, width in enumerate([1, 2, 1, 2, 1, 2, 1, 2, 1, 2]):
        pause = 0.3 if number == place else 0.0
        step = _step(
            4 + 12 * (pause > 0), 0.010 + pause, draft=0.003 * width + pause, passes=[1 + 7 * (pause > 0)] * width
        )
        recorder.add(step, unread=0)
        recorder.add(_step(1, 0.010), unread=0)
    recorder.add(_step(16, 0.011), unread=0)
    target, drafter = recorder.estimate()
    assert float(target.by_tokens(16)) < 0.012
    assert drafter.draft([1]) == pytest.approx(0.003, rel=0.1) and drafter.draft([8]) < 0.004


def test_recorder_learns_the_prefill_of_the_drafter_from_long_unread_texts() -> None:
    """A pause of the machine while one token is read must not make every prompt seem too expensive to read."""
    recorder = _recorder()
    for unread, pause in ((0, 0.0), (0, 0.0), (1000, 0.0), (1, 5.0), (0, 0.0), (500, 0.0)):
        recorder.add(_step(3, 0.010, draft=0.002 + 0.0001 * unread + pause), unread=unread)
    assert recorder.estimate().drafter.prefill == pytest.approx(0.0001, rel=0.05)


def test_recorder_one_slow_prefill_of_the_drafter_changes_nothing() -> None:
    """Would catch: drafting that is turned off for long prompts after a pause of the machine while one was read."""
    recorder = _recorder()
    for unread, pause in ((0, 0.0), (0, 0.0), (1000, 0.0), (0, 0.0), (1000, 2.0), (0, 0.0), (500, 0.0)):
        recorder.add(_step(3, 0.010, draft=0.002 + 0.0001 * unread + pause), unread=unread)
    assert recorder.estimate().drafter.prefill == pytest.approx(0.0001, rel=0.05)


@pytest.mark.parametrize("measured", [False, True])
def test_recorder_asks_for_plain_steps_until_it_knows_them(measured: bool) -> None:
    recorder, plain, steps = _recorder(measured=measured), 0, 0
    while not recorder.complete:
        width = 1 if recorder.wants_plain_step else 4
        recorder.add(_step(width, 0.010), unread=0)
        plain, steps = plain + (width == 1), steps + 1
        assert steps < 150
    needed = PLAIN_NEEDED_AGAIN if measured else PLAIN_NEEDED
    assert needed < plain <= needed + 1
    assert steps - plain >= DRAFTED_NEEDED
    assert not recorder.wants_plain_step


def test_recorder_is_complete_after_fewer_drafts_where_they_are_rare() -> None:
    recorder, drafted = _recorder(), 0
    for step in range(STEPS_NEEDED):
        assert not recorder.complete
        drafted += step % 6 == 5
        recorder.add(_step(4 if step % 6 == 5 else 1, 0.010), unread=0)
    assert recorder.complete
    assert SELDOM_DRAFTED < drafted < DRAFTED_NEEDED


def test_fixed_latency_of_sizes_that_were_not_measured_is_not_extrapolated_from_noise() -> None:
    """Would catch: trees of 64 nodes for good, since 12 tokens happened to be as fast as 3 while they were measured."""
    recorder = _recorder()
    for width, seconds in ((1, 0.010), (3, 0.0115), (5, 0.011), (7, 0.0116), (12, 0.0105)):
        for _ in range(12):
            recorder.add(_step(width, seconds), unread=0)
    seconds = {final: recorder.estimate(final=final).target.seconds_of(64) for final in (False, True)}
    assert seconds[False] < 0.014
    assert seconds[True] > 0.020
    assert recorder.estimate(final=True).target.seconds_of(12) == recorder.estimate().target.seconds_of(12)
