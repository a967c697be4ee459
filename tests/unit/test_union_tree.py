"""The tree of several strategies' proposals, against an enumeration of all of them."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specgen.candidates.tree_edges import UNKNOWN_ACCEPTANCE
from hf_specgen.candidates.union_tree import SEVERAL, UNPROPOSED_SHARE, unite
from hf_specgen.depth.calibration import BIN_CENTERS, EDGES, RANKS
from hf_specgen.tree import DraftTree

thorough = settings(max_examples=150, deadline=None, derandomize=True)
AS_IT_IS = np.tile(np.linspace(0.02, 0.9, len(EDGES) + 1), (RANKS, 1))
AMPLE = 1000


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], tuple[int, ...], list[float]]:
    """Tokens, parents and joint probabilities of a draft without two equal siblings."""
    tokens: list[int] = []
    parents: list[int] = []
    joint: list[float] = []
    for node in range(draw(st.integers(0, 6))):
        parent, token = draw(st.integers(-1, node - 1)), draw(st.integers(0, 3))
        parent = parent if parent < len(tokens) else -1
        if (parent, token) not in zip(parents, tokens, strict=True):
            parents.append(parent)
            tokens.append(token)
            joint.append((joint[parents[-1]] if parents[-1] >= 0 else 1.0) * draw(st.sampled_from([0.1, 0.4, 0.8])))
    return tokens, tuple(parents), joint


def paths_of(tokens: list[int], parents: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The path of each node."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def enumerate_nodes(
    drafts: list[tuple[list[int], tuple[int, ...], list[float]]],
    following: dict[int, list[tuple[int, float]]],
    depth: int,
    path: tuple[int, ...] = (),
    joint: float = 1.0,
) -> dict[tuple[int, ...], float]:
    """Every path that a draft or `following` proposes, with its joint probability."""
    if len(path) == depth:
        return {}
    missed: dict[int, float] = {}
    kinds: dict[int, int] = {}

    def add(number: int, token: int, probability: float) -> None:
        kinds[token] = SEVERAL if token in kinds else number
        missed[token] = missed.get(token, 1.0) * (1 - min(0.999, probability))

    for number, (tokens, parents, joints) in enumerate(drafts):
        known = dict(zip(paths_of(tokens, parents), joints, strict=True))
        for other, value in known.items():
            if other[:-1] == path:
                add(number, other[-1], value / known.get(path, 1.0))
    drafted = set(missed)
    for token, probability in following.get(path[-1] if path else 9, []):
        add(len(drafts) - 1, token, probability)
    values = {}
    for token, miss in missed.items():
        place = bisect_left(EDGES, 1 - miss)
        values[token] = min(0.999, AS_IT_IS[kinds[token]][place] / BIN_CENTERS[place] * (1 - miss))
    nodes: dict[tuple[int, ...], float] = {}
    proposed = [values[token] for token in drafted]
    odds = sum(value / (1 - value) for value in proposed)
    for token, value in values.items():
        limited = joint * (value / (1 - value) / odds if token in drafted and sum(proposed) > 1 else value)
        if limited > 0:
            nodes[(*path, token)] = limited
            nodes.update(enumerate_nodes(drafts, following, depth, (*path, token), limited))
    return nodes


@thorough
@given(st.lists(trees(), min_size=2, max_size=2), st.integers(0, 4), st.integers(0, 12), st.booleans())
def test_unite_agrees_with_the_reference(
    proposed: list[tuple[list[int], tuple[int, ...], list[float]]], depth: int, count: int, extended: bool
) -> None:
    """Would catch: evidence lost or counted twice, a node below the wrong parent, one that is not among the best."""
    following = {9: [(1, 0.5)], 1: [(2, 0.35), (3, 0.25)], 2: [(0, 0.4)]} if extended else {}
    drafts = [DraftTree.from_nodes([(tokens, parents)], (tuple(joint),)) for tokens, parents, joint in proposed]
    rows = {token: tuple(zip(*pairs, strict=True)) for token, pairs in following.items()}
    successors = (1, lambda token: rows.get(token, ((), ()))) if extended else None
    tree = unite(drafts, 0, AS_IT_IS, last_token=9, depth=depth, nodes=count, successors=successors)
    expected = enumerate_nodes(proposed, following, depth)
    found = paths_of(tree.tokens, tuple(tree.parents))
    assert len(set(found)) == len(found)
    assert tree.joint == pytest.approx([expected[path] for path in found])
    assert tree.joint == pytest.approx(sorted(expected.values(), reverse=True)[:count])


def test_unite_token_of_two_strategies_is_more_probable_than_of_one() -> None:
    one = DraftTree.from_nodes([([5, 6], (-1, -1))], ((0.4, 0.4),))
    other = DraftTree.from_nodes([([6], (-1,))], ((0.4,),))
    tree = unite([one, other], 0, AS_IT_IS, last_token=1, depth=2, nodes=9)
    assert tree.tokens == [6, 5] and tree.classes == [SEVERAL, 0]


@pytest.mark.parametrize(("attends", "expected"), [(False, 0.6), (True, 0.6 * UNPROPOSED_SHARE)])
def test_unite_token_that_the_network_does_not_propose_is_less_probable_if_it_attends(
    attends: bool, expected: float
) -> None:
    copied = DraftTree.from_nodes([([5, 7, 8], (-1, 0, 1))], ((0.5, 0.5 * 0.6, 0.5 * 0.6 * 0.9),))
    network = DraftTree.from_nodes([([5, 6], (-1, 0))], ((0.8, 0.8 * 0.3),))
    acceptance = np.tile(BIN_CENTERS, (RANKS, 1))  # estimates are used as they are
    tree = unite([copied, network], 0, acceptance, last_token=1, depth=9, nodes=9, network=1, attends_to_text=attends)
    joint = dict(zip(paths_of(tree.tokens, tuple(tree.parents)), tree.joint, strict=True))
    assert joint[5,] == pytest.approx(0.8)  # the network's estimate alone
    assert joint[5, 6] == pytest.approx(0.8 * 0.3)
    assert joint[5, 7] == pytest.approx(0.8 * expected)
    assert joint[5, 7, 8] == pytest.approx(0.8 * expected * 0.9)  # the network has no estimate after 5, 7


def test_unite_draft_without_estimates_takes_part() -> None:
    tree = unite([DraftTree.chains([[5, 6]])], 0, AS_IT_IS, last_token=1, depth=9, nodes=9)
    assert tree.first(9) == ([5, 6], (-1, 0))


def test_unite_only_chain_has_one_path() -> None:
    drafts = [DraftTree.from_nodes([([5, 6, 7], (-1, -1, 1))], ((0.3, 0.6, 0.5),))]
    tree = unite(drafts, 0, AS_IT_IS, last_token=1, depth=9, nodes=9, only_chain=True)
    assert tree.first(9) == ([6, 7], (-1, 0))


@pytest.mark.parametrize("estimates", [False, True])
def test_unite_own_estimates_of_the_network_count_as_they_are(estimates: bool) -> None:
    """It calibrates them itself; drafts without estimates are calibrated, and tokens that others propose too."""
    joint = ((0.5, 0.3),) if estimates else None
    copied, network = DraftTree.from_nodes([([7], (-1,))], ((0.4,),)), DraftTree.from_nodes([([5, 7], (-1, -1))], joint)
    acceptance = np.tile(0.5 * BIN_CENTERS, (RANKS, 1))
    tree = unite([copied, network], 0, acceptance, last_token=1, depth=9, nodes=9, network=1)
    found = dict(zip(tree.tokens, tree.joint, strict=True))
    assert found[5] == pytest.approx(0.5 if estimates else 0.5 * UNKNOWN_ACCEPTANCE)
    assert found[7] == pytest.approx(0.5 * (0.3 if estimates else UNKNOWN_ACCEPTANCE))
