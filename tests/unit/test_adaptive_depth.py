"""`AdaptiveDepth`: drafts while that is faster, tries again after growing intervals, chooses the depth of chains."""

import gc
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch import nn

from hf_specgen import (
    FixedDepth,
    LayerSkipCandidates,
    MedusaCandidates,
    NgramCandidates,
    Policy,
    RecyclingCandidates,
    Schedule,
)
from hf_specgen.call import Memory, memory
from hf_specgen.counters import RowStep, StepRecord
from hf_specgen.depth import AdaptiveDepth, Bucket, CostCurve, DisableWhen, DraftLatency, LatencyModel, MovingWindow
from hf_specgen.depth.adaptive import LOSS_PER_STEP, MAX_LOSS, DraftingLoss
from tests.helpers import prompts, tiny_model
from tests.helpers.depth import Model, depth_call, run
from tests.helpers.medusa import random_heads

FLAT = LatencyModel.from_curves(CostCurve((1, 32), (1.0, 1.02), 256, 1))
STEEP = LatencyModel.from_curves(CostCurve((1, 32), (1.0, 32.0), 256, 1))


@pytest.mark.parametrize("accepted", [0, 1, 3])
@pytest.mark.parametrize("latency", [FLAT, STEEP], ids=["flat", "steep"])
def test_adaptive_depth_uses_what_is_faster_and_loses_at_most_what_it_promises(latency: Any, accepted: int) -> None:
    """Would catch: drafts although they are slower, none although they are faster; short calls that lose a tenth."""
    target, session, depths = latency.at(1, 100).target, AdaptiveDepth(latency).start(depth_call()), list[int]()
    lost = most = 0.0
    for step in range(1, 401):
        ((depth,),) = run(session, 1, [accepted])
        depths.append(depth)
        lost += target.relative(1 + depth) - 1 - min(depth, accepted)
        most = max(most, target.relative(1 + depth))
        assert lost <= MAX_LOSS + LOSS_PER_STEP * step + most
    cost = sum(target.relative(1 + depth) for depth in depths[100:])
    tokens = sum(1 + min(depth, accepted) for depth in depths[100:])
    assert tokens / cost > 0.97
    assert tokens / cost > 0.9 * max((1 + min(d, accepted)) / target.relative(1 + d) for d in range(17))


def test_adaptive_depth_where_drafts_fail_tries_again_when_the_loss_is_made_up_for() -> None:
    depths = [depth for (depth,) in run(AdaptiveDepth(STEEP).start(depth_call()), 300, [0])]
    trials = [step for step, depth in enumerate(depths) if depth][-3:]
    assert [depths[step] for step in trials] == [1, 1, 1] and trials[2] - trials[1] == trials[1] - trials[0] == 51


def test_adaptive_depth_after_a_faster_trial_drafts_again() -> None:
    session = AdaptiveDepth(STEEP).start(depth_call(sizes_trees=True, negligible_cost=True))
    run(session, 40, [0])
    session.latency = FLAT
    depths = [depth for (depth,) in run(session, 900, [5])]
    assert all(depths[depths.index(16) :])


def test_adaptive_depth_empty_drafts_without_passes_are_not_counted() -> None:
    """Would catch: n-grams that are turned off by steps in which they have nothing to propose."""
    session = AdaptiveDepth(FLAT).start(depth_call(sizes_trees=True))
    for _ in range(50):
        assert session.depths([99]) == [16]
        session.observe(StepRecord([16], [RowStep(0, 0, 0, 1)], 1, {}, ()))


def fastest(acceptance: float, seconds: Callable[[float], float], k: int) -> int:
    """Reference: the depth with the most expected tokens per second."""
    rates = {d: sum(acceptance**i for i in range(d + 1)) / seconds(1 + d) for d in range(1, k + 1)}
    return max(rates, key=rates.__getitem__)


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("slope", [0.001, 0.05])
def test_adaptive_depth_of_chains_is_the_fastest_one(acceptance: float, slope: float) -> None:
    curve = CostCurve((1, 33), (1.0, 1.0 + 32 * slope), 256, 1)
    session = AdaptiveDepth(LatencyModel.from_curves(curve)).start(depth_call())
    session._accepted, session._verified = acceptance * 100, 100.0
    assert session.depths([99]) == [fastest(acceptance, curve, 16)]


