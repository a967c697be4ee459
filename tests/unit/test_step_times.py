"""T(q) from the steps of a call: sizes that no step has timed, delayed steps, changes of the machine's speed."""

from typing import Any

import pytest

from hf_specgen.call_statistics import RowStep, StepRecord
from hf_specgen.depth import AdaptiveDepth
from hf_specgen.depth.step_times import SAMPLES, PassTimer, PassTimers, StepTimes
from tests.helpers.depth import Model, depth_call
from tests.unit.test_depth_latency import CURVES

STEEP = CURVES["steep"]


def step(size: int, seconds: float, rows: int = 1) -> StepRecord:
    """A step with so many tokens per row, in which the thread ran for so many seconds."""
    return StepRecord([size - 1] * rows, [RowStep(size - 1, size - 1, 0, 1)] * rows, size, {"thread": seconds})


def first_timer(call: Any = None, seconds: float = 1.0) -> PassTimer:
    timer = PassTimer.of_first_step(call or depth_call(model=Model()), step(1, seconds))
    assert timer is not None
    return timer


def test_first_timed_step_is_plain() -> None:
    """Would catch: T(1) from a step with drafts, or without a time of the thread."""
    call = depth_call(2, model=Model())
    untimed = StepRecord([0] * 2, [RowStep(0, 0, 0, 1)] * 2, 1, {"forward": 1.0})
    assert [PassTimer.of_first_step(call, one) for one in (step(2, 1.0, 2), untimed)] == [None] * 2
    assert PassTimer.of_first_step(call, step(1, 1.0, 2)) is not None


def test_each_number_of_present_rows_has_its_own_times() -> None:
    """Would catch: drafts of the last row of eight that look free, since eight tokens take as long as T(1) of eight."""
    model = Model()
    session = AdaptiveDepth().start(depth_call(8, model=model))
    session.observe(step(1, 4.0, 8))
    assert session.depths([4] * 8) != [0] * 8
    session.observe(step(3, 2.0, 1))  # seven rows have ended; this step was drafted by the times of eight
    assert session.depths([4] + [0] * 7) == [0] * 8, "a plain step times T(1) of one row"
    session.observe(step(1, 1.0, 1))
    for _ in range(SAMPLES):
        session.observe(step(4, 3.0, 1))
    one_row = session.step_latency(1, 100)
    all_rows = session.step_latency(8, 100)
    assert one_row is not None and all_rows is not None
    assert one_row.target.seconds_of(4) == pytest.approx(3.0, rel=0.1)
    assert all_rows.target.seconds_of(8) == 4.0
    later = AdaptiveDepth().start(depth_call(8, model=model))
    later.observe(step(1, 4.0, 8))
    later.observe(step(2, 2.0, 1))
    again = later.step_latency(1, 100)
    assert again is not None and again.target == one_row.target, "as the earlier call timed it"


def test_sizes_that_fewer_rows_have_not_had_take_what_their_tokens_add_to_a_pass_of_all_rows() -> None:
    """Would catch: 44 tokens of the last row assumed to be nearly free, though all rows had passes as large."""
    timers = PassTimers(depth_call(8, model=Model()))
    timers.observe(step(1, 4.0, 8))
    for _ in range(SAMPLES):
        timers.observe(step(8, 32.0, 8))
    timers.observe(step(1, 1.0, 1))
    all_rows, one_row = timers.curves
    assert one_row(1) == 1.0
    assert one_row(64) == pytest.approx(1.0 + all_rows(8) - 4.0, rel=0.1)


def test_sizes_without_a_time_are_assumed_to_be_fast() -> None:
    """Would catch: a size that is taken for too slow and never tried, or for one that costs nothing."""
    assert StepTimes({1: (1.0,)}, 8, 1).curve.queries == (1, 8, 24, 64)
    curve = StepTimes({1: (1.0,)}, 8, 1).curve
    assert curve(8) == pytest.approx(8**0.25) and 2 < curve(24) < 4
    flat = StepTimes({1: (1.0,), 8: (1.0,) * SAMPLES}, 8, 1).curve
    assert flat(24) == pytest.approx(1.0, rel=0.1)
    slow = StepTimes({1: (1.0,), 8: (8.0,) * SAMPLES}, 8, 1).curve
    assert slow(24) == pytest.approx(slow(8) * 3**0.5)


def test_many_tokens_of_all_rows_are_assumed_to_take_time_in_proportion() -> None:
    """Would catch: a first call with 64 draft tokens for each of eight rows, which takes fourteen plain steps."""
    one_row = StepTimes({1: (1.0,), 2: (1.25, 1.25)}, 8, 1).curve
    eight_rows = StepTimes({1: (1.0,), 2: (1.25, 1.25)}, 8, 8).curve
    assert one_row(64) < 7 and eight_rows(64) > 13
    assert eight_rows(8) == pytest.approx(one_row(8)), "64 tokens of all rows"


def test_time_that_other_sizes_let_expect_is_one_sample() -> None:
    """Would catch: a size that is chosen for ever because its first times happened to be short."""
    between = StepTimes({1: (1.0,), 4: (1.0, 1.0), 8: (3.0, 3.0), 6: (0.5,)}, 8, 1).curve
    assert between(4) == pytest.approx((2 * 1.0 + (1 + 2 * 3 / 7)) / 3), "on the line from 1 to 8"
    assert between(6) == pytest.approx((0.5 + 2.0) / 2), "on the line from 4 to 8"
    last = StepTimes({1: (1.0,), 4: (1.0, 1.0), 8: (3.0, 3.0, 5.0)}, 8, 1).curve
    assert last(8) == pytest.approx((3 * 3.0 + 1.0) / 4), "on the line from 1 to 4"


