"""Steps that are made wider than they need to be, where that is faster: padding must change nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hf_specgen import AutoCandidates, Controller, DraftTree, MedusaCandidates, Policy
from hf_specgen.adaptive import MeasuredCosts, Step, StepCosts
from hf_specgen.adaptive.widths import fastest_widths, tile
from hf_specgen.evaluation.cost import CostCurve
from tests.helpers import ARCHITECTURES, prompts, tiny_model
from tests.medusa_helpers import random_heads
from tests.simulator import Simulation
from tests.test_adaptive_tokens import END, NAMES, SAMPLING, Stutter, both, strategies
from tests.test_costs import Model, _state, _step
from tests.test_position_limits import compare, oracle, sharp


class Wide(Stutter):
    """Every step two tokens wider than it needs to be, at least five wide."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        """What each step needed, and how wide it was."""

    def width(self, state: Any, needed: int) -> int:
        return max(5, needed + 2)

    def observe(self, state: Any, step: Step) -> None:
        self.seen.append(_width(step))


def _width(step: Step) -> tuple[int, int]:
    return 1 + max(row.drafted for row in step.rows if row is not None), step.width


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_padding_changes_nothing_on_any_architecture(architecture: str) -> None:
    """Would catch: padding that is seen, kept in the cache, or counted."""
    model = tiny_model(architecture)
    for batch, name in ((1, "ngram"), (3, "ngram"), (3, "draft")):
        policy = Wide()
        plain, ours = both(model, prompts(batch), strategies(model, policy)[name], max_new_tokens=24)
        assert torch.equal(plain, ours.sequences)
        assert len(policy.seen) > 3 and all(width > needed for needed, width in policy.seen[1:])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "arguments",
    [SAMPLING["sampled"], END, {"repetition_penalty": 1.3}, {"verification": "rejection", **SAMPLING["sampled"]}],
)
def test_padding_changes_nothing_in_any_strategy(name: str, batch: int, arguments: dict) -> None:
    """Would catch: states of padding mixed with those of guesses, probabilities of guesses that were never made."""
    model = tiny_model("llama")
    candidates = strategies(model, Wide())[name]
    if "verification" not in arguments:
        plain, ours = both(model, prompts(batch), candidates, max_new_tokens=40, **arguments)
        assert torch.equal(plain, ours.sequences)
        return
    texts = []
    for policy in (Wide(), Stutter()):  # rejection is not seed by seed that of plain `generate`, but of itself
        torch.manual_seed(3)
        made = strategies(model, policy)[name]
        texts.append(model.generate(**prompts(batch), max_new_tokens=40, candidate_generator=made, **arguments))
    assert torch.equal(*texts)


@pytest.mark.parametrize("batch", [1, 3])
def test_padded_trees_of_heads(batch: int) -> None:
    model = tiny_model("llama")
    candidates = MedusaCandidates(random_heads(model), tree=[[0], [1], [0, 0], [0, 1]], policy=Wide())
    plain, ours = both(model, prompts(batch), candidates, max_new_tokens=40, **SAMPLING["sampled"])
    assert torch.equal(plain, ours.sequences)


def test_scores_and_logits_are_those_of_the_text() -> None:
    model, inputs = tiny_model("llama"), prompts(3)
    right = oracle(model, inputs, max_new_tokens=24)
    right.policy = Wide()
    compare(model, inputs, right, max_new_tokens=24)


def test_padding_at_the_end_of_a_table_of_positions() -> None:
    """Padding stands where the last token of the row does: there is a position for it."""
    model, inputs = sharp("gpt2", 32), prompts(2, length=12)
    right = oracle(model, inputs, max_new_tokens=20)
    right.policy = Wide()
    compare(model, inputs, right, max_new_tokens=20)


def test_widened_trees() -> None:
    tree = DraftTree.from_paths([[[5, 6]], [[7]]])
    assert tree.widened(4).tokens.tolist() == [[5, 6, 0, 0], [7, 0, 0, 0]]
    assert tree.widened(4).parents == tree.parents
    assert tree.widened(1).nodes == 2


def test_fastest_widths_against_trying_all() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        seconds = random.uniform(1, 2, size=20)
        for place, width in enumerate(fastest_widths(seconds.tolist())):
            within = seconds[place : place + 9]
            saved = within.min() < 0.97 * seconds[place]
            assert width == place + 1 + (int(within.argmin()) if saved else 0)


DENT = CostCurve((1, 2, 3, 4, 5, 8, 16), (0.010, 0.0143, 0.0152, 0.0132, 0.0116, 0.0122, 0.0141), 256, 1)
"""As measured: float32 on two cores."""


def test_a_dent_in_the_costs_is_used() -> None:
    """Of a draft that is right half of the time, four tokens cost less than one: so four are verified, or five read."""
    with_dent, seen = Simulation(lambda *_: 0.5, DENT), []

    class Seen(Controller):
        def observe(self, state: Any, step: Step) -> None:
            seen.append((step.depth, step.width))
            super().observe(state, step)

    with_dent.run(Seen(StepCosts(DENT)), 200)
    assert {width for depth, width in seen if depth in (1, 2, 3)} <= {5}
    assert {width for depth, width in seen if depth == 0} <= {1}


def _measured(costs: MeasuredCosts, *times: tuple[int, float]) -> MeasuredCosts:
    for width, seconds in times:
        for _ in range(3):
            costs.observe(_step(width, seconds))
    costs.follow(_state())
    return costs


def test_a_tile_is_measured_first() -> None:
    """The first steps of a few tokens are made eight tokens wide; twice, as a first measurement is not believed."""
    costs = MeasuredCosts(_state(model=Model()))
    assert [costs.width(needed) for needed in (1, 9, 2, 7, 2, 7)] == [1, 9, 8, 7, 2, 7]
    costs.observe(_step(8, 0.030))
    costs.follow(_state())
    assert costs.width(2) == 8
    _measured(costs, (8, 0.012))
    assert costs.width(2) == 2
    assert [tile(rows) for rows in (1, 2, 3, 4, 16)] == [8, 4, 3, 2, 1]


def test_a_tile_that_is_far_too_dear_is_measured_once() -> None:
    costs = _measured(MeasuredCosts(_state(model=Model())), (1, 0.010))
    assert [costs.width(2), costs.width(2)] == [8, 2]
    costs.observe(_step(8, 0.030))
    assert _measured(costs, (1, 0.010)).width(2) == 2


def test_only_what_was_measured_is_padded() -> None:
    """Would catch: steps that are never made as they are, because they are believed to be slow."""
    costs = _measured(MeasuredCosts(_state(model=Model())), (1, 0.010), (3, 0.015), (8, 0.012))
    assert [costs.width(needed) for needed in (1, 2, 3, 4, 8)] == [1, 2, 8, 4, 8]


def test_what_is_padded_is_measured_again() -> None:
    """A step may have been slow in a slow moment of the machine only."""
    costs = _measured(MeasuredCosts(_state(model=Model())), (1, 0.010), (3, 0.015), (8, 0.012))
    for _ in range(300):
        costs.observe(_step(8, 0.012))
    costs.follow(_state())
    assert [costs.width(3) for _ in range(3)] == [3, 8, 8]


def test_other_policies_leave_steps_as_they_are() -> None:
    class Five(Policy):
        def depths(self, state: Any) -> list[int]:
            return [5]

    assert Five().width(_state(), 3) == 3


def test_choosing_pads_too() -> None:
    class Widths:
        """A monitor that keeps them."""

        def begin(self, state: Any) -> None:
            self.seen: list[tuple[int, int]] = []

        def step(self, state: Any, step: Step) -> None:
            self.seen.append(_width(step))

        def end(self, state: Any) -> None: ...

    model, monitor = tiny_model("llama"), Widths()
    chosen = strategies(model, Controller(StepCosts(DENT)))
    candidates = AutoCandidates([chosen["ngram"], chosen["draft"]])
    ids = model.generate(**prompts(1), max_new_tokens=60, candidate_generator=candidates, monitor=monitor)
    assert torch.equal(ids, model.generate(**prompts(1), max_new_tokens=60))
    assert any(width > needed for needed, width in monitor.seen)
