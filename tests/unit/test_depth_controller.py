"""The adaptive policy against a simulator in which acceptance and latencies are known."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest

from hf_specgen.counters import RowStep
from hf_specgen.depth import (
    AdaptiveDepth,
    Controller,
    CostCurve,
    DraftLatency,
    FixedDepth,
    LatencyModel,
    Policy,
    PolicySession,
    Slice,
    StepRecord,
    plan_depths,
)
from tests.helpers.depth_simulator import Candidates, Simulation, Target, make_call

FLAT = CostCurve((1, 8, 16, 32), (0.010, 0.0118, 0.0125, 0.0166), 256, 1)
STEEP = CostCurve((1, 2, 4, 8, 16), (0.010, 0.0115, 0.0135, 0.0159, 0.0183), 256, 1)
LINEAR = CostCurve((1, 2, 16), (0.010, 0.013, 0.055), 256, 1)
CURVES = {"flat": FLAT, "steep": STEEP, "linear": LINEAR}
GPU_LIKE = Path(__file__).parents[2] / "benchmarks" / "profiles" / "gpu_like.json"
DEPTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
SEEDS = range(4)


def _for_rows(curve: CostCurve, rows: int) -> CostCurve:
    return CostCurve(curve.queries, curve.seconds, curve.context, rows)


@pytest.mark.parametrize("depth", [0, 3, 16])
@pytest.mark.parametrize(("rows", "draft_token", "noise"), [(1, 0.0, 0.0), (1, 0.0015, 0.3), (4, 0.0015, 0.1)])
def test_simulation_of_fixed_depths_equals_a_run_of_that_policy(
    rows: int, draft_token: float, noise: float, depth: int
) -> None:
    """Would catch: other random numbers than those that the policies under test meet."""
    simulation = Simulation(
        lambda step, row, position: 0.9 - 0.1 * row - 0.02 * position * (step % 3),
        _for_rows(STEEP, rows),
        rows=rows,
        draft_token=draft_token,
        noise=noise,
        slowdown=lambda step: 1 + 0.01 * step,
    )
    assert simulation.fixed(60, [depth])[depth] == pytest.approx(simulation.run(FixedDepth(depth), 60))


@pytest.mark.parametrize("profile", ["given", "first call", "learnt"])
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("alpha", [0.5, 0.8, 0.95])
def test_speed_is_close_to_that_of_the_best_fixed_depth(curve: str, alpha: float, profile: str) -> None:
    """Over 300 steps, the start included; the mean over seeds, as a single text may be unlucky.

    The first call on a machine makes some plain steps to learn what they take.
    """
    ratios = []
    for seed in SEEDS:
        noise = 0.0 if profile == "given" else 0.1
        simulation = Simulation(lambda *_: alpha, CURVES[curve], seed=seed, noise=noise, model=Target())
        policy = AdaptiveDepth(simulation.latency if profile == "given" else None)
        if profile == "learnt":
            simulation.run(policy, 100)
            simulation.model = Target()  # of the same shape: the profile is known, the texts are not
        best = max(simulation.fixed(300, DEPTHS).values())
        ratios.append(simulation.run(policy, 300) / best)
    assert mean(ratios) > (0.86 if profile == "first call" else 0.92)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("draft_token", [0.0, 0.0015])
@pytest.mark.parametrize("curve", CURVES)
def test_drafting_that_never_pays_costs_less_than_two_percent(curve: str, draft_token: float, rows: int) -> None:
    """Drafts are always rejected: the first ones, and the later trials, take no more than that of 500 plain steps."""
    simulation = Simulation(
        lambda *_: 0.0,
        _for_rows(CURVES[curve], rows),
        Candidates(negligible_draft_cost=not draft_token),
        rows=rows,
        draft_token=draft_token,
    )
    plain = simulation.fixed(500, [0])[0]
    assert simulation.run(AdaptiveDepth(simulation.latency), 500) / plain > 0.98


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("draft_token", [0.0, 0.0015])
@pytest.mark.parametrize("curve", CURVES)
def test_drafting_that_never_pays_costs_little_in_a_short_first_call(curve: str, draft_token: float, rows: int) -> None:
    ratios = []
    for seed in SEEDS:
        simulation = Simulation(
            lambda *_: 0.0,
            _for_rows(CURVES[curve], rows),
            Candidates(negligible_draft_cost=not draft_token, kind=f"seed {seed}"),
            rows=rows,
            draft_token=draft_token,
            noise=0.1,
            seed=seed,
            model=Target(),
        )
        plain = simulation.fixed(128, [0])[0]
        ratios.append(simulation.run(AdaptiveDepth(), 128) / plain)
    assert mean(ratios) > 0.96


class CountsBehindRejections(Policy):
    """Takes positions behind a rejected token for failures, as censoring invites to."""

    def __init__(self, seconds: list[float]):
        self.seconds = np.array(seconds)

    def start(self, call: Any) -> PolicySession:
        return _CountingSession(self.seconds, call.candidates.k)


class _CountingSession(PolicySession):
    def __init__(self, seconds: np.ndarray, k: int):
        self._seconds, self._k, self._steps = seconds, k, 0
        self._accepted, self._drafted = np.zeros(k), np.full(k, 1e-9)

    def depths(self, room: Any) -> list[int]:
        self._steps += 1
        if self._steps <= 60:
            return [self._k]
        chain = np.cumprod(self._accepted / self._drafted)[None]
        return plan_depths(chain, np.ones_like(chain), self._seconds, [self._k]).depths

    def observe(self, step: StepRecord) -> None:
        (row,) = step.rows
        assert row is not None
        self._drafted[: row.depth] += 1
        self._accepted[: row.accepted] += 1


def test_depth_is_not_too_small_for_censoring() -> None:
    """Three of four tokens are accepted at every position. Counting what was never judged drafts too little."""
    naive, ours, best = [], [], []
    for seed in SEEDS:
        simulation = Simulation(lambda *_: 0.75, FLAT, seed=seed)
        best.append(max(simulation.fixed(500).values()))
        naive.append(simulation.run(CountsBehindRejections([FLAT(1 + depth) for depth in range(17)]), 500))
        wrong = simulation.requested[-1][0]
        ours.append(simulation.run(AdaptiveDepth(simulation.latency), 500))
        right = mean(depths[0] for depths in simulation.requested[-200:])
        assert wrong < 5 < right, "the naive estimate must choose another depth for this test to mean anything"
    assert mean(naive) < 0.93 * mean(best)
    assert mean(ours) > 0.95 * mean(best)


@pytest.mark.parametrize("curve", ["flat", "steep"])
@pytest.mark.parametrize("before, after", [(0.9, 0.05), (0.05, 0.9)])
def test_change_of_domain_is_followed_within_forty_steps(curve: str, before: float, after: float) -> None:
    """By then the depth is about that of a text that was so from its beginning."""
    late, fresh = [], []
    for seed in SEEDS:
        changing = Simulation(lambda step, *_: before if step < 100 else after, CURVES[curve], seed=seed)
        changing.run(AdaptiveDepth(changing.latency), 180)
        late.append(mean(depths[0] for depths in changing.requested[140:]))
        steady = Simulation(lambda *_: after, CURVES[curve], seed=seed)
        steady.run(AdaptiveDepth(steady.latency), 180)
        fresh.append(mean(depths[0] for depths in steady.requested[140:]))
    if after > before:
        assert mean(late) > 0.75 * mean(fresh) > 7
    else:
        assert mean(late) < mean(fresh) + 1 < 4


@pytest.mark.parametrize("period", [20, 60])
@pytest.mark.parametrize("curve", CURVES)
def test_oscillating_acceptance_is_not_slower_than_the_best_fixed_depth(curve: str, period: int) -> None:
    """Where each part is long, drafting is faster than with any fixed depth; where it is short, not much slower."""
    ratios = []
    for seed in SEEDS:
        simulation = Simulation(lambda step, *_: 0.9 if step // period % 2 == 0 else 0.1, CURVES[curve], seed=seed)
        best = max(simulation.fixed(300, DEPTHS).values())
        ratios.append(simulation.run(AdaptiveDepth(simulation.latency), 300) / best)
    assert mean(ratios) > (0.88 if period == 20 else 0.93)


def test_decisions_with_a_given_profile_do_not_depend_on_time() -> None:
    runs = []
    for noise, slower in ((0.0, 1.0), (3.0, 1.0), (0.5, 100.0)):
        simulation = Simulation(
            lambda *_: 0.6, STEEP, seed=3, noise=noise, slowdown=lambda step, s=slower: s, model=Target()
        )
        for _ in range(2):  # nothing is remembered from the first call either
            simulation.run(AdaptiveDepth(LatencyModel.from_curves(STEEP, draft_token=0.001)), 200)
            runs.append(simulation.requested)
    assert all(run == runs[0] for run in runs) and any(map(any, runs[0]))


def test_decisions_after_the_profile_is_learnt_do_not_depend_on_time() -> None:
    """Two runs of a program draft alike at any load of the machine: what is learnt first decides."""
    Simulation(lambda *_: 0.7, STEEP, noise=0.2, model=Target()).run(AdaptiveDepth(), 150)
    runs = []
    for noise, drift in ((0.0, 0.0), (2.0, 0.05)):
        simulation = Simulation(
            lambda *_: 0.6, STEEP, noise=noise, slowdown=lambda step, d=drift: 1 + d * step, model=Target()
        )
        calls = []
        for seed in range(3):
            simulation.seed = seed
            simulation.run(AdaptiveDepth(), 150)
            calls.append(simulation.requested)
        runs.append(calls)
    assert runs[0] == runs[1]


def test_given_profile_file_decides_like_the_model_in_it() -> None:
    simulation = Simulation(lambda *_: 0.7, FLAT)
    simulation.run(AdaptiveDepth(GPU_LIKE), 60)
    by_file = simulation.requested
    simulation.run(AdaptiveDepth(LatencyModel.load(GPU_LIKE)), 60)
    assert by_file == simulation.requested


@pytest.mark.parametrize("alpha", [0.0, 0.9])
def test_acceptance_of_earlier_calls_is_remembered(alpha: float) -> None:
    """The second call with drafts that are always rejected hardly drafts, one with good ones begins deep."""
    simulation = Simulation(lambda *_: alpha, FLAT, seed=1, model=Target())
    drafts = []
    for _ in range(3):
        simulation.run(AdaptiveDepth(), 60)
        drafts.append([depths[0] for depths in simulation.requested])
    if alpha:
        assert drafts[2][0] > 4
    else:
        assert sum(drafts[2][:8]) < 5 < sum(drafts[0][:8]) and max(drafts[2]) <= 1


def test_temperatures_and_strategies_are_remembered_apart() -> None:
    model = Target()
    first = Simulation(lambda *_: 0.0, FLAT, Candidates(kind="ngram"), model=model)
    for _ in range(2):
        first.run(AdaptiveDepth(), 100)
    others = [("ngram", 1.0), ("draft_model", 0.0)]
    assert sum(depth for (depth,) in first.requested[:8]) <= 3
    for kind, temperature in others:
        other = Simulation(lambda *_: 0.0, FLAT, Candidates(kind=kind), model=model, temperature=temperature)
        other.run(AdaptiveDepth(), 100)
        assert sum(depth for (depth,) in other.requested[:8]) > 3, "nothing is known of it yet, so it is tried"


def test_exploration_that_one_call_cannot_pay_is_saved_for_later_calls() -> None:
    """A trial takes two plain steps here, since the prompt has to be read: too much for a short call, not for ten."""
    simulation = Simulation(
        lambda *_: 0.0,
        FLAT,
        Candidates(negligible_draft_cost=False),
        draft_token=0.001,
        prefill=0.0002,
        model=Target(),
    )
    simulation.run(AdaptiveDepth(), 200)
    drafts, rates = [], []
    for _ in range(12):
        rates.append(simulation.run(AdaptiveDepth(), 40))
        drafts.append(sum(depths != [0] for depths in simulation.requested))
    assert 0 < sum(drafts) < 12
    assert len(rates) / sum(1 / rate for rate in rates) > 0.97 / FLAT(1)


@pytest.mark.parametrize("tokens, drafts", [(20, False), (1000, True)])
def test_prefill_of_the_drafter_is_part_of_the_cost(tokens: int, drafts: bool) -> None:
    """Reading the prompt takes as long as 30 plain steps: that is faster in a long call only."""
    draft = DraftLatency(seconds=(0.0001,), prefill=0.01 * 30 / 100)
    model = LatencyModel((Slice(FLAT, {"draft_model": draft}),))
    call = make_call(candidates=Candidates(negligible_draft_cost=False), prompt=100)
    assert (AdaptiveDepth(model).start(call).depths([tokens]) != [0]) == drafts


def _observe(session: PolicySession, requested: int, nodes: int, accepted: int) -> None:
    depth = min(requested, nodes)
    session.observe(StepRecord([requested], [RowStep(nodes, depth, accepted, accepted + 1)], 1 + nodes))


def test_adaptive_trees_get_their_full_depth_also_in_trials() -> None:
    session = AdaptiveDepth(GPU_LIKE).start(make_call(candidates=Candidates(6, False, True)))
    assert session.latency is not None
    requested = []
    for step in range(160):
        (depth,) = session.depths([99])
        requested.append(depth)
        _observe(session, depth, 16 if depth else 0, 3 if step < 60 and depth else 0)
    assert set(requested) == {0, 6}
    assert requested[:60] == [6] * 60 and requested[-20:].count(0) > 10


@pytest.mark.parametrize("nodes, drafts", [(8, True), (64, False)])
def test_adaptive_trees_draft_where_their_steps_are_faster(nodes: int, drafts: bool) -> None:
    """At three tokens a step 8 nodes speed up decoding, 64 do not; a node takes a tenth of a step."""
    model = LatencyModel.from_curves(CostCurve((1, 11), (1.0, 2.0), context=1, batch=1))
    session = AdaptiveDepth(model).start(make_call(candidates=Candidates(8, True, True)))
    drafted = 0
    for _ in range(100):
        (depth,) = session.depths([99])
        drafted += depth > 0
        _observe(session, depth, nodes if depth else 0, 2 if depth else 0)
    assert drafted == 100 if drafts else drafted < 30


def test_drafting_speed_sums_steps_with_a_draft_by_the_latency_model() -> None:
    """Two drafts of 10 nodes, of which 3 and 0 are accepted, cost two plain steps each; a plain step does not count."""
    model = LatencyModel.from_curves(CostCurve((1, 11), (1.0, 2.0), context=1, batch=1))
    session = AdaptiveDepth(model).start(make_call(candidates=Candidates(8, True, True)))
    for nodes, accepted in [(10, 3), (0, 0), (10, 0)]:
        session.depths([99])
        _observe(session, 8 if nodes else 0, nodes, accepted)
    assert session.drafting_speed == pytest.approx((2, 5.0, 4.0))


def test_depths_never_exceed_the_room_of_a_row() -> None:
    session = AdaptiveDepth(GPU_LIKE).start(make_call(rows=3))
    for room in ([9, 1, 0], [2, 2, 2], [0, 0, 0], [0, 5, 1]):
        depths = session.depths(room)
        assert len(depths) == 3 and all(0 <= depth <= free for depth, free in zip(depths, room, strict=True))


def test_row_that_comes_back_drafts_again_at_once() -> None:
    """Rows that are ahead of the others wait some steps: they must not stay plain until the next plan."""
    session = AdaptiveDepth(GPU_LIKE).start(make_call(rows=2))
    assert session.depths([9, 0])[1] == 0
    assert session.depths([9, 9])[1] > 0


def test_sessions_of_one_policy_in_eight_threads_do_not_mix() -> None:
    """B6: settings are shared by threads, and so are latencies and acceptance of one model."""
    policy, model = AdaptiveDepth(), Target()

    def work(seed: int) -> int:
        deepest = 0
        for call in range(4):
            simulation = Simulation(
                lambda *_: 0.8, FLAT, rows=1 + (seed + call) % 4, seed=seed, model=model, temperature=float(call)
            )
            simulation.run(policy, 50)
            deepest = max(deepest, *map(max, simulation.requested))
        return deepest

    with ThreadPoolExecutor(8) as pool:
        assert min(pool.map(work, range(8))) > 2


def test_controller_is_the_adaptive_policy() -> None:
    assert Controller is AdaptiveDepth
    assert repr(Controller()) == "AdaptiveDepth(margin=0.02)"


@pytest.mark.parametrize("alpha, drafts", [(0.3, False), (0.9, True)])
def test_margin_is_what_drafting_must_gain(alpha: float, drafts: bool) -> None:
    simulation = Simulation(lambda *_: alpha, FLAT)
    simulation.run(AdaptiveDepth(simulation.latency, margin=2.0), 200)
    assert (sum(depths[0] for depths in simulation.requested[100:]) > 200) == drafts


def test_bad_settings_raise() -> None:
    with pytest.raises(ValueError, match="margin must be at least 0, got -1"):
        AdaptiveDepth(margin=-1)
    with pytest.raises(OSError, match="nowhere"):
        AdaptiveDepth("nowhere.json")
    with pytest.raises(ValueError, match="no drafter 'crystal_ball'"):
        AdaptiveDepth(GPU_LIKE).start(make_call(candidates=Candidates(5, False, False, "crystal_ball")))
