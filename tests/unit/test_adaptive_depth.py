"""`AdaptiveDepth`: drafts while that is faster, tries again after growing intervals, chooses the depth of chains."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hf_specgen.call import memory
from hf_specgen.call_statistics import RowStep, StepRecord
from hf_specgen.depth import AdaptiveDepth, Bucket, CostCurve, DraftLatency, LatencyModel
from hf_specgen.depth.adaptive import MAX_TIME_LOSS, TIME_LOSS_ALLOWANCE, DraftingTimeLoss
from tests.helpers.depth import Model, depth_call, run

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
        assert lost <= MAX_TIME_LOSS + TIME_LOSS_ALLOWANCE * step + most
    cost = sum(target.relative(1 + depth) for depth in depths[100:])
    tokens = sum(1 + min(depth, accepted) for depth in depths[100:])
    assert tokens / cost > 0.97
    assert tokens / cost > 0.9 * max((1 + min(d, accepted)) / target.relative(1 + d) for d in range(17))


def test_adaptive_depth_where_drafts_fail_tries_again_when_the_loss_is_made_up_for() -> None:
    """Would catch: a drafter that is turned off for ever, or drafts tried so often that they cost more than allowed."""
    depths = [depth for (depth,) in run(AdaptiveDepth(STEEP).start(depth_call()), 300, [0])]
    drafts = [step for step, depth in enumerate(depths) if depth][-3:]
    assert [depths[step] for step in drafts] == [1, 1, 1] and drafts[2] - drafts[1] == drafts[1] - drafts[0] == 51


def test_adaptive_depth_after_a_draft_that_gains_time_drafts_again() -> None:
    """Would catch: a draft that gains time after a pause, and is followed by another pause all the same."""
    session = AdaptiveDepth(STEEP).start(depth_call(adaptive_tree=True, negligible_draft_cost=True))
    run(session, 40, [0])
    session.latency = FLAT
    depths = [depth for (depth,) in run(session, 900, [5])]
    assert all(depths[depths.index(16) :])


def test_adaptive_depth_empty_drafts_without_passes_are_not_counted() -> None:
    """Would catch: n-grams that are turned off by steps in which they have nothing to propose."""
    session = AdaptiveDepth(FLAT).start(depth_call(adaptive_tree=True))
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
    """Would catch: acceptance that is not followed, or a depth with fewer tokens per second than another."""
    curve = CostCurve((1, 33), (1.0, 1.0 + 32 * slope), 256, 1)
    session = AdaptiveDepth(LatencyModel.from_curves(curve)).start(depth_call())
    accepted = round(10 * acceptance)
    rows = [RowStep(1, 1, 1, 2)] * accepted + [RowStep(1, 1, 0, 1)] * (10 - accepted)
    for _ in range(200):  # until the first ones are forgotten
        session.observe(StepRecord([1], rows, 1, {}, ()))
    assert session.depths([99]) == [fastest(acceptance, curve, 16)]


def test_adaptive_depth_in_a_batch_drafts_for_all_rows_or_none() -> None:
    """Would catch: rows that draft while others do not, although all wait for the same pass."""
    depths = run(AdaptiveDepth(FLAT).start(depth_call(rows=3)), 60, [0, 5, 0])
    assert all(len(set(step)) == 1 for step in depths)


def test_adaptive_depth_with_shared_passes_takes_the_time_of_all_rows() -> None:
    """Would catch: the time of a drafter's pass over one row, an eighth of it for each row of a pass over eight."""
    drafter = DraftLatency(tokens=(1.0, 8.0), seconds=(0.1, 0.8))  # limited by arithmetic: rows save nothing
    curve = CostCurve((1, 64), (1.0, 1.01), context=100, batch=8)
    latency = LatencyModel((Bucket(curve, {"any": drafter}),))
    depths = []
    for rows, others in ((8, 0), (1, 7)):
        call = depth_call(rows, negligible_draft_cost=False)
        call.state.other_rows = others
        call.state.drafts_together = True
        session = AdaptiveDepth(latency).start(call)
        if others:
            session.join_shared_passes(DraftingTimeLoss())
        depths.append(max(session.depths([16] * rows)))
    assert depths[0] == depths[1] < 4