def test_adaptive_depth_in_a_batch_drafts_for_all_rows_or_none() -> None:
    depths = run(AdaptiveDepth(FLAT).start(depth_call(rows=3)), 60, [0, 5, 0])
    assert all(len(set(step)) == 1 for step in depths)


def test_adaptive_depth_requests_in_packed_steps_pause_together() -> None:
    """Would catch: a request that stops drafting after a rejection, for which all others then wait."""
    policy = AdaptiveDepth(STEEP)
    policy.common_loss = DraftingLoss()
    one, other = (policy.start(depth_call(sizes_trees=True, negligible_cost=False)) for _ in range(2))
    assert all(depth for (depth,) in run(one, 20, [0]))
    policy.common_loss.add(2 * MAX_LOSS)
    assert run(one, 1, [0]) == run(other, 1, [0]) == [[0]]


def test_adaptive_depth_within_the_limits_of_each_row() -> None:
    session = AdaptiveDepth(FLAT).start(depth_call(rows=3, sizes_trees=True))
    assert session.depths([5, 0, 99]) == [5, 0, 16]


def test_adaptive_depth_before_latencies_are_known_drafts_nothing() -> None:
    session = AdaptiveDepth().start(depth_call(model=Model()))
    assert session.depths([99]) == [0] and session.latency is None


def test_adaptive_depth_remembers_the_speed_of_earlier_calls() -> None:
    model = Model()
    first = AdaptiveDepth().start(depth_call(model=model, negligible_cost=False))
    first.latency = STEEP
    run(first, 60, [0])
    second = AdaptiveDepth().start(depth_call(model=model, negligible_cost=False))
    second.latency = STEEP
    assert sum(depth > 0 for (depth,) in run(second, 50, [0])) == 1, "drafting was slower in the first call"
    given = AdaptiveDepth(FLAT).start(depth_call(model=model, negligible_cost=False))
    assert given.depths([99]) != [0], "with a given latency equal calls make the same drafts"
    memory.clear()


def prompt_call(prompt: int, max_new_tokens: int, **changes: Any) -> Any:
    """A session for a drafter whose pass takes half the time of the target's, on a machine where tokens take time."""
    curve = CostCurve((1, 8, 64), (1.0, 2.0, 9.0), 256, 1)
    drafter = DraftLatency((1, 8, 64), (0.5, 1.0, 4.5))
    call = depth_call(prompt=prompt, max_new_tokens=max_new_tokens, negligible_cost=False, sizes_trees=True)
    call = replace(call, drafting=replace(call.drafting, **changes))
    return AdaptiveDepth(LatencyModel((Bucket(curve, {"any": drafter}),))).start(call)


def test_adaptive_depth_short_answer_to_a_long_prompt_drafts_nothing() -> None:
    """Would catch: a draft model that processes a thousand tokens of prompt to save a few steps."""
    assert prompt_call(100, 1000).depths([99]) != [0]
    assert prompt_call(100, 40).depths([99]) == [0]
    combined = prompt_call(100, 40, has_free_drafts=True)
    assert combined.depths([99]) != [0] and not combined.affords_prefill(), "n-grams need no prefill"


def test_adaptive_depth_after_a_pause_counts_what_the_drafter_has_to_catch_up_on() -> None:
    """Would catch: a trial after 40 plain steps that costs the time of five steps for the tokens of the pause."""
    session = prompt_call(10, 10**6)
    run(session, 3, [0])
    assert not any(depth for (depth,) in run(session, 400, [0])), "the longer the pause, the more there is to process"


# Policies by rule

LATENCY = LatencyModel.from_curves(CostCurve((1, 9), (0.010, 0.012), context=256, batch=1))


@pytest.mark.parametrize(
    ("limits", "depth"), [([9], 8), ([9] * 3, 4), ([9] * 5, 2), ([9] * 8, 0), ([9, 0, 0, 0, 0, 0, 0, 9, 9], 4)]
)
def test_schedule_by_batch_counts_rows_that_take_part(limits: list[int], depth: int) -> None:
    call = depth_call(rows=len(limits))
    schedule = Schedule({1: 8, 3: 4, 5: 2, 8: 0})
    assert schedule.start(call).depths(limits) == [depth] * len(limits)
    call.state.other_rows = 8
    assert schedule.start(call).depths(limits) == [0] * len(limits), "rows of other calls in the same passes count"


@pytest.mark.parametrize(("prompt", "depth"), [(10, 6), (38, 6), (39, 1), (500, 1)])
def test_schedule_by_context_counts_tokens_of_the_longest_row(prompt: int, depth: int) -> None:
    assert Schedule(by_context={0: 6, 40: 1}).start(depth_call(prompt=prompt)).depths([9]) == [depth]


