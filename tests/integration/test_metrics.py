"""The metrics of `evaluate`, on cases that the field agrees on; intervals on data whose spread is known."""

import random
from typing import Any

import pytest

from benchmarks import metrics
from hf_specgen.evaluation.measure import speedup_interval

pytest.importorskip("evaluate", reason="the metrics need evaluate")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """`evaluate` keeps its files below the user's home otherwise."""
    import evaluate

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate.config, "HF_METRICS_CACHE", str(tmp_path_factory.mktemp("metrics")))
        yield


THREE_DRAFTS = {"drafted": [3, 3, 2], "accepted": [3, 1, 0]}


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("acceptance_rate", THREE_DRAFTS, {"drafts": 3, "drafted": 8, "accepted": 4, "acceptance_rate": 0.5}),
        ("position_acceptance", THREE_DRAFTS, {"accepted_per_position": [2, 1, 1], "drafted_per_position": [3, 3, 2]}),
        # 7 nodes that are 3 deep reach position 3, not 7.
        (
            "position_acceptance",
            {"drafted": [7], "accepted": [2], "depths": [3]},
            {"drafted_per_position": [1, 1, 1], "accepted_per_position": [1, 1, 0]},
        ),
        # The two definitions differ where steps draft nothing or are cut.
        (
            "mean_accepted_length",
            {"drafted": [3, 3, 0, 0], "accepted": [3, 0, 0, 0], "emitted": [3, 1, 1, 1]},
            {"mean_acceptance_length": 2.5, "tokens_per_step": 1.5},
        ),
    ],
)
def test_metric_of_steps(name: str, given: dict[str, Any], expected: dict[str, Any]) -> None:
    found = metrics.load(name).compute(**given)
    assert {key: found[key] for key in expected} == expected


def test_speedup_is_a_ratio_of_sums() -> None:
    """10 tokens in 1 s and 10 in 4 s are 4 tokens/s, not the mean rate 6.25; plain 20 in 10 s is 2."""
    found = metrics.load("speedup").compute(
        tokens=[10, 10], seconds=[1, 4], plain_tokens=[10, 10], plain_seconds=[5, 5], resamples=200
    )
    assert found["speedup"] == 2.0
    assert found["low"] <= 2.0 <= found["high"] and found["differs"]


def test_bad_metric_input() -> None:
    with pytest.raises(ValueError, match="no metric 'speed'; there are acceptance_rate"):
        metrics.load("speed")
    with pytest.raises(ValueError, match="accepted <= depth <= drafted"):
        metrics.load("acceptance_rate").compute(drafted=[2], accepted=[3])
    with pytest.raises(ValueError, match="one number per step"):
        metrics.load("mean_accepted_length").compute(drafted=[2], accepted=[1], emitted=[1, 2])


def test_interval_covers_the_truth() -> None:
    """200 experiments of 40 requests whose true ratio is 1.2: a 95% interval must hold it in 90% or more.

    A bootstrap over 40 requests covers a little less than it says; fewer than 180 of 200 has a probability under 1%
    at a true coverage of 0.94.
    """
    generator = random.Random(1)
    held = 0
    for experiment in range(200):
        plain = [generator.gauss(1.2, 0.2) for _ in range(40)]
        ours = [generator.gauss(1.0, 0.2) for _ in range(40)]
        found = speedup_interval([10] * 40, ours, [10] * 40, plain, resamples=400, seed=experiment)
        held += found.low <= 1.2 <= found.high
    assert 178 <= held < 200


def test_interval_pairs_both_sides() -> None:
    """Prompts differ tenfold in cost, but ours takes half the time on each: the interval has no width."""
    plain = [1.0, 10.0, 3.0, 7.0]
    found = speedup_interval([5] * 4, [s / 2 for s in plain], [5] * 4, plain)
    assert (found.low, found.value, found.high) == pytest.approx((2, 2, 2))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([], [], [], []), "at least 1"),
        (([1], [1], [1, 2], [1, 2]), "same number"),
        (([1], [0.0], [1], [1]), "must be positive"),
    ],
)
def test_bad_intervals(columns: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        speedup_interval(*columns)
