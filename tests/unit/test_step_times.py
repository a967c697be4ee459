"""T(q) from the steps of a call: sizes that no step has timed, delayed steps, changes of the machine's speed."""

import json
import math
from typing import Any

import numpy as np
import pytest

from hf_specgen.call_statistics import RowStep, StepRecord
from hf_specgen.depth import AdaptiveDepth
from hf_specgen.depth.step_times import SETTLED, SIZES, CurveEstimator, CurvePosterior, TargetLatencyEstimator
from tests.helpers.depth import Model, depth_call
from tests.unit.test_depth_latency import CURVES

STEEP = CURVES["steep"]


def step(size: int, seconds: float, rows: int = 1) -> StepRecord:
    """A step with `size` tokens per row, in which the thread ran for `seconds`."""
    return StepRecord([size - 1] * rows, [RowStep(size - 1, size - 1, 0, 1)] * rows, size, {"thread": seconds})


def first_estimator(call: Any = None, seconds: float = 1.0) -> CurveEstimator:
    estimator = CurveEstimator.of_first_step(call or depth_call(model=Model()), step(1, seconds))
    assert estimator is not None
    return estimator


def test_first_timed_step_is_plain() -> None:
    """Would catch: T(1) from a step with drafts, or without a time of the thread."""
    call = depth_call(2, model=Model())
    untimed = StepRecord([0] * 2, [RowStep(0, 0, 0, 1)] * 2, 1, {"forward": 1.0})
    assert [CurveEstimator.of_first_step(call, one) for one in (step(2, 1.0, 2), untimed)] == [None] * 2
    assert CurveEstimator.of_first_step(call, step(1, 1.0, 2)) is not None


def test_each_number_of_present_rows_has_its_own_times() -> None:
    """Would catch: drafts of the last row of eight that look free, since eight tokens take as long as T(1) of eight."""
    model = Model()
    session = AdaptiveDepth().start(depth_call(8, model=model))
    session.observe(step(1, 4.0, 8))
    assert session.depths([4] * 8) != [0] * 8
    session.observe(step(3, 2.0, 1))  # seven rows have ended; this step was drafted by the times of eight
    assert session.depths([4] + [0] * 7) == [0] * 8, "a plain step times T(1) of one row"
    session.observe(step(1, 1.0, 1))
    for _ in range(SETTLED):
        session.observe(step(4, 3.0, 1))
    one_row = session.step_latency(1, 100)
    all_rows = session.step_latency(8, 100)
    assert one_row is not None and all_rows is not None
    assert one_row.target.seconds_of(4) == pytest.approx(3.0, rel=0.1)
    assert all_rows.target.seconds_of(8) == pytest.approx(4.0)
    later = AdaptiveDepth().start(depth_call(8, model=model))
    later.observe(step(1, 4.0, 8))
    later.observe(step(2, 2.0, 1))
    again = later.step_latency(1, 100)
    assert again is not None and again.target == one_row.target, "as the earlier call timed it"


def test_sizes_that_fewer_rows_have_not_had_take_what_their_tokens_add_to_a_pass_of_all_rows() -> None:
    """Would catch: 44 tokens of the last row assumed to be nearly free, though all rows had passes as large."""
    estimator = TargetLatencyEstimator(depth_call(8, model=Model()))
    estimator.observe(step(1, 4.0, 8))
    for _ in range(SETTLED):
        estimator.observe(step(8, 32.0, 8))
        estimator.observe(step(1, 4.0, 8))
    estimator.observe(step(1, 1.0, 1))
    all_rows, one_row = estimator.curves
    assert one_row(1) == pytest.approx(1.0)
    assert one_row(64) == pytest.approx(1.0 + all_rows(8) - 4.0, rel=0.1)


def posterior_of(*steps: tuple[int, float], batch: int = 1) -> CurvePosterior:
    """After a plain step of one second, and these sizes and seconds."""
    posterior = CurvePosterior.of_plain_step(1.0, 8, batch)
    for size, seconds in steps:
        posterior = posterior.with_step(size, seconds)
    return posterior


def test_distribution_is_the_one_given_all_steps_at_once() -> None:
    """The readable reference: the times of all steps as one normal distribution, conditioned on in one go.

    Would catch: an update with the variance of another step, or one that forgets what two sizes have in common.
    """
    steps = [(1, 1.0), (2, 1.3), (2, 1.2), (8, 1.9), (1, 1.1), (24, 2.2), (2, 1.25)]
    noise, change, first, doubling = 0.08, 0.05, 0.3, 0.2
    logs = np.log([seconds for _, seconds in steps])
    sizes = [size for size, _ in steps]
    # The speed of step i is the first one's and the sum of i changes; T(q) / T(1) a sum over the doublings up to q.
    numbers = np.arange(len(steps))
    speeds = first**2 + change**2 * np.minimum.outer(numbers, numbers)
    doublings = np.log2(sizes)
    covariance = speeds + doubling**2 * np.minimum.outer(doublings, doublings)
    observed = covariance + np.diag([0.0] + [noise**2] * (len(steps) - 1))  # the first one's noise is in `first`
    # Seen from the first step's time, which is the mean of the speed.
    means = logs[0] + 0.25 * np.log(sizes)
    posterior = CurvePosterior.of_plain_step(steps[0][1], 8, 1)
    for size, seconds in steps[1:]:
        posterior = posterior.with_step(size, seconds)
    assert max(abs(logs - means)) < 0.2, "no step is so far off that it has less weight"
    rest = np.linalg.solve(observed[1:, 1:], logs[1:] - means[1:])
    for size in (2, 4, 8, 24, 64):
        shared = doubling**2 * np.minimum(math.log2(size), doublings[1:])
        assert posterior.means[SIZES.index(size)] == pytest.approx(0.25 * math.log(size) + shared @ rest), size
    assert posterior.means[0] == pytest.approx(logs[0] + speeds[-1, 1:] @ rest)


