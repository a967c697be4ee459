"""Nodes that a draft model reads together with the text: where they are in its cache, and which ones are proposed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_specgen.candidates.read_nodes import LeadingText, ReadNodes
from hf_specgen.candidates.tree_search import Proposals, TreeBuilder
from hf_specgen.candidates.tree_shape import MAX_READ_AHEAD, FastestSize
from hf_specgen.depth.cost import CostCurve
from hf_specgen.depth.latency import DraftLatency, StepLatency
from hf_specgen.tree import DraftTree


def _path(tree: DraftTree, row: int, node: int) -> list[int]:
    """Tokens from the root to a node."""
    return [] if node < 0 else [*_path(tree, row, tree.parents[row][node]), int(tree.tokens[row, node])]


def test_leading_text_of_ragged_rows_comes_before_every_node_of_the_tree() -> None:
    """Every node below the last unread token, and results in the order of the tree."""
    tree = DraftTree.from_nodes([([6, 7, 8], (-1, 0, -1)), ([9], (-1,))])
    text = LeadingText([[1], [2, 3, 4]])
    joined = text.before(tree)
    assert joined.nodes == 2 + 3
    assert [_path(joined, 0, 2 + node) for node in range(3)] == [[6], [6, 7], [8]]
    assert _path(joined, 1, 2) == [3, 4, 9] and _path(joined, 1, 1) == [3, 4]
    assert text.path(0, [0, 1]) == [2, 3] and text.path(1, [0]) == [0, 1, 2]
    places = torch.arange(6)[None, :, None].expand(2, -1, 1)
    assert text.results(places)[..., 0].tolist() == [[0, 3, 4, 5], [2, 3, 4, 5]]


def test_suggested_nodes_are_found_where_the_drafter_proposes_the_same_tokens() -> None:
    """A suggestion below a node that is not proposed is not found, nor is one beyond a row's depth."""
    suggested = DraftTree.from_nodes([([5, 6, 9, 7], (-1, 0, -1, 2)), ([5, 6], (-1, 0))])
    read, builder = ReadNodes(suggested), TreeBuilder([3, 1])
    builder.add_root(Proposals(np.array([[[5, 8]], [[5, 8]]]), np.full((2, 1, 2), 0.4)))
    found = read.find(builder, 0)
    assert found is not None
    nodes, places, real = found
    assert (nodes[0, 0], places[0, 0]) == (0, 0) and real.tolist() == [[True], [False]]
    builder.add(nodes, Proposals(np.array([[[6, 4]], [[6, 4]]]), np.full((2, 1, 2), 0.4)), real)
    found = read.find(builder, 2)
    assert found is not None
    assert (found[0][0, 0], found[1][0, 0]) == (2, 1)
    assert builder.joint[1, 2:].max() == 0  # the row of depth 1 was only filled up
    builder.add(found[0], Proposals(np.array([[[1, 2]], [[1, 2]]]), np.full((2, 1, 2), 0.4)), found[2])
    assert read.find(builder, 4) is None
    read.add(builder, np.array([[1], [1]]))
    assert read.tree().tokens.tolist() == [[5, 6, 9, 7, 8], [5, 6, 0, 0, 8]]
    assert read.places_along(0, [0, 2, 4]) == [0, 1]


def test_first_stage_nodes_are_found_below_the_nodes_that_they_were_proposed_for() -> None:
    """Rows with fewer are filled up; one may follow another one; nothing that fills up a row is found."""
    read, builder = ReadNodes(DraftTree.empty(2)), TreeBuilder([4, 4])
    builder.add_root(Proposals(np.array([[[5, 8]], [[6, 8]]]), np.full((2, 1, 2), 0.4)))
    read.add(builder, np.array([[0], [0]]))
    assert read.add_first_stage([[(0, 7), (1, 9)], [(0, 4)]]) == 2
    assert read.tree().tokens.tolist() == [[5, 7, 9], [6, 4, 0]]
    assert read.tree().parents == ((-1, 0, 1), (-1, 0, -1))
    assert read.real(3).tolist() == [[True, True, True], [True, True, False]]
    builder.add(np.array([[0], [0]]), Proposals(np.array([[[3, 7]], [[0, 4]]]), np.full((2, 1, 2), 0.4)))
    found = read.find(builder, 2)
    assert found is not None
    assert [part.tolist() for part in found] == [[[3], [3]], [[1], [1]], [[True], [True]]]
    builder.add(found[0], Proposals(np.array([[[9, 1]], [[9, 1]]]), np.full((2, 1, 2), 0.4)), found[2])
    found = read.find(builder, 4)
    assert found is not None and found[1][0, 0] == 2 and found[2].tolist() == [[True], [False]]
    assert read.places_along(0, [0, 3, 4]) == [0, 1, 2] and read.places_along(1, [0, 3, 4]) == [0, 1]


@pytest.mark.parametrize("read", [1, 3])
@pytest.mark.parametrize("token_seconds", [0.0, 0.01, 0.2, 1.0])
def test_read_ahead_no_other_number_of_nodes_saves_more(token_seconds: float, read: int) -> None:
    """Against every number of nodes: the passes expected to be saved less the seconds of the wider pass."""
    rng = np.random.default_rng(7)
    joint = [sorted(rng.uniform(0, 1, 40), reverse=True) for _ in range(2)]
    drafter = DraftLatency((1.0, 101.0), (1.0, 1.0 + 100 * token_seconds))
    shape = FastestSize(StepLatency(CostCurve((1, 65), (5.0, 5.1), 256, 1), drafter), rows=2)
    spent = shape._spent
    count = shape.read_ahead(joint, read)

    def seconds(nodes: int) -> float:
        return float(drafter.by_tokens(2 * (read + nodes)))

    def saved(nodes: int) -> float:
        saved_passes = sum(sum(row[:nodes]) for row in joint) / 2
        return saved_passes * float(drafter.by_tokens(2)) - (seconds(nodes) - seconds(0))

    assert saved(count) == pytest.approx(max(map(saved, range(MAX_READ_AHEAD + 1))))
    assert shape._spent - spent == pytest.approx(seconds(count) - seconds(0))


def test_fewer_passes_per_level_expand_more_nodes() -> None:
    """A pass that is expected to read two levels is made where one that reads a single level is not."""
    latency = StepLatency(CostCurve((1, 65), (1.0, 1.01), 256, 1), DraftLatency((1.0,), (0.8,)))
    beams = []
    for passes_per_level in (1.0, 0.5):
        shape, builder = FastestSize(latency, rows=1), TreeBuilder([8])
        shape.passes_per_level = passes_per_level
        builder.add_root(Proposals(np.array([[[5, 6]]]), np.array([[[0.6, 0.1]]])))
        beams.append(shape.beam(builder))
    assert beams[0] == 0 and beams[1] > 0


def test_nothing_is_expanded_once_as_many_nodes_were_read_as_there_is_room_for() -> None:
    latency = StepLatency(CostCurve((1, 65), (1.0, 1.01), 256, 1), DraftLatency((1.0,), (0.01,)))
    shape, builder = FastestSize(latency, rows=1), TreeBuilder([8])
    builder.add_root(Proposals(np.array([[[5, 6]]]), np.array([[[0.6, 0.3]]])))
    for _ in range(2):
        assert shape.beam(builder) > 0
        assert shape.read_ahead([[0.5] * MAX_READ_AHEAD]) == MAX_READ_AHEAD
    assert shape.beam(builder) == 0
