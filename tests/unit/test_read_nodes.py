"""Nodes that a draft model reads together with the text: where they are in its cache, and which ones are proposed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_specgen.candidates.read_nodes import LeadingText, ReadNodes
from hf_specgen.candidates.tree_builder import Proposals, TreeBuilder
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


@pytest.mark.parametrize("token_seconds", [0.0, 0.01, 0.2, 1.0])
def test_read_ahead_no_other_number_of_nodes_saves_more(token_seconds: float) -> None:
    """Against every number of nodes: the passes expected to be saved less the seconds of the wider pass."""
    rng = np.random.default_rng(7)
    joint = [sorted(rng.uniform(0, 1, 40), reverse=True) for _ in range(2)]
    drafter = DraftLatency((1.0, 101.0), (1.0, 1.0 + 100 * token_seconds))
    shape = FastestSize(StepLatency(CostCurve((1, 65), (5.0, 5.1), 256, 1), drafter), rows=2)
    spent = shape._spent
    count = shape.read_ahead(joint)

    def saved(nodes: int) -> float:
        first, wider = (float(drafter.by_tokens(2 * (1 + n))) for n in (0, nodes))
        return sum(sum(row[:nodes]) for row in joint) / 2 * first - (wider - first)

    assert saved(count) == pytest.approx(max(map(saved, range(MAX_READ_AHEAD + 1))))
    assert shape._spent - spent == pytest.approx(float(drafter.by_tokens(2 * (1 + count)) - drafter.by_tokens(2)))
