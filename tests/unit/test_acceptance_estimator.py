"""Tests of `hf_specgen.candidates.acceptance_estimator`, and of the draft sizes that follow from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hf_specgen.candidates.acceptance_estimator import START, STATES, AcceptanceEstimator, LevelProbabilities
from hf_specgen.candidates.tree_builder import TreeBuilder
from hf_specgen.candidates.tree_size import FastestTreeSizer
from hf_specgen.depth import CostCurve, LatencyModel


def draft_of(*rows: list[float]) -> LevelProbabilities:
    """The levels of chains with these probabilities of each token after the one before."""
    draft = LevelProbabilities()
    paths = [np.cumprod(row) for row in rows]
    for level in range(max(map(len, rows))):
        probability = np.array([path[level] if level < len(path) else 0.0 for path in paths])
        draft.add(1 + level, probability[:, None], probability)
    return draft


def test_expected_tokens_agree_with_a_simulated_chain() -> None:
    """Would catch: powers of the transitions that are multiplied in the wrong order, or doubled once too often."""
    estimator = AcceptanceEstimator()
    for row in ([0.99, 0.99, 0.6, 0.3], [0.6, 0.9, 0.99], [0.3]):
        estimator.record_levels(draft_of(row))
    expected = estimator.expected([0.1, 0.6, 0.8, 0.9, 0.95, 0.99], 13)[0]

    def below(state: int, levels: int) -> float:
        """The recursion that the powers stand for: one level, then the rest below each state of its token."""
        accepted = estimator.transitions[state].tolist()
        return sum(accepted[token] * (1 + below_known[levels - 1][token]) for token in range(STATES))

    below_known = [[0.0] * STATES]
    for levels in range(1, 14):
        below_known.append([below(state, levels) for state in range(STATES)])
    assert np.allclose(expected, below_known[1:])
    start = [below(START, levels) for levels in (1, 2)]
    assert start[0] < start[1] < 2


def test_levels_of_rows_that_ended_are_not_counted() -> None:
    """Would catch: the end of a short row taken for a doubtful token."""
    short, alone = AcceptanceEstimator(), AcceptanceEstimator()
    for _ in range(5):
        short.record_levels(draft_of([0.99] * 6, [0.99] * 2))
        alone.record_levels(draft_of([0.99] * 6))
    assert np.allclose(short.expected(0.99, 6), alone.expected(0.99, 6), atol=0.2)
    assert short.expected(0.99, 6)[0, -1] > 5


def test_draft_without_levels_leaves_the_estimates() -> None:
    """Would catch: drafts of which the host has read no level, which let the estimator forget the levels before."""
    estimator = AcceptanceEstimator()
    for _ in range(20):
        estimator.record_levels(draft_of([0.99, 0.4]))
    before = estimator.transitions
    for _ in range(100):
        estimator.record_levels(LevelProbabilities())
        estimator.record_levels(draft_of([0.0]))  # of a row that has ended
    assert np.array_equal(estimator.transitions, before)


@pytest.mark.parametrize(("probability", "least", "most"), [(0.995, 20, 32), (0.3, 0, 2)])
def test_drafts_go_as_far_as_a_run_of_certain_tokens(probability: float, least: int, most: int) -> None:
    """Would catch: drafts that end where the next token does not pay, while 20 of them do.

    T(q) is that of a CPU on which 4 tokens take two plain steps, and 24 take no longer than 8.
    """
    latency = LatencyModel.from_curves(
        CostCurve((1, 2, 4, 8, 24, 64), (1.0, 1.1, 2.1, 3.1, 3.0, 6.5), 256, 1), draft_token=0.05
    )
    estimator = AcceptanceEstimator()
    depths = []
    for _ in range(4):
        sizer = FastestTreeSizer(latency.at(1, 256), estimator=estimator)
        builder = TreeBuilder([32], 2, torch.tensor([[3]]))
        add_level(builder, probability)
        while (plan := sizer.next_plan(builder, 32)) is not None:
            assert plan.num_passes == 1
            sizer.record_passes(plan)
            builder.select_frontier(plan.expansion_width)
            add_level(builder, probability, plan.expansion_width)
        sizer.record_levels()
        depths.append(sizer.num_verified_of_builder(builder))
    assert least <= depths[-1] <= most


def add_level(builder: TreeBuilder, probability: float, width: int = 1) -> None:
    """Add two candidates after each of the nodes that were expanded."""
    shape = (1, width, 2)
    chances: Any = torch.tensor([probability, (1 - probability) / 2])
    builder.add(torch.arange(2).expand(shape), chances.log().expand(shape))
