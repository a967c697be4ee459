"""What steps cost, learnt from the steps: where nothing was measured, and what one bad measurement may do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hf_specgen.adaptive import Chooser, Controller, MeasuredCosts, State, Step, StepCosts
from hf_specgen.adaptive.draft_times import DraftTimes
from hf_specgen.adaptive.optimum import best_depth, best_depths
from hf_specgen.adaptive.tables import Memory, Place, Table, TargetTimes
from hf_specgen.candidates.tree_plan import SIZES, ConfidentTree, StepCost
from hf_specgen.evaluation.cost import CostCurve
from hf_specgen.heads.acceptance import Acceptance
from hf_specgen.statistics import RowStep, Statistics
from tests.simulator import Simulation

FLAT = CostCurve((1, 8, 16, 32), (0.010, 0.0118, 0.0125, 0.0166), 256, 1)


class Model:
    """Something to remember costs by."""


def _state(rows: int = 1, model: Any = None, **settings: Any) -> State:
    lists = {"room": [99] * rows, "prompts": [100] * rows, "generated": [1] * rows}
    return State(k=16, statistics=Statistics([[] for _ in range(rows)]), model=model, **lists, **settings)


def _step(width: int, seconds: float, rows: int = 1, draft: float = 0.0) -> Step:
    made = RowStep(width - 1, width - 1, 0, 1)
    return Step([width - 1] * rows, [made] * rows, width, {"draft": draft, "forward": seconds, "verify": 0.0})


def _add(times: TargetTimes, rows: int, width: int, seconds: float) -> None:
    for _ in range(6):  # the first gives way, two more are outvoted by what was believed
        times.add(rows, width, seconds)


def test_other_numbers_of_rows_are_predicted_by_tokens() -> None:
    """Would catch: a batch that starts from scratch when its first row ends."""
    times = TargetTimes()
    for width, seconds in ((1, 0.010), (4, 0.013), (16, 0.018), (64, 0.034)):
        _add(times, 1, width, seconds)
    assert times.of(4)(np.array([1.0, 4.0, 16.0])) == pytest.approx([0.013, 0.018, 0.034])
    _add(times, 4, 16, 0.050)  # what was measured there counts most
    assert times.of(4)(np.array([16.0])) == pytest.approx([0.050])


def test_a_wide_step_may_be_cheaper_than_a_narrow_one() -> None:
    """Kernels for a few tokens are slow on some machines: T(3) > T(9). Then three tokens are padded to nine."""
    costs = MeasuredCosts(_state())
    for width, seconds in ((1, 0.010), (3, 0.015), (9, 0.012)):
        for _ in range(3):
            costs.observe(_step(width, seconds))
    costs.follow(_state())
    seconds = costs.by_depth(np.arange(9.0)).tolist()
    assert seconds[2] == pytest.approx(0.012) and seconds[8] == pytest.approx(0.012)
    assert costs.width(3) in (8, 9) and costs.width(1) == 1
    gained = np.cumprod([0.7] * 8).tolist()
    assert best_depth(gained, [1.0] * 8, seconds, 8).depths == [8]


def test_one_disturbed_plain_step_does_not_make_drafts_pay() -> None:
    """A plain step that took twice as long as one with a draft: the draft must not look better for that."""
    costs = MeasuredCosts(_state())
    for seconds in (0.010, 0.030):
        costs.observe(_step(1, seconds))
    for _ in range(3):
        costs.observe(_step(3, 0.014))
    costs.follow(_state())
    seconds = costs.by_depth(np.arange(3.0)).tolist()
    assert best_depth([0.01, 0.0], [1.0, 1.0], seconds, 2).gain < 1.02


def test_a_new_context_begins_with_what_is_known() -> None:
    """Would catch: plain steps, and a plan that stands still, each time the text passes a power of two."""
    memory = Memory()
    before = memory.target(Place("cpu", "float32", False, 3))
    _add(before, 1, 1, 0.010)
    _add(before, 1, 8, 0.016)
    after = memory.target(Place("cpu", "float32", False, 4))
    assert after.knows_plain_steps(1) and after.knows_wide_steps
    assert after.of(1)(np.array([1.0, 8.0])) == pytest.approx([0.010, 0.016])
    assert not memory.target(Place("cpu", "bfloat16", False, 4)).knows_plain_steps(1)


def test_a_few_tokens_say_nothing_of_one() -> None:
    """Would catch: plain steps of one row that are taken to be as slow as those of four, and padded, for ever."""
    times = TargetTimes()
    _add(times, 4, 1, 0.0150)
    _add(times, 4, 2, 0.0120)
    assert times.knows_plain_steps(4) and times.knows_plain_steps(6) and not times.knows_plain_steps(1)


def test_times_of_drafts() -> None:
    """In proportion for a chain; as good as constant for heads; the first draft after plain steps is no measure."""
    chain, heads = DraftTimes(lambda depths: 0.001 * depths), DraftTimes(lambda depths: 0.001 * depths)
    assert chain(np.array([4.0])) == pytest.approx([0.004])
    for seconds in (0.090, 0.010):  # the first, in which kernels are prepared, gives way
        chain.add(2, seconds)
    assert chain(np.array([1.0, 2.0, 8.0])) == pytest.approx([0.005, 0.010, 0.040])
    for depth in (1, 0, 3):
        heads.add(depth, 0.004)
    assert heads(np.array([0.0, 1.0, 5.0])) == pytest.approx([0.004] * 3)
    costs = MeasuredCosts(_state(negligible_draft_cost=False))
    for step in (_step(1, 0.010), _step(2, 0.010, draft=0.050), *2 * [_step(2, 0.010, draft=0.005)]):
        costs.observe(step)
    costs.follow(_state(negligible_draft_cost=False))
    assert costs.by_depth(np.arange(2.0))[1] == pytest.approx(0.015)
    assert costs.catching_up == 0.0
    costs.observe(_step(1, 0.010))
    assert costs.catching_up == pytest.approx(0.049 / 101)  # of a guessed 1 ms for a draft, 49 ms for 101 tokens


def test_first_measurement_of_a_size_gives_way() -> None:
    table = Table(lambda sizes: 1 + 0 * sizes)
    for seconds in (9.0, 1.0, 1.1, 5.0):
        table.add(1, seconds)
    assert table(np.array([1.0, 7.0])) == pytest.approx([1.1, 1.1])


def test_asking_in_vain_is_paid_for() -> None:
    """Heads that seldom have something worth a guess: what it takes to ask them decides."""
    arguments = ([0.3], [0.4], [1.0, 1.5], 1)
    assert best_depth(*arguments).depths == [1]
    assert best_depth(*arguments, asking=0.4).depths == [0]


def test_a_batch_ends_with_its_slowest_row() -> None:
    """Of two rows one accepts nothing: what the other gains is paid for by both, and ends nothing sooner."""
    gained = np.array([[0.9, 0.8, 0.7], [0.0, 0.0, 0.0]])
    assert best_depths(gained, np.ones((2, 3)), np.array([1, 1.4, 1.8, 2.2]), [9, 9]).depths == [0, 0]
    assert best_depths(gained, np.ones((2, 3)), np.array([1, 1.4, 1.8, 2.2]), [9, 0]).depths == [3, 0]


def test_what_was_accepted_is_remembered() -> None:
    """The second call with an always wrong strategy hardly tries, a good one begins deep; not with given costs."""
    for alpha, learnt in ((0.0, None), (0.9, None), (0.9, StepCosts(FLAT))):
        simulation = Simulation(lambda *_, alpha=alpha: alpha, FLAT, seed=1)
        simulation.model = Model()
        tries = []
        for _ in range(2):
            simulation.run(Controller(learnt), 60)
            tries.append([depth for (depth,) in simulation.depths])
        if learnt is not None:
            assert tries[0] == tries[1]
        elif alpha:
            assert tries[1][0] > tries[0][0] and tries[1][0] > 3
        else:
            assert tries[1][:4] == [0] * 4 and sum(map(bool, tries[1])) <= sum(map(bool, tries[0]))


def test_another_temperature_begins_with_what_is_known_of_the_nearest() -> None:
    """Always wrong at 0.0 and right at 1.0: the first draft at 1.2 is a deep one, that at 0.1 is none."""
    model = Model()

    def first_depth(alpha: float, temperature: float) -> int:
        simulation = Simulation(lambda *_: alpha, FLAT, seed=1)
        simulation.model, simulation.temperature = model, temperature
        simulation.run(Controller(), 60)
        return simulation.depths[0][0]

    first_depth(0.0, 0.0)
    first_depth(0.95, 1.0)
    assert first_depth(0.95, 1.2) > 8 and first_depth(0.0, 0.1) == 0


def test_trees_are_as_large_as_steps_are_cheap() -> None:
    """`StepCost` decides, not the curve of the day the heads were tuned."""
    plan = ConfidentTree(Acceptance.untuned(4))
    sizes = []
    for slope in (0.005, 0.05, 0.2, 2.0):
        cost = StepCost.rounded(0.01 * (1 + slope * np.arange(65.0)))
        assert cost.by_nodes()[0] == 1 and len(cost.eighths) == len(SIZES)
        sizes.append(len(plan.tree([0.7, 0.5, 0.5, 0.3], 1, cost).ranks))
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 10 and sizes[-1] == 0


def test_old_measurements_of_a_size_count_as_one() -> None:
    """A slow moment of the machine, in which plain steps were last measured, must not be believed for ever."""
    table = Table(lambda sizes: 1 + 0.03 * sizes)
    for _ in range(7):
        table.add(1, 0.014)
    for _ in range(80):
        table.add(8, 0.012)
    table.add(1, 0.010)
    assert table(np.array([1.0])) == pytest.approx([0.010])
    table.add(1, 0.010)
    table.add(1, 0.030)
    assert table(np.array([1.0])) == pytest.approx([0.010])


@pytest.mark.parametrize(("alpha", "checks"), [(0.5, True), (0.95, False)])
def test_plain_steps_are_looked_at_again(alpha: float, checks: bool) -> None:
    """Every 64 steps where drafting is a little faster than plain steps were, never where it is much faster."""
    simulation = Simulation(lambda *_: alpha, FLAT, noise=0.05)
    simulation.model = Model()
    simulation.run(Controller(), 400)
    plain = [step for step, asked in enumerate(simulation.depths) if asked == [0] and step > 10]
    assert 3 <= len(plain) < 10 if checks else not plain


def test_choosing_goes_on_after_a_look_at_plain_steps() -> None:
    """Would catch: a strategy that was passed over, never learns of the plain step, and asks for it again and again."""
    state = _state(model=Model(), negligible_draft_cost=False)
    chooser = Chooser([(name, 1, False, False, Controller()) for name in ("one", "other")])
    chooser.begin(state)
    plain = 0
    for _ in range(400):
        (depth,) = chooser.depths(state)
        for index in chooser.asked() if depth else []:
            chooser.accepts(index, [depth])
        step = _step(1 + depth, 0.010 + 0.0005 * depth, draft=0.0005 * depth)
        step.rows[0].accepted, step.rows[0].emitted = depth, 1 + depth  # type: ignore[union-attr]
        chooser.observe(state, step)
        plain += depth == 0
    assert 3 < plain < 20


def test_what_plain_steps_earn_is_kept_for_the_next_call() -> None:
    """A try takes two plain steps here, since the prompt has to be read: too much for a short call, but not for ten."""
    simulation = Simulation(lambda *_: 0.0, FLAT, draft_token=0.001, negligible_draft_cost=False)
    simulation.model, simulation.reading = Model(), 0.0002
    rates, tries = [], []
    for _ in range(13):
        rates.append(simulation.run(Controller(), 40))
        tries.append(sum(asked != [0] for asked in simulation.depths))
    assert tries[0] > 0 and 0 < sum(tries[1:]) < 12 and 0 in tries
    assert len(rates[1:]) / sum(1 / rate for rate in rates[1:]) > 0.97 / FLAT(1)


def test_drafts_for_other_numbers_of_rows() -> None:
    """Reading is in proportion to rows. Drafting is thought to take rather too little than so much that it is never
    tried: as long for more rows, and less for fewer."""
    memory = Memory()
    target = memory.target(Place("cpu", "float32", False, 4))
    four = memory.draft("draft", 4, target)
    four.add_reading(100, 0.02)
    for _ in range(2):
        four.add(2, 0.010)
    more, fewer = memory.draft("draft", 16, target), memory.draft("draft", 1, target)
    assert more.reading == pytest.approx(0.0008) and fewer.reading == pytest.approx(0.00005)
    assert more(np.array([4.0])) == pytest.approx([0.020]) and fewer(np.array([4.0])) == pytest.approx([0.010])


def test_reading_little_says_little_of_reading_much() -> None:
    """Would catch: a pause of the machine while one token is read, after which no prompt seems worth reading."""
    times = DraftTimes(lambda depths: 0 * depths)
    times.add_reading(100, 0.10)
    times.add_reading(1, 0.05)
    assert times.reading == pytest.approx(0.10 / 51)
    times.add_reading(100, 0.10)
    assert times.reading < 0.0012
