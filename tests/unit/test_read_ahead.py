"""First-stage nodes for a draft model, against a slow enumeration of all paths."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import pytest

from hf_specgen.candidates.draft_growth import DraftGrowth
from hf_specgen.candidates.read_ahead import (
    CENTERS,
    MIN_FIRST_STAGE_PROBABILITY,
    REPEATED_SHARE,
    NextTokens,
    ReadAhead,
    Start,
    starts_of,
)
from hf_specgen.candidates.recycling import SUCCESSORS, RecyclingTable
from hf_specgen.candidates.scored_nodes import ScoredNodes
from hf_specgen.candidates.tree_builder import Proposals, TreeBuilder
from hf_specgen.candidates.tree_edges import edges
from hf_specgen.candidates.tree_shape import CHAIN
from hf_specgen.depth.calibration import EDGES, Calibration
from hf_specgen.tree import DraftTree

VOCAB = 12


def _filled(seed: int) -> tuple[ReadAhead, RecyclingTable]:
    """With a table that knows what follows half of the tokens."""
    rng = np.random.default_rng(seed)
    table = RecyclingTable(VOCAB)
    ahead = ReadAhead(table, VOCAB)
    tokens = rng.permutation(VOCAB)[: VOCAB // 2]
    best = np.array([rng.permutation(VOCAB)[:SUCCESSORS] for _ in tokens])
    ahead.learn(tokens, best, rng.dirichlet(np.ones(SUCCESSORS), size=len(tokens)))
    return ahead, table


def _probability(table: RecyclingTable, sources: Sequence[NextTokens], last: int, token: int) -> float:
    """That a token follows, by the table and what the sources say."""
    estimates = [dict(zip(*source, strict=True)).get(token, 0.0) for source in sources]
    successors, bins = table.row(last)
    if token in successors:
        estimates.append(REPEATED_SHARE * CENTERS[bins[successors.index(token)]])
    return 1 - prod(1 - estimate for estimate in estimates)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("depth", [3, 20])
@pytest.mark.parametrize("has_source", [False, True])
def test_first_stage_nodes_are_the_most_probable_descendants(seed: int, has_source: bool, depth: int) -> None:
    """Would catch: a descendant that is left out, is too deep, or is found with another probability."""
    ahead, table = _filled(seed)

    def follow(row: int, path: Sequence[int]) -> NextTokens:
        return [(sum(path) + row + 3) % VOCAB, (sum(path) + row + 5) % VOCAB], [0.5, 0.2]

    ahead.sources = [follow] if has_source else []
    starts = [Start((), 0.7), Start((4, 9), 0.3)]
    proposed = ahead.propose(1, 2, starts, 20, depth)
    every: list[tuple[float, tuple[int, ...]]] = []

    def collect(path: tuple[int, ...], probability: float) -> None:
        for token in range(VOCAB) if len(path) < depth else ():
            sources = [follow(1, path)] if has_source else []
            value = probability * _probability(table, sources, path[-1] if path else 2, token)
            if value > MIN_FIRST_STAGE_PROBABILITY:
                every.append((value, (*path, token)))
                collect((*path, token), value)

    for start in starts:
        collect(tuple(start.path), start.probability)
    every.sort(key=lambda pair: -pair[0])
    assert proposed.joint == pytest.approx([value for value, _ in every[:20]])
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(proposed.tokens, proposed.parents, strict=True):
        paths.append((*(starts[-1 - parent].path if parent < 0 else paths[parent]), token))
    known = {path: value for value, path in every}
    assert [known[path] for path in paths] == pytest.approx(proposed.joint)


def test_suggested_tree_comes_before_sources_and_beside_the_table() -> None:
    """Where a tree was suggested the sources are not asked; the table adds other tokens, and nodes after its leaves."""
    ahead = ReadAhead(RecyclingTable(VOCAB), VOCAB)
    ahead.learn(np.array([2, 7]), np.array([[6, 5], [8, 9]]), np.array([[0.3, 0.6], [0.9, 0.05]]))
    asked: list[Sequence[int]] = []

    def follow(row: int, path: Sequence[int]) -> NextTokens:
        asked.append(path)
        return (), ()

    ahead.sources = [follow]
    tree = DraftTree.from_nodes([([5, 7], (-1, 0))], joint=((0.8, 0.72),))
    proposed = ahead.propose(0, 2, [Start((), 1.0, -1)], 3, 9, edges(tree, 0))
    assert proposed.tokens == [5, 7, 8] and proposed.parents == [-1, 0, 1]
    assert proposed.joint[0] == pytest.approx(1 - 0.2 * (1 - REPEATED_SHARE * CENTERS[np.searchsorted(EDGES, 0.6)]))
    assert asked == [(5, 7), (5, 7, 8)]


def test_first_stage_nodes_know_their_places_in_a_pass() -> None:
    proposed = ReadAhead(RecyclingTable(VOCAB), VOCAB).propose(0, 1, [Start((3,), 1.0)], 4, 9)
    assert proposed.tokens == []
    ahead, _ = _filled(0)
    ahead.sources = [lambda row, path: ([1, 2], [0.6, 0.3])]
    found = ahead.propose(0, 1, [Start((3,), 0.5), Start((4,), 0.5)], 5, 9).first(3)
    assert len(found.tokens) == 3
    expected = [10 - 1 - parent if parent < 0 else 12 + parent for parent in found.parents]
    assert found.placed(10, 12) == list(zip(expected, found.tokens, strict=True))


def test_tokens_that_one_of_the_models_lacks_are_neither_learnt_nor_proposed() -> None:
    ahead = ReadAhead(RecyclingTable(VOCAB), VOCAB - 2)
    ahead.learn(np.array([VOCAB + 5, 3]), np.array([[1, 2], [4, VOCAB - 1]]), np.full((2, 2), 0.5))
    ahead.sources = [lambda row, path: ([VOCAB - 2, 5], [0.6, 0.3])]
    assert sorted(ahead.propose(0, 3, [Start((), 1.0)], 4, 1).tokens) == [4, 5]
    assert ahead.propose(0, VOCAB + 5, [Start((), 1.0)], 4, 1).tokens == [5]


def test_starts_share_the_probability_of_a_pass() -> None:
    builder = TreeBuilder([3])
    builder.add_root(Proposals(np.array([[[5, 6, 7]]]), np.array([[[0.6, 0.2, 0.1]]])))
    builder.expandable[0, 2] = False
    starts = starts_of(builder, 0, [0, 1, 2])
    assert [start.path for start in starts] == [[5], [6], [7]]
    assert [start.probability for start in starts] == pytest.approx([0.75, 0.25, 0.0])


def test_passes_per_level_follow_what_was_found() -> None:
    ahead = ReadAhead(RecyclingTable(VOCAB), VOCAB)
    assert ahead.passes_per_level == 1.0
    for _ in range(9):
        ahead.count(1.0)
    assert ahead.passes_per_level == pytest.approx(10 / 19)


@pytest.mark.parametrize("proposed", [7, 9])
def test_growth_adds_the_children_of_first_stage_nodes_that_are_proposed(proposed: int) -> None:
    """From the results of the pass that has read them; one that is not proposed changes nothing."""
    growth = DraftGrowth(CHAIN, [4, 0], Calibration())
    growth.begin(_scored([[[5]], [[5]]]))
    nodes = np.array([[0], [0]])
    growth.read.add(growth.builder, nodes)
    growth.read.add_first_stage([[(0, proposed)], []])
    assert growth.read_now(2).tolist() == [[True, True], [False, False]]
    assert growth.read_now(3).tolist() == [[True, True, True], [False, False, False]]
    found = growth.expand(nodes, _scored([[[7], [8]], [[0], [0]]]))
    assert growth.builder.tokens[0].tolist() == ([5, 7, 8] if proposed == 7 else [5, 7])
    assert found == pytest.approx(growth.builder.joint[0, 1] / growth.builder.joint[0, 0] if proposed == 7 else 0.0)
    assert growth.confidence().shape == growth.builder.tokens.shape and growth.q() is None


def _scored(tokens: list[list[list[int]]]) -> ScoredNodes:
    """The same confidence in all tokens `[rows, nodes, count]`."""
    confidence = np.full(np.array(tokens).shape, 0.6)
    return ScoredNodes(np.array(tokens), confidence, confidence, None, None)