def test_sizes_without_a_step_are_assumed_to_be_fast() -> None:
    """Would catch: a size that is taken for too slow and never tried, or for one that costs nothing."""
    curve = posterior_of().curve
    assert curve.queries == (1, 8, 24, 64)
    assert curve(8) == pytest.approx(8**0.25) and 2 < curve(24) < 4
    flat = posterior_of(*[(8, 1.0), (1, 1.0)] * SETTLED).curve
    assert flat(24) == pytest.approx(1.0, rel=0.1)
    slow = posterior_of(*[(8, 8.0), (1, 1.0)] * SETTLED).curve
    assert slow(24) == pytest.approx(slow(8) * 3**0.5)


def test_many_tokens_of_all_rows_are_assumed_to_take_time_in_proportion() -> None:
    """Would catch: a first call with 64 draft tokens for each of eight rows, which takes fourteen plain steps."""
    one_row, eight_rows = [posterior_of((2, 1.25), (2, 1.25), batch=batch).curve for batch in (1, 8)]
    assert one_row.relative(64) < 7.5 and eight_rows.relative(64) > 13
    assert eight_rows(8) == pytest.approx(one_row(8)), "64 tokens of all rows"


def test_no_pass_takes_less_than_one_token() -> None:
    """Would catch: drafts that gain time even if no token is accepted."""
    curve = posterior_of(*[(4, 0.5), (1, 1.0)] * SETTLED).curve
    assert curve(1) <= curve(4) < 1.02 * curve(1)
    uncertain = posterior_of((4, 1.0)).with_step(4, 1.0).curve
    assert uncertain.relative(4) > 1.05, "the mean of what is possible"


def run_on_a_machine(name: str, seed: int, first: float = 0.0, steps: int = 200) -> CurveEstimator:
    """The estimator after steps of changing sizes on a machine of changing speed; the first step's delay is given."""
    random = np.random.default_rng(seed)
    speed = 0.0
    estimator = first_estimator(seconds=math.exp(first))
    size = 1
    for _ in range(steps):
        speed += random.normal(0, 0.04) + (random.normal(0, 0.4) if random.random() < 0.02 else 0.0)
        if random.random() < 0.2:  # else several steps of the same size, as when a text is copied
            size = int(random.choice([1, 2, 8, 24]))
        used = 1 if estimator.needs_plain_step else size
        delay = abs(random.normal(0, 0.6)) if random.random() < 0.05 else 0.0
        estimator.observe(step(used, CURVES[name](used) * math.exp(speed + random.normal(0, 0.06) + delay)))
    return estimator


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("first", [0.0, 0.5])
def test_ratios_are_right_on_a_machine_of_changing_speed(name: str, first: float) -> None:
    """Would catch: T(1) at one speed and T(8) at another, sizes compared with themselves, a first step that counts.

    As medians of times over the speed of the last three steps they were off by a factor of up to 1.5.
    """
    for seed in range(10):
        curve = run_on_a_machine(name, seed, first).posterior.curve
        ratios = [curve.relative(q) / CURVES[name](q) for q in (2, 8, 24)]
        assert ratios == pytest.approx([1.0] * 3, rel=0.25), seed


def test_large_change_of_speed_within_steps_of_one_size_does_not_change_its_ratio() -> None:
    """Would catch: a size whose steps after the change count as those of another T(q)."""
    steps = [(1, 1.0), (4, 1.5)] * 5 + [(4, 3.0)] * SETTLED
    assert posterior_of(*steps).curve.relative(4) == pytest.approx(1.5, rel=0.15)


def test_plain_steps_are_needed_after_twice_as_many_steps() -> None:
    """Would catch: T(1) of one step, by which all drafts look free if it was delayed; plain steps for ever."""
    estimator = first_estimator()
    needed = []
    for _ in range(70):
        needed.append(estimator.needs_plain_step)
        estimator.observe(step(1 if needed[-1] else 4, 1.0))
    assert [number for number, one in enumerate(needed) if one] == [7, 15, 31, 63]
    unneeded = first_estimator()
    for _ in range(SETTLED):
        assert not unneeded.needs_plain_step
        unneeded.observe(step(1, 1.0))


