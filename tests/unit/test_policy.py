"""Policies by rule, and the policy of a strategy without one."""

from functools import partial
from typing import Any

import pytest

from hf_specgen import FixedDepth, LayerSkipCandidates, NgramCandidates, Policy, RecyclingCandidates, Schedule
from hf_specgen.depth import AdaptiveDepth, CostCurve, DisableWhen, LatencyModel, MovingWindow
from tests.helpers.depth import depth_call, run

LATENCY = LatencyModel.from_curves(CostCurve((1, 9), (0.010, 0.012), context=256, batch=1))


@pytest.mark.parametrize(
    ("limits", "depth"), [([9], 8), ([9] * 3, 4), ([9] * 5, 2), ([9] * 8, 0), ([9, 0, 0, 0, 0, 0, 0, 9, 9], 4)]
)
def test_schedule_by_batch_counts_rows_that_take_part(limits: list[int], depth: int) -> None:
    """Would catch: rows that have ended counted, or rows of other calls in the same passes left out."""
    call = depth_call(rows=len(limits))
    schedule = Schedule({1: 8, 3: 4, 5: 2, 8: 0})
    assert schedule.start(call).depths(limits) == [depth] * len(limits)
    call.state.other_rows = 8
    assert schedule.start(call).depths(limits) == [0] * len(limits), "rows of other calls in the same passes count"


@pytest.mark.parametrize(("prompt", "depth"), [(10, 6), (38, 6), (39, 1), (500, 1)])
def test_schedule_by_context_counts_tokens_of_the_longest_row(prompt: int, depth: int) -> None:
    """Would catch: the prompt counted without what was generated, or a threshold that is off by one."""
    assert Schedule(by_context={0: 6, 40: 1}).start(depth_call(prompt=prompt)).depths([9]) == [depth]


def test_moving_window_follows_the_acceptance_of_each_row() -> None:
    """Would catch: one depth for all rows, or a depth that leaves its limits."""
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
    """Would catch: a threshold that includes its own value, or a policy inside that is not asked."""
    assert policy.start(depth_call(**settings)).depths([9]) == ([0] if off else [16])


def test_disabling_forwards_everything_of_the_policy_within() -> None:
    """Would catch: a policy around another one that loses the latency model, by which heads size their trees."""
    policy = AdaptiveDepth(LATENCY)
    session, plain = DisableWhen(1.0, otherwise=policy).start(depth_call()), policy.start(depth_call())
    assert session.latency == plain.latency and session.latency is not None
    assert run(session, 12, [3]) == run(plain, 12, [3])


@pytest.mark.parametrize("strategy", [NgramCandidates, RecyclingCandidates, partial(LayerSkipCandidates, 1)])
def test_policy_left_out_is_that_of_k_and_the_tree(strategy: Any) -> None:
    """Would catch: trees of adaptive size in every step, which have no latencies to be sized by."""
    settings = [{}, {"k": 5, "tree": "auto"}, {"tree": 8}, {"k": 5}, {"k": 5, "tree": 8}]
    adaptive = [isinstance(strategy(**one).policy, AdaptiveDepth) for one in settings]
    assert adaptive == [True, True, True, False, False]
    assert strategy(k=5, tree="auto", policy=FixedDepth()).policy == FixedDepth()
