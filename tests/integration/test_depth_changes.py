"""Policies change how many steps a text takes, never its tokens: plain steps may come anywhere between drafts."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hf_specgen import (
    AdaptiveDepth,
    Call,
    Candidates,
    CombinedCandidates,
    DraftModelCandidates,
    FixedDepth,
    LayerSkipCandidates,
    MedusaCandidates,
    MovingWindow,
    NgramCandidates,
    Policy,
    PolicySession,
    Schedule,
    StepRecord,
)
from hf_specgen.depth import CostCurve, DisableWhen, LatencyModel
from tests.helpers import Oracle, assert_same_tokens, prompts, shared_draft, tiny_model
from tests.helpers.medusa import random_heads
from tests.helpers.policies import Irregular

FREE_TOKENS = LatencyModel.from_curves(CostCurve((1, 32), (0.010, 0.0101), 256, 1))
"""Verifying 32 tokens takes about as long as verifying one."""
EXPENSIVE_TOKENS = LatencyModel.from_curves(CostCurve((1, 32), (0.010, 0.3), 256, 1))
"""Verifying 32 tokens takes about as long as 30 plain steps."""
TOKENS = 24
"""Tokens of each row: enough steps for the whole pattern of `Irregular`, and for adaptive depths to change."""
STRATEGIES = ("ngram", "tree", "draft", "skip", "medusa")


def strategy(name: str, *, k: Any = 5, policy: Policy | None = None) -> Candidates:
    """One of the strategies, for tiny llama."""
    model = tiny_model("llama")
    arguments: dict[str, Any] = {"k": k, "policy": policy}
    return {
        "ngram": lambda: NgramCandidates(**arguments),
        "tree": lambda: NgramCandidates(**arguments, tree=12),
        "draft": lambda: DraftModelCandidates(shared_draft(model), **arguments),
        "skip": lambda: LayerSkipCandidates(1, **arguments),
        "medusa": lambda: MedusaCandidates(random_heads(model), policy=policy),
    }[name]()


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("batch", [1, 3])
def test_adaptive_depth_with_free_tokens_drafts_and_same_tokens(name: str, batch: int) -> None:
    candidates = strategy(name, k="auto", policy=AdaptiveDepth(FREE_TOKENS))
    assert assert_same_tokens(tiny_model("llama"), prompts(batch), candidates, max_new_tokens=TOKENS).drafted > 0


@pytest.mark.parametrize("batch", [1, 3])
def test_draft_model_equal_to_target_after_plain_steps_all_accepted(batch: int) -> None:
    """All tokens are accepted only if the draft has read the tokens of plain steps, each of them once."""
    model = tiny_model("llama")
    candidates = DraftModelCandidates(model, k=5, policy=Irregular())
    statistics = assert_same_tokens(model, prompts(batch), candidates, max_new_tokens=60)
    assert statistics.accepted == statistics.drafted > 20


def test_native_generator_after_plain_steps_same_tokens() -> None:
    model, inputs = tiny_model("llama"), prompts(1)
    generator = PromptLookupCandidateGenerator(num_output_tokens=4, max_length=100)
    ids = model.generate(**inputs, max_new_tokens=40, candidate_generator=generator, policy=Irregular())
    assert torch.equal(ids, model.generate(**inputs, max_new_tokens=40))


# Adaptive depth


def test_adaptive_depth_rejected_drafts_of_expensive_tokens_stop() -> None:
    """Would catch: drafts that continue although they are never accepted and slow every step down."""
    oracle = partial(Oracle, accuracy=0.0, k=5, policy=AdaptiveDepth(EXPENSIVE_TOKENS))
    statistics = assert_same_tokens(tiny_model("llama"), prompts(1), oracle, max_new_tokens=120)
    assert statistics.drafts < 20


def test_adaptive_depth_accepted_drafts_of_free_tokens_continue() -> None:
    oracle = partial(Oracle, accuracy=0.95, k=5, policy=AdaptiveDepth(FREE_TOKENS))
    statistics = assert_same_tokens(tiny_model("llama"), prompts(1), oracle, max_new_tokens=120)
    assert statistics.tokens_per_step > 3


def test_adaptive_depth_with_given_latency_repeats() -> None:
    """Would catch: decisions that depend on the measured time of a step, or on an earlier call."""
    model = tiny_model("llama")
    candidates = DraftModelCandidates(shared_draft(model), k="auto", policy=AdaptiveDepth(FREE_TOKENS))
    depths = []
    for _ in range(2):
        statistics = assert_same_tokens(model, prompts(3), candidates, max_new_tokens=40)
        depths.append([[step.depth for step in row] for row in statistics.rows])
    assert depths[0] == depths[1]


@pytest.mark.parametrize("name", ["ngram", "tree", "draft", "skip"])
def test_strategy_with_k_has_fixed_depth(name: str) -> None:
    assert strategy(name, k=5).policy == FixedDepth()


# Policies by rule


def depths_used(policy: Policy, accuracy: float = 1.0, batch: int = 1, **arguments: Any) -> list[list[int]]:
    """The depth of every draft of every row, with an oracle of depth 8."""
    oracle = partial(Oracle, accuracy=accuracy, k=8, policy=policy)
    arguments = {"max_new_tokens": 60, **arguments}
    statistics = assert_same_tokens(tiny_model("llama"), prompts(batch), oracle, **arguments)
    return [[step.depth for step in row] for row in statistics.rows]


@pytest.mark.parametrize(("batch", "depth"), [(1, 8), (3, 4), (6, 2), (9, 0)])
def test_schedule_by_batch_limits_the_depth(batch: int, depth: int) -> None:
    assert max(map(max, depths_used(Schedule({1: 8, 3: 4, 5: 2, 8: 0}), batch=batch, max_new_tokens=20))) == depth


def test_schedule_by_context_limits_the_depth_of_long_texts() -> None:
    depths = depths_used(Schedule(by_context={0: 6, 40: 1}))[0]
    assert depths[0] == 6 and depths[-2] == 1


def test_moving_window_accepted_drafts_become_deeper() -> None:
    depths = depths_used(MovingWindow(start=1), accuracy=1.0)[0][:-1]
    assert depths[0] == 1 and max(depths) > 4 and depths == sorted(depths)


def test_moving_window_rejected_drafts_become_shallower() -> None:
    depths = depths_used(MovingWindow(), accuracy=0.0)[0]
    assert depths[0] == 8 and min(depths[:30]) == 1


@pytest.mark.parametrize(
    ("policy", "arguments", "deepest"),
    [
        (DisableWhen(1.0), {"do_sample": True, "temperature": 1.3}, 0),
        (DisableWhen(1.0), {"temperature": 1.3}, 8),  # greedy: the temperature has no effect
        (
            DisableWhen(1.0, otherwise=MovingWindow(start=2)),
            {"do_sample": True, "temperature": 0.5, "max_new_tokens": 3},
            2,
        ),
        (DisableWhen(new_tokens_below=61), {}, 0),
        (DisableWhen(new_tokens_below=60), {}, 8),
    ],
    ids=["hot", "greedy", "cool", "short", "long"],
)
def test_disable_when_its_condition_holds_drafts_nothing(
    policy: Policy, arguments: dict[str, Any], deepest: int
) -> None:
    assert max(depths_used(policy, **arguments)[0]) == deepest


# Policies of the caller's own


class WhileAccepted(Policy):
    """Drafts 8 tokens until three drafts in a row are rejected."""

    def start(self, call: Call) -> PolicySession:
        return _WhileAcceptedSession()


class _WhileAcceptedSession(PolicySession):
    rejected = 0

    def depths(self, room: Sequence[int]) -> list[int]:
        return [8 if self.rejected < 3 else 0] * len(room)

    def observe(self, step: StepRecord) -> None:
        accepted = any(row.accepted for row in step.rows if row is not None)
        self.rejected = 0 if accepted else self.rejected + 1


def test_own_policy_decides_the_depths() -> None:
    depths = depths_used(WhileAccepted(), accuracy=0.0)[0]
    assert depths[:3] == [8, 8, 8] and max(depths[3:]) == 0


class TwoDepths(Policy):
    """Always returns two depths."""

    def start(self, call: Call) -> PolicySession:
        return _TwoDepthsSession()


class _TwoDepthsSession(PolicySession):
    def depths(self, room: Sequence[int]) -> list[int]:
        return [1, 2]


def test_own_policy_with_wrong_number_of_depths_raises() -> None:
    with pytest.raises(ValueError, match="2 depths for 1 rows"):
        depths_used(TwoDepths())


def test_policy_of_a_call_overrides_that_of_the_strategy_once() -> None:
    model, ngram = tiny_model("llama"), NgramCandidates(k=5, policy=FixedDepth(2))
    model.generate(**prompts(1), max_new_tokens=40, candidate_generator=ngram, policy=FixedDepth(0))
    assert ngram.speculation is not None and ngram.speculation.drafted == 0
    model.generate(**prompts(1), max_new_tokens=40, candidate_generator=ngram)
    assert 0 < max(step.depth for step in ngram.speculation.rows[0]) <= 2


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_calls_too_short_for_a_draft_same_tokens(tokens: int, batch: int) -> None:
    """Would catch: steps that are counted though no row may draft in them."""
    model = tiny_model("llama")
    for candidates in (NgramCandidates(), DraftModelCandidates(shared_draft(model))):
        assert_same_tokens(model, prompts(batch), candidates, max_new_tokens=tokens, prefill_chunk_size=4)


# Combining strategies


def test_combined_layer_skips_at_different_layers_raise() -> None:
    both = CombinedCandidates([LayerSkipCandidates(1), LayerSkipCandidates(2)])
    with pytest.raises(ValueError, match="different ways"):
        model = tiny_model("llama", num_hidden_layers=3)
        model.generate(**prompts(1), max_new_tokens=4, candidate_generator=both)