@pytest.mark.parametrize("name", CURVES)
def test_each_size_is_timed_by_its_first_steps(name: str) -> None:
    """Would catch: T(q) that is assumed for ever, a delayed step that counts, or decisions that never settle."""
    relative = CURVES[name]
    call = depth_call(model=Model())
    timer = first_timer(call)
    for size in (24, 2, 8):
        for number in range(SAMPLES):
            assert timer.observe(step(size, relative(size) * (5.0 if number % 3 == 0 else 1.0)))
            assert not timer.observe(step(100, 1.0)), "larger than any size that is kept"
            timer._slowdowns.extend([1.0] * 3)  # the speed of the machine has not changed: single steps are delayed
        assert not timer.observe(step(size, relative(size))), "settled"
    expected = [relative(q) for q in (1, 2, 8, 24)]
    assert [timer.times.curve(q) for q in (1, 2, 8, 24)] == pytest.approx(expected, rel=0.15)
    again = PassTimer.of_earlier_calls(call, 1)
    assert again is not None and again.times == timer.times


def test_first_time_of_a_size_does_not_make_it_slower_than_assumed() -> None:
    """Would catch: a size that is never tried again, since other processes delayed its first step."""
    timer = first_timer()
    assumed = timer.times.curve(8)
    timer.observe(step(8, 9.0))
    assert timer.times.curve(8) == assumed
    timer.observe(step(8, 3.0))
    assert timer.times.curve(8) == pytest.approx((2 * 3.0 + assumed) / 3)


@pytest.mark.parametrize("speeds", [(2.0, 0.5), (0.5, 2.0), (3.0, 3.0)])
def test_speed_of_the_machine_does_not_change_the_ratios(speeds: tuple[float, float]) -> None:
    """Would catch: T(1) at one speed and T(8) at another, which differ by a factor of two for as long as the model."""
    timer = first_timer()
    for _ in range(SAMPLES):
        timer.observe(step(1, 1.0))
    for size, speed in zip((8, 24), speeds, strict=True):
        for _ in range(3):
            timer.observe(step(1, speed))
        for _ in range(SAMPLES):
            timer.observe(step(size, speed * STEEP(size)))
    assert [timer.times.curve(q) for q in (1, 8, 24)] == pytest.approx([1.0, STEEP(8), STEEP(24)], rel=0.15)


def test_times_that_later_steps_contradict_are_taken_again() -> None:
    """Would catch: delayed steps whose time is kept as long as the model."""
    timer = first_timer()
    for _ in range(SAMPLES):
        timer.observe(step(8, 20.0))
        timer._slowdowns.extend([1.0] * 3)
    slow = timer.times.curve(8)
    assert slow == pytest.approx(20.0, rel=0.1)
    for seconds, is_slow in [(2.0, True), (2.0, True), (10.1, True), (2.0, True), (2.0, True), (2.0, False)]:
        timer.observe(step(8, seconds))
        timer._slowdowns.extend([1.0] * 3)
        assert timer.times.curve(8) == (slow if is_slow else pytest.approx(2.0, rel=0.1))


def test_first_step_of_a_later_call_tells_the_slowdown_only() -> None:
    """Would catch: a time of a new size at a speed that is unknown."""
    call = depth_call(model=Model())
    first = first_timer(call)
    for _ in range(SAMPLES):
        first.observe(step(1, 1.0))
    for is_timed in (False, True):
        later = PassTimer.of_earlier_calls(call, 1)
        assert later is not None and not later.observe(step(1 if is_timed else 2, 3.0))
        assert later.observe(step(8, 6.0)) == is_timed
    assert later.times.samples[8] == (pytest.approx(2.0),)


def test_sizes_of_a_later_call_in_which_no_size_was_timed_before_are_timed() -> None:
    """Would catch: T(q) that is assumed for ever, since every step of a call has a large draft of another size."""
    call = depth_call(model=Model())
    first_timer(call)
    later = PassTimer.of_earlier_calls(call, 1)
    assert later is not None
    for size in range(57, 65):
        later.observe(step(size, 20.0))
    assert later.times.curve(64) > 15
    assert [size for size, times in later.times.samples.items() if len(times) > 1] == [64]


def plain_step(rows: int = 1) -> StepRecord:
    """A step without drafts, in which the thread ran for a second."""
    return step(1, 1.0, rows)


def test_times_are_kept_by_model_rows_and_context() -> None:
    """Would catch: a first step without a draft in each call, or one T(q) for all numbers of rows and lengths."""
    model = Model()
    sizes = [(1, 100, True), (1, 300, False), (2, 100, True), (1, 600, False), (1, 3000, True)]
    for rows, prompt, is_first in sizes:
        session = AdaptiveDepth().start(depth_call(rows, prompt, model=model))
        assert (session.latency is None) == is_first, (rows, prompt)
        assert (session.depths([4] * rows) == [0] * rows) == is_first, "the first step is plain"
        session.observe(plain_step(rows))
        assert session.latency is not None


def test_another_object_of_the_same_architecture_continues_with_all_times() -> None:
    """Would catch: a measurement for each object of a model, the latency of another model, sizes timed again."""
    for name, is_known, count in (("one", False, 2), ("one", True, 4), ("two", False, 2)):
        call = depth_call(model=Model(name))
        session = AdaptiveDepth().start(call)
        assert (session.latency is not None) == is_known, name
        session.observe(plain_step())
        for _ in range(2):
            session.observe(step(5, 4.0))
        timer = PassTimer.of_earlier_calls(call, 1)
        assert timer is not None and timer.times.samples[5] == pytest.approx((4.0,) * count)
