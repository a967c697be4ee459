"""Acceptance estimates: against a slow reference, under censoring, and carried over to another call."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specgen.counters import RowStep
from hf_specgen.depth import AcceptanceEstimator, StepRecord
from hf_specgen.depth.acceptance import FORGETTING, MAX_SNAPSHOTS, PRIOR_ACCEPTANCE, SHRINKAGE, recall, remember
from tests.helpers.depth_simulator import Target

K = 5


@st.composite
def outcomes(draw: st.DrawFn, rows: int) -> StepRecord:
    """A step in which every row requested, drafted and accepted some number of tokens, or took no part."""
    requested, results = [], []
    for _ in range(rows):
        asked = draw(st.integers(0, K))
        depth = draw(st.integers(0, asked))
        accepted = draw(st.integers(0, depth))
        bonus = draw(st.booleans())
        requested.append(asked)
        results.append(RowStep(depth, depth, accepted, accepted + bonus) if draw(st.booleans()) else None)
    return StepRecord(requested, results, 1 + K)


batches = st.integers(1, 3).flatmap(lambda rows: st.lists(outcomes(rows), min_size=1, max_size=12))


class Reference:
    """The same estimates, one trial at a time."""

    def __init__(self, rows: int, k: int):
        prior = {"accepted": PRIOR_ACCEPTANCE, "proposed": 1.0}
        self.rows = {name: [[[0.0, 0.0] for _ in range(k)] for _ in range(rows)] for name in prior}
        self.prior = {
            name: [[SHRINKAGE, SHRINKAGE * mean] if i == 0 else [0.0, 0.0] for i in range(k)]
            for name, mean in prior.items()
        }

    def observe(self, step: StepRecord) -> None:
        for name in self.rows:
            depths = [asked if row is not None else 0 for asked, row in zip(step.requested, step.rows, strict=True)]
            for i in range(max(depths)):
                self.prior[name][i] = [FORGETTING * count for count in self.prior[name][i]]
            for row, (asked, result) in enumerate(zip(depths, step.rows, strict=True)):
                for i in range(asked):
                    trials, successes = self.rows[name][row][i]
                    tried, succeeded = self.trial(name, i, result)
                    self.rows[name][row][i] = [FORGETTING * trials + tried, FORGETTING * successes + succeeded]

    @staticmethod
    def trial(name: str, i: int, result: RowStep) -> tuple[bool, bool]:
        if name == "proposed":
            return i <= result.depth, i < result.depth
        if i < result.accepted:
            return True, True
        # The first position that failed was judged if the target's own token stands there.
        return i == result.accepted and result.emitted > result.accepted, False

    def cumulative(self, name: str) -> list[list[float]]:
        rows, prior = self.rows[name], self.prior[name]
        pooled, before = [], 0.0
        for i in range(K):
            trials = prior[i][0] + sum(row[i][0] for row in rows)
            successes = prior[i][1] + sum(row[i][1] for row in rows)
            before = successes / trials if i == 0 else (successes + SHRINKAGE * before) / (trials + SHRINKAGE)
            pooled.append(before)
        result = []
        for row in rows:
            chain, product = [], 1.0
            for i in range(K):
                product *= (row[i][1] + SHRINKAGE * pooled[i]) / (row[i][0] + SHRINKAGE)
                chain.append(product)
            result.append(chain)
        return result


@settings(max_examples=150, deadline=None)
@given(batches)
def test_estimator_any_outcomes_equals_the_slow_reference(steps: list[StepRecord]) -> None:
    """Would catch a slip in the vectorised counting: weights, censoring, or shrinkage."""
    rows = len(steps[0].rows)
    fast, slow = AcceptanceEstimator(rows, K), Reference(rows, K)
    for step in steps:
        fast.observe([step])
        slow.observe(step)
    np.testing.assert_allclose(fast.accepted(), slow.cumulative("accepted"), atol=1e-12)
    np.testing.assert_allclose(fast.proposed(), slow.cumulative("proposed"), atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(batches, st.integers(1, 5))
def test_estimator_does_not_depend_on_how_steps_are_grouped(steps: list[StepRecord], size: int) -> None:
    rows = len(steps[0].rows)
    one_by_one, grouped = AcceptanceEstimator(rows, K), AcceptanceEstimator(rows, K)
    for step in steps:
        one_by_one.observe([step])
    for first in range(0, len(steps), size):
        grouped.observe(steps[first : first + size])
    np.testing.assert_allclose(grouped.accepted(), one_by_one.accepted(), atol=1e-12)
    np.testing.assert_allclose(grouped.proposed(), one_by_one.proposed(), atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(batches)
def test_estimates_are_probabilities_that_fall_with_the_position(steps: list[StepRecord]) -> None:
    estimator = AcceptanceEstimator(len(steps[0].rows), K)
    estimator.observe(steps)
    for estimate in (estimator.accepted(), estimator.proposed()):
        assert (estimate >= 0).all() and (estimate <= 1).all()
        assert (np.diff(estimate, axis=1) <= 1e-12).all()


def _chain(requested: int, accepted: int) -> StepRecord:
    return StepRecord([requested], [RowStep(requested, requested, accepted, accepted + 1)], 1 + requested)


@pytest.mark.parametrize("alpha", [0.3, 0.75, 0.95])
def test_estimator_with_constant_acceptance_is_not_biased_by_censoring(alpha: float) -> None:
    """Accepted over drafted tokens by position would give alpha^i as the conditional probability of position i.

    The tolerance covers that few trials reach late positions, and that these are shrunk towards noisy ones.
    """
    random = np.random.default_rng(0)
    estimator, means = AcceptanceEstimator(1, K), []
    for step in range(4000):
        failures = np.flatnonzero(random.random(K) >= alpha)
        estimator.observe([_chain(K, int(failures[0]) if len(failures) else K)])
        if step > 100:
            chain = estimator.accepted()[0]
            means.append(chain / np.concatenate([[1.0], chain[:-1]]))
    # The shrinkage mixes positions that are alike, so the conditional probability is alpha at each of them.
    np.testing.assert_allclose(np.mean(means, axis=0), alpha, atol=0.07)


def test_estimator_row_cut_at_its_end_says_nothing_of_the_next_position() -> None:
    whole, cut = AcceptanceEstimator(1, K), AcceptanceEstimator(1, K)
    whole.observe([StepRecord([K], [RowStep(K, K, 2, 3)], 1 + K)])
    cut.observe([StepRecord([K], [RowStep(K, K, 2, 2)], 1 + K)])
    assert cut.accepted()[0, 2] > whole.accepted()[0, 2]
    assert cut.accepted()[0, 1] == pytest.approx(whole.accepted()[0, 1])


def test_estimator_row_without_trials_follows_the_others() -> None:
    estimator = AcceptanceEstimator(2, K)
    for _ in range(30):
        estimator.observe([StepRecord([K, 0], [RowStep(K, K, K, K + 1), RowStep(0, 0, 0, 1)], 1 + K)])
    assert estimator.accepted()[1].min() > 0.8


def test_estimator_forgets_within_thirty_drafts() -> None:
    estimator = AcceptanceEstimator(1, K)
    estimator.observe([_chain(K, K)] * 100)
    estimator.observe([_chain(K, 0)] * 30)
    assert estimator.accepted()[0, 0] < 0.25


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("before", "after"), [(8, 4), (4, 8), (4, 4), (1, 32)])
def test_snapshot_restored_at_another_depth_gives_the_positions_both_have(before: int, after: int, rows: int) -> None:
    """B5: acceptance of heads with one depth was restored for heads with another, and `generate` raised.

    The tolerance covers that fewer trials are shrunk more.
    """
    first = AcceptanceEstimator(1, before)
    first.observe([_chain(before, accepted) for accepted in (0, before, before // 2)] * 10)
    second = AcceptanceEstimator(rows, after)
    second.restore(first.snapshot(), weight=8.0)
    both = min(before, after)
    np.testing.assert_allclose(second.accepted()[0, :both], first.accepted()[0, :both], atol=0.15)
    second.observe([StepRecord([after] * rows, [RowStep(after, after, 0, 1)] * rows, 1 + after)])
    assert second.accepted().shape == (rows, after) and np.isfinite(second.accepted()).all()


def test_snapshot_weighs_no_more_than_told() -> None:
    """A new text outvotes the texts before within a few drafts."""
    first, second = AcceptanceEstimator(1, K), AcceptanceEstimator(1, K)
    first.observe([_chain(K, K)] * 200)
    second.restore(first.snapshot(), weight=4.0)
    assert second.accepted()[0, 0] > 0.95
    second.observe([_chain(K, 0)] * 6)
    assert second.accepted()[0, 0] < 0.5


def test_memory_is_bounded_and_drops_what_was_unused_for_longest() -> None:
    target, snapshot = Target(), AcceptanceEstimator(1, K).snapshot()
    for temperature in range(2 * MAX_SNAPSHOTS):
        remember(target, (("ngram", 5), 0.0), snapshot)
        remember(target, (("ngram", 5), 1.0 + temperature), snapshot)
    assert recall(target, (("ngram", 5), 0.0)) is snapshot
    assert recall(target, (("ngram", 5), 1.0)) is None
    assert recall(target, (("ngram", 5), float(2 * MAX_SNAPSHOTS))) is snapshot
    assert recall(Target(), (("ngram", 5), 0.0)) is None


def test_memory_of_no_model_keeps_nothing() -> None:
    remember(None, "key", AcceptanceEstimator(1, K).snapshot())
    assert recall(None, "key") is None


def test_memory_is_released_with_the_model() -> None:
    target, snapshot = Target(), AcceptanceEstimator(1, K).snapshot()
    remember(target, "key", snapshot)
    references = len(gc.get_referrers(snapshot))
    del target
    gc.collect()
    assert len(gc.get_referrers(snapshot)) < references


def test_memory_used_by_eight_threads_stays_whole() -> None:
    """B6: dictionaries changed size while another thread iterated over them."""
    target, snapshot = Target(), AcceptanceEstimator(1, K).snapshot()

    def work(thread: int) -> None:
        for call in range(500):
            remember(target, (("ngram", call % 97), float(thread)), snapshot)
            found = recall(target, (("ngram", (call * 7) % 97), float(thread)))
            assert found is None or found is snapshot

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