def test_size_is_settled_after_some_steps() -> None:
    """Would catch: decisions that never settle, and sizes that are not kept for later calls."""
    call = depth_call(model=Model())
    estimator = first_estimator(call)
    for size in (24, 2, 8):
        changes = [estimator.observe(step(size, STEEP(size))) for _ in range(2 * SETTLED)]
        assert changes[:2] == [True, True], "the first steps count at once"
        assert any(changes[2:SETTLED])
        kept = CurveEstimator.of_earlier_calls(call, 1)
        assert not any(estimator.observe(step(size, STEEP(size))) for _ in range(2 * SETTLED)), "settled"
        assert not estimator.observe(step(100, 1.0)), "larger than any size that is kept"
        again = CurveEstimator.of_earlier_calls(call, 1)
        assert kept is not None and again is not None
        assert again.posterior.counts == kept.posterior.counts and kept.posterior.counts[size] >= SETTLED
        assert (again.posterior.means == kept.posterior.means).all()


def test_updates_become_rare() -> None:
    """Would catch: T(q) computed in every step, which takes longer than all other decisions of the step."""
    estimator = first_estimator()
    random = np.random.default_rng(0)
    updates = [estimator.observe(step(int(size), 1.0)) for size in random.integers(1, 17, 200)]
    assert sum(updates[:50]) <= 40
    assert sum(updates[50:]) <= 25
    assert estimator.posterior.counts[5] > 5, "all steps are used"


def test_first_step_of_a_size_does_not_make_it_slower_than_assumed() -> None:
    """Would catch: a size that is never tried again, since other processes delayed its first step."""
    estimator = first_estimator()
    assumed = estimator.posterior.curve.relative(8)
    estimator.observe(step(8, 9.0))
    assert estimator.posterior.curve.relative(8) == pytest.approx(assumed)
    estimator.observe(step(8, 9.0))
    assert estimator.posterior.curve.relative(8) > 1.5 * assumed


def test_later_call_at_another_speed_keeps_the_ratios() -> None:
    """Would catch: the first steps of a call on a slower machine taken for a larger T(q)."""
    call = depth_call(model=Model())
    first = first_estimator(call)
    for _ in range(SETTLED):
        first.observe(step(1, 1.0))
        first.observe(step(4, 2.0))
    later = CurveEstimator.of_earlier_calls(call, 1)
    assert later is not None
    for size, seconds in ((8, 9.0), (1, 3.0), (8, 9.0), (1, 3.0), (8, 9.0)):
        later.observe(step(size, seconds))
    assert [later.posterior.curve.relative(q) for q in (4, 8)] == pytest.approx([2.0, 3.0], rel=0.15)


def test_size_is_rounded_up_to_the_next_that_is_told_apart() -> None:
    """Would catch: an error in a call with 17 tokens, or times that are kept for sizes that come once."""
    call = depth_call(model=Model())
    first_estimator(call)
    estimator = CurveEstimator.of_earlier_calls(call, 1)
    assert estimator is not None
    for size in range(1, 65):
        estimator.observe(step(size, 20.0))
    for _ in range(10):
        estimator.observe(step(1, 20.0))
    sizes = {**dict.fromkeys(range(2, 17), 1), **dict.fromkeys(range(24, 65, 8), 8)}
    assert {size: count for size, count in estimator.posterior.counts.items() if size > 1} == sizes


def test_saved_times_are_those_that_were_saved() -> None:
    """Would catch: times that JSON cannot hold, and an uncertainty that decreases without a step."""
    posterior = run_on_a_machine("line", 3).posterior
    again = CurvePosterior.from_saved(json.loads(json.dumps(posterior.saved())))
    assert again is not None and again.counts == posterior.counts
    assert (again.means == posterior.means).all() and (again.covariance == posterior.covariance).all()
    assert (again.context, again.batch, again.curve) == (posterior.context, posterior.batch, posterior.curve)


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


def test_call_takes_the_text_of_the_config_once() -> None:
    """Would catch: milliseconds in the first steps with another number of rows, which are more than their drafts."""
    model = Model()
    texts: list[str] = []
    model.config.to_json_string = lambda: texts.append("") or "text"
    estimator = TargetLatencyEstimator(depth_call(8, model=model))
    for rows in (8, 8, 4, 2, 1):
        estimator.observe(plain_step(rows))
    assert len(estimator.curves) == 4 and len(texts) == 1


def test_another_object_of_the_same_architecture_continues_with_all_times() -> None:
    """Would catch: a measurement for each object of a model, the latency of another model, sizes timed again."""
    for name, is_known, count in (("one", False, 2), ("one", True, 4), ("two", False, 2)):
        call = depth_call(model=Model(name))
        session = AdaptiveDepth().start(call)
        assert (session.latency is not None) == is_known, name
        session.observe(plain_step())
        for _ in range(2):
            session.observe(step(5, 4.0))
        estimator = CurveEstimator.of_earlier_calls(call, 1)
        assert estimator is not None and estimator.posterior.counts[5] == count