def test_adaptive_depth_requests_in_packed_steps_pause_together() -> None:
    """Would catch: a request that stops drafting after a rejection, for which all others then wait."""
    loss = DraftingTimeLoss()
    calls = [depth_call(adaptive_tree=True, negligible_draft_cost=False) for _ in range(2)]
    one, other = map(AdaptiveDepth(STEEP).start, calls)
    for session in (one, other):
        session.join_shared_passes(loss)
    assert all(depth for (depth,) in run(one, 20, [0]))
    loss.add(2 * MAX_TIME_LOSS)
    assert run(one, 1, [0]) == run(other, 1, [0]) == [[0]]


def test_adaptive_depth_within_the_limits_of_each_row() -> None:
    """Would catch: a draft behind the end of a row, or the shortest row's limit for all."""
    session = AdaptiveDepth(FLAT).start(depth_call(rows=3, adaptive_tree=True))
    assert session.depths([5, 0, 99]) == [5, 0, 16]


def test_adaptive_depth_before_latencies_are_known_drafts_nothing() -> None:
    """Would catch: drafts of a network before it is known whether they pay."""
    session = AdaptiveDepth().start(depth_call(model=Model()))
    assert session.depths([99]) == [0] and session.latency is None


def test_adaptive_depth_remembers_the_speed_of_earlier_calls() -> None:
    """Would catch: each call that tries the slow drafter anew, or a given latency that is overruled by memory."""
    model = Model()
    first = AdaptiveDepth().start(depth_call(model=model, negligible_draft_cost=False))
    steep = STEEP.at(1, 100).target
    run(first, 60, [0], steep)
    second = AdaptiveDepth().start(depth_call(model=model, negligible_draft_cost=False))
    assert sum(depth > 0 for (depth,) in run(second, 50, [0], steep)) == 1, "drafting was slower in the first call"
    given = AdaptiveDepth(FLAT).start(depth_call(model=model, negligible_draft_cost=False))
    assert given.depths([99]) != [0], "with a given latency equal calls make the same drafts"
    memory.clear()


def prompt_call(prompt: int, max_new_tokens: int, **changes: Any) -> Any:
    """A session for a drafter whose pass takes half the time of the target's, on a machine where tokens take time."""
    curve = CostCurve((1, 8, 64), (1.0, 2.0, 9.0), 256, 1)
    drafter = DraftLatency((1, 8, 64), (0.5, 1.0, 4.5))
    call = depth_call(prompt=prompt, max_new_tokens=max_new_tokens, negligible_draft_cost=False, adaptive_tree=True)
    call = replace(call, drafting=replace(call.drafting, **changes))
    return AdaptiveDepth(LatencyModel((Bucket(curve, {"any": drafter}),))).start(call)


def test_adaptive_depth_short_answer_to_a_long_prompt_drafts_nothing() -> None:
    """Would catch: a draft model that processes a thousand tokens of prompt to save a few steps."""
    assert prompt_call(100, 1000).depths([99]) != [0]
    assert prompt_call(100, 40).depths([99]) == [0]
    combined = prompt_call(100, 40, has_negligible_cost_drafts=True)
    assert combined.depths([99]) != [0] and not combined.prefill_is_short(), "n-grams need no prefill"


def test_adaptive_depth_after_a_pause_counts_what_the_drafter_has_to_catch_up_on() -> None:
    """Would catch: a draft after 40 plain steps that costs the time of five steps for the tokens of the pause."""
    session = prompt_call(10, 10**6)
    run(session, 3, [0])
    assert not any(depth for (depth,) in run(session, 400, [0])), "the longer the pause, the more there is to process"