def test_moving_window_follows_the_acceptance_of_each_row() -> None:
    depths = run(MovingWindow(start=4).start(depth_call(rows=2)), 12, [99, 0])
    assert [row[0] for row in depths] == [min(16, 4 + step) for step in range(12)]
    assert [row[1] for row in depths] == [max(1, 4 - step) for step in range(12)]


@pytest.mark.parametrize(
    ("policy", "settings", "off"),
    [
        (DisableWhen(temperature_above=1.0), {"temperature": 1.3}, True),
        (DisableWhen(temperature_above=1.0), {"temperature": 1.0}, False),
        (DisableWhen(temperature_above=0.0), {"temperature": 0.0}, False),
        (DisableWhen(new_tokens_below=16), {"max_new_tokens": 15}, True),
        (DisableWhen(new_tokens_below=16), {"max_new_tokens": 16}, False),
        (DisableWhen(new_tokens_below=16), {}, False),
        (DisableWhen(1.0, otherwise=DisableWhen(new_tokens_below=61)), {"max_new_tokens": 60}, True),
    ],
)
def test_disabled_calls_draft_nothing(policy: Policy, settings: dict[str, Any], off: bool) -> None:
    assert policy.start(depth_call(**settings)).depths([9]) == ([0] if off else [16])


def test_disabling_forwards_everything_of_the_policy_within() -> None:
    """Would catch: a controller that hides the latency model by which heads size their trees."""
    policy = AdaptiveDepth(LATENCY)
    session, plain = DisableWhen(1.0, otherwise=policy).start(depth_call()), policy.start(depth_call())
    assert session.latency == plain.latency and session.latency is not None
    assert run(session, 12, [3]) == run(plain, 12, [3])


# The memory across calls: copies, bounded, freed with the model, safe to share between threads, off on request


def test_memory_is_bounded_and_keeps_the_newest() -> None:
    """Would catch: entries that are kept for the model's lifetime (one per temperature or history)."""
    small, model = Memory(max_entries=8), nn.Linear(1, 1)
    for key in range(30):
        small.store(model, key, Counter(accepted=10))
    assert small.recall(model, 29, Counter).total() == 10
    assert small.recall(model, 0, Counter).total() == 0
    assert small.recall(None, 29, Counter).total() == 0
    assert len(small._entries[model]) == 8


def test_memory_returns_copies_and_that_of_a_freed_model_is_freed() -> None:
    """Would catch: a model kept alive by what was counted with it."""
    one, model = Memory(), nn.Linear(1, 1)
    one.store(model, "key", Counter(accepted=10))
    one.recall(model, "key", Counter).clear()
    assert one.recall(model, "key", Counter).total() == 10
    del model
    gc.collect()
    assert not len(one._entries)


def test_memory_used_by_many_threads_raises_nothing() -> None:
    """Would catch: 'dictionary changed size during iteration' when calls of several threads end together."""
    one, model = Memory(max_entries=16), nn.Linear(1, 1)

    def work(thread: int) -> None:
        for call in range(200):
            one.store(model, (thread, call % 7), one.recall(model, (thread, call % 7), Counter))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))


@pytest.mark.parametrize("remembers", [True, False])
def test_memory_setting_of_a_call(remembers: bool) -> None:
    model = tiny_model("llama")
    memory.clear()
    candidates = MedusaCandidates(random_heads(model))
    model.generate(**prompts(1), max_new_tokens=16, candidate_generator=candidates, memory=remembers)
    learnt = [key for key in memory._entries[model] if key[0] != "T(q)"]
    assert bool(learnt) == remembers


@pytest.mark.parametrize("strategy", [NgramCandidates, RecyclingCandidates, partial(LayerSkipCandidates, 1)])
def test_policy_left_out_is_that_of_k_and_the_tree(strategy: Any) -> None:
    """Would catch: trees of adaptive size in every step, which have no latencies to be sized by."""
    settings = [{}, {"k": 5, "tree": "auto"}, {"tree": 8}, {"k": 5}, {"k": 5, "tree": 8}]
    adaptive = [isinstance(strategy(**one).policy, AdaptiveDepth) for one in settings]
    assert adaptive == [True, True, True, False, False]
    assert strategy(k=5, tree="auto", policy=FixedDepth()).policy == FixedDepth()
