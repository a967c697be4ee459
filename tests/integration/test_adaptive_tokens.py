"""Adaptive depth changes how fast the text comes, never the text: plain steps may come anywhere between drafts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hf_specgen import (
    AutoCandidates,
    Candidates,
    Controller,
    DraftModelCandidates,
    LayerSkipCandidates,
    MedusaCandidates,
    MovingWindow,
    NgramCandidates,
    Policy,
    Schedule,
)
from hf_specgen.adaptive import Fixed, OffAbove, OffForShort, StepCosts
from hf_specgen.evaluation.cost import CostCurve
from tests.helpers import Oracle, prompts, tiny_model
from tests.helpers.medusa import random_heads
from tests.test_drafting_networks import END, SAMPLING, both, unsure_draft

FREE = CostCurve((1, 32), (0.010, 0.0101), 256, 1)
DEAR = CostCurve((1, 32), (0.010, 0.3), 256, 1)


class Stutter(Policy):
    """Drafts in some steps, in some rows; the pattern meets every order of drafting and not drafting."""

    pattern = (2, 0, 0, 3, 1, 0, 4, 4, 0, 0, 0, 5)

    def begin(self, state: Any) -> None:
        self._step = 0

    def depths(self, state: Any) -> list[int]:
        self._step += 1
        return [self.pattern[(self._step + 5 * row) % 12] if self._step % 4 else 0 for row in range(len(state.room))]


def strategies(model: Any, policy: Policy | None = None, k: Any = 5) -> dict[str, Candidates]:
    arguments: dict[str, Any] = {"k": k, "policy": policy}
    return {
        "ngram": NgramCandidates(**arguments),
        "tree": NgramCandidates(**arguments, branches=3),
        "draft": DraftModelCandidates(unsure_draft(model), **arguments),
        "skip": LayerSkipCandidates(3, **arguments),
    }


NAMES = ("ngram", "tree", "draft", "skip")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_plain_steps_between_drafts(name: str, batch: int, sampling: str) -> None:
    """Would catch: a draft cache that misses the text of plain steps, states of a draft used in a later step."""
    model = tiny_model("llama")
    candidates = strategies(model, Stutter())[name]
    plain, ours = both(model, prompts(batch), candidates, max_new_tokens=48, **SAMPLING[sampling])
    assert torch.equal(plain, ours.sequences)
    depths = [step.drafted for row in ours.speculation.rows for step in row]
    assert 0 in depths and max(depths) > 0, "both kinds of steps are needed for this test to mean anything"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("arguments", [SAMPLING["sampled"], {"repetition_penalty": 1.3}, END])
def test_auto_is_lossless(name: str, batch: int, arguments: dict) -> None:
    model = tiny_model("llama")
    candidates = strategies(model, k="auto")[name]
    assert isinstance(candidates.policy, Controller)
    plain, ours = both(model, prompts(batch), candidates, max_new_tokens=48, **arguments)
    assert torch.equal(plain, ours.sequences)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("arguments", [SAMPLING["sampled"], END])
@pytest.mark.parametrize("others", [("ngram", "draft"), ("ngram", "skip"), ("tree", "draft", "skip"), ("draft",)])
@pytest.mark.parametrize("curve", [None, FREE])
def test_choosing_is_lossless(batch: int, arguments: dict, others: tuple[str, ...], curve: CostCurve | None) -> None:
    model = tiny_model("llama")
    policy = None if curve is None else Controller(StepCosts(curve))
    chosen = strategies(model, policy, k=5)
    candidates = AutoCandidates([chosen[name] for name in others])
    plain, ours = both(model, prompts(batch), candidates, max_new_tokens=48, **arguments)
    assert torch.equal(plain, ours.sequences)
    assert curve is None or ours.speculation.drafted > 0


def test_a_draft_that_is_the_target_stays_perfect_after_plain_steps() -> None:
    """It accepts everything only if it has read everything, and nothing twice."""
    model = tiny_model("llama")
    for batch in (1, 3):
        candidates = DraftModelCandidates(model, k=5, policy=Stutter())
        plain, ours = both(model, prompts(batch), candidates, max_new_tokens=60)
        assert torch.equal(plain, ours.sequences)
        assert ours.speculation.accepted == ours.speculation.drafted > 20


@pytest.mark.parametrize("name", ["draft", "skip"])
def test_a_plain_step_costs_one_plain_forward(name: str) -> None:
    """With depth 0 the draft is never run, not even on the prompt, and the target runs once per token."""
    model = tiny_model("llama")
    draft = unsure_draft(model)
    ran = {"target": 0, "draft": 0}
    handles = [
        module.model.layers[0].register_forward_pre_hook(lambda m, a, who=who: ran.__setitem__(who, ran[who] + 1))
        for who, module in (("target", model), ("draft", draft))
    ]
    candidates = DraftModelCandidates(draft, k=4) if name == "draft" else LayerSkipCandidates(2, k=4)
    model.generate(**prompts(1), max_new_tokens=20, candidate_generator=candidates, policy=Fixed(0))
    for handle in handles:
        handle.remove()
    assert ran == {"target": 20, "draft": 0}


def test_transformers_generators_go_on_after_plain_steps() -> None:
    model = tiny_model("llama")
    inputs = prompts(1)
    generator = PromptLookupCandidateGenerator(num_output_tokens=4, max_length=100)
    ids = model.generate(**inputs, max_new_tokens=40, candidate_generator=generator, policy=Stutter())
    assert torch.equal(ids, model.generate(**inputs, max_new_tokens=40))


def test_the_choice_follows_what_is_accepted() -> None:
    """Of two networks, one right and one wrong, the right one drafts nearly always."""
    model, inputs = tiny_model("llama"), prompts(1)
    answers = model.generate(**inputs, max_new_tokens=120)[:, 12:]
    right, wrong = Oracle(answers, 0.9, k=5), Oracle(answers, 0.0, k=5)
    for strategy in (right, wrong):
        strategy.policy = Controller(StepCosts(CostCurve((1, 32), (0.010, 0.03), 256, 1)))
    for order in ([wrong, right], [right, wrong]):
        output = model.generate(
            **inputs, max_new_tokens=120, candidate_generator=AutoCandidates(order), return_dict_in_generate=True
        )
        assert torch.equal(output.sequences[:, 12:], answers)
        assert output.speculation.tokens_per_step > 3


def test_the_choice_is_nothing_where_nothing_pays() -> None:
    model, inputs = tiny_model("llama"), prompts(1)
    answers = model.generate(**inputs, max_new_tokens=120)[:, 12:]
    wrong = [Oracle(answers, 0.0, k=5), Oracle(answers, 0.0, k=3)]
    for strategy in wrong:
        strategy.policy = Controller(StepCosts(DEAR))
    auto = AutoCandidates(wrong)
    model.generate(**inputs, max_new_tokens=120, candidate_generator=auto)
    assert auto.speculation.drafts < 20


def test_two_strategies_that_divide_the_target() -> None:
    with pytest.raises(ValueError, match="each run the target in a way of their own"):
        AutoCandidates([LayerSkipCandidates(1), LayerSkipCandidates(2)])
    with pytest.raises(ValueError, match="at least one strategy"):
        AutoCandidates([])
    with pytest.raises(TypeError, match="takes strategies"):
        AutoCandidates([5])  # type: ignore[list-item]


def _depths(policy: Policy, accuracy: float = 1.0, batch: int = 1, **arguments: Any) -> list[list[int]]:
    """The depth of every draft of every row."""
    model, inputs = tiny_model("llama"), prompts(batch)
    answers = model.generate(**inputs, max_new_tokens=60)[:, 12:]
    oracle = Oracle(answers, accuracy, k=8)
    output = model.generate(
        **{**inputs, "max_new_tokens": 60, **arguments},
        candidate_generator=oracle,
        policy=policy,
        return_dict_in_generate=True,
    )
    return [[step.depth for step in row] for row in output.speculation.rows]


def test_schedules() -> None:
    by_batch = Schedule({1: 8, 3: 4, 5: 2, 8: 0})
    assert max(_depths(by_batch)[0]) == 8
    assert max(map(max, _depths(by_batch, batch=3))) == 4
    assert max(map(max, _depths(by_batch, batch=6))) == 2
    assert max(map(max, _depths(by_batch, batch=9, max_new_tokens=5))) == 0
    by_context = Schedule(by_context={0: 6, 40: 1})
    depths = _depths(by_context)[0]
    assert depths[0] == 6 and depths[-2] == 1
    with pytest.raises(ValueError, match="needs by_batch or by_context"):
        Schedule()
    with pytest.raises(ValueError, match="got 4: -1"):
        Schedule({4: -1})


def test_moving_window() -> None:
    rising = _depths(MovingWindow(start=1), accuracy=1.0)[0][:-1]
    assert rising[0] == 1 and max(rising) > 4 and rising == sorted(rising)
    falling = _depths(MovingWindow(), accuracy=0.0)[0]
    assert falling[0] == 8 and min(falling[:30]) == 1
    for arguments in ({"target": 1.0}, {"window": 0}):
        with pytest.raises(ValueError, match="must be"):
            MovingWindow(**arguments)


def test_off_above_a_temperature_and_for_short_outputs() -> None:
    hot = {"do_sample": True, "temperature": 1.3}
    assert max(_depths(OffAbove(1.0), **hot)[0]) == 0
    assert max(_depths(OffAbove(1.0), temperature=1.3)[0]) == 8  # greedy: the temperature does not count
    assert max(_depths(OffAbove(1.0, MovingWindow(start=2)), do_sample=True, temperature=0.5)[0]) > 0
    assert max(_depths(OffForShort(61))[0]) == 0
    assert max(_depths(OffForShort(60))[0]) == 8


def test_a_policy_of_ones_own_in_ten_lines() -> None:
    class WhileItBrings(Policy):
        def depths(self, state):
            return [
                state.k if any(s.accepted for s in row[-3:]) or len(row) < 3 else 0 for row in state.statistics.rows
            ]

    depths = _depths(WhileItBrings(), accuracy=0.0)[0]
    assert max(depths[:3]) == 8 and max(depths[3:]) == 0

    class WrongCount(Policy):
        def depths(self, state):
            return [1, 2]

    with pytest.raises(ValueError, match="2 depths for 1 rows"):
        _depths(WrongCount())


def test_a_call_overrides_the_strategy_and_nothing_stays_behind() -> None:
    model = tiny_model("llama")
    ngram = NgramCandidates(k=5, policy=Fixed(2))
    model.generate(**prompts(1), max_new_tokens=40, candidate_generator=ngram, policy=Fixed(0))
    assert ngram.speculation.drafted == 0
    model.generate(**prompts(1), max_new_tokens=40, candidate_generator=ngram)
    assert max(step.depth for step in ngram.speculation.rows[0]) <= 2
    with pytest.raises(TypeError, match="policy must be a Policy"):
        model.generate(**prompts(1), max_new_tokens=4, candidate_generator=ngram, policy=3)
    with pytest.raises(TypeError, match="policy must be a Policy"):
        NgramCandidates(policy=3)  # type: ignore[arg-type]


def test_costs_are_kept_for_the_next_call() -> None:
    """The second call does not begin with plain steps to find out what they take."""
    model = copy.deepcopy(tiny_model("llama"))
    draft = Oracle(model.generate(**prompts(1), max_new_tokens=30)[:, 12:], 1.0, k=5)
    first_step = []
    for _ in range(2):
        model.generate(**prompts(1), max_new_tokens=30, candidate_generator=draft, policy=Controller())
        first_step.append(draft.speculation.rows[0][0].drafted)
    assert first_step[0] == 0 < first_step[1]


def test_repeatable_with_given_costs() -> None:
    model = tiny_model("llama")
    candidates = DraftModelCandidates(unsure_draft(model), k="auto", policy=Controller(StepCosts(FREE)))
    counts = []
    for _ in range(2):
        model.generate(**prompts(3), max_new_tokens=40, candidate_generator=candidates)
        counts.append([[step.depth for step in row] for row in candidates.speculation.rows])
    assert counts[0] == counts[1]


def test_auto_is_the_default() -> None:
    heads = random_heads(tiny_model("llama"))
    for made in (NgramCandidates(), DraftModelCandidates("draft"), LayerSkipCandidates(1), MedusaCandidates(heads)):
        assert isinstance(made.policy, Controller)
    for fixed in (NgramCandidates(k=5), MedusaCandidates(heads, tree=8), NgramCandidates(policy=Fixed())):
        assert isinstance(fixed.policy, Fixed)
    assert NgramCandidates().k == NgramCandidates(k="auto").k == 16
    with pytest.raises(ValueError, match=r'k must be at least 1, got .many.; or give "auto"'):
        NgramCandidates(k="many")  # type: ignore[arg-type]
