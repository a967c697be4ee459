"""The draft tree against its slow reference: how trees are built, checked, and walked."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specgen.tree import (
    DraftTree,
    accepted_path,
    ancestor_matrix,
    chain_parents,
    depths,
    merge_paths,
    validate_parents,
)
from tests import reference

# The same examples in every run: a failure on someone's branch is that branch's failure.
thorough = settings(max_examples=200, deadline=None, derandomize=True)
few_tokens = st.integers(0, 2)
path_lists = st.lists(st.lists(few_tokens, max_size=5), max_size=6)
some_parents = reference.any_parents(st.integers(0, 9))


def test_constructors_pad_short_rows_on_the_right() -> None:
    """Would catch: padding on the left, or padding counted as nodes."""
    tree = DraftTree.chains([[5, 6, 7], [], [8]])
    assert tree.tokens.tolist() == [[5, 6, 7], [0, 0, 0], [8, 0, 0]]
    assert tree.parents == ((-1, 0, 1), (), (-1,))
    assert (tree.batch, tree.nodes, tree.q) == (3, 3, None)


@pytest.mark.parametrize("tree", [DraftTree.empty(2), DraftTree.chains([[], []]), DraftTree.from_paths([[], [[]]])])
def test_empty_trees(tree: DraftTree) -> None:
    """Would catch: an empty list of tokens that becomes float, or of shape `[batch]`, as `torch.tensor([])` is."""
    assert tree.tokens.shape == (2, 0) and tree.tokens.dtype == torch.long
    assert tree.parents == ((), ()) and tree.nodes == 0


def test_tree_of_no_rows() -> None:
    assert DraftTree.chains([]).tokens.shape == (0, 0)


def test_paths_share_their_beginnings_row_by_row() -> None:
    """Would catch: nodes shared between rows, or a token shared under different parents.

    Row 0 is drawn in the module's docstring; in row 1 the token 5 continues itself.
    """
    tree = DraftTree.from_paths([[[5, 6], [9], [5, 7]], [[5, 5], [5]]])
    assert tree.tokens.tolist() == [[5, 6, 9, 7], [5, 5, 0, 0]]
    assert tree.parents == ((-1, 0, -1, 0), (-1, 0))


def test_from_nodes_keeps_tokens_and_parents() -> None:
    tree = DraftTree.from_nodes([([1, 2, 3], (-1, -1, 1)), ([4], (-1,))])
    assert tree.tokens.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert tree.parents == ((-1, -1, 1), (-1,))


def test_first_paths() -> None:
    """Would catch: a first path that is not followed to its end, nodes of another row, q that stays behind."""
    chain = DraftTree.chains([[1, 2], [3]])
    assert chain.leftmost_chain() is chain
    q = torch.rand(2, 4, 9)
    tree = DraftTree(torch.tensor([[5, 6, 7, 8], [1, 2, 3, 0]]), ((-1, -1, 0, 2), (-1, 0, -1)), q)
    first = tree.leftmost_chain()
    assert first.tokens.tolist() == [[5, 7, 8], [1, 2, 1]] and first.parents == ((-1, 0, 1), (-1, 0))
    assert first.q is not None
    assert torch.equal(first.q[0], q[0, [0, 2, 3]]) and torch.equal(first.q[1, :2], q[1, :2])


def test_q_is_kept() -> None:
    q = torch.full((1, 2, 4), 0.25)
    assert DraftTree(torch.zeros(1, 2, dtype=torch.long), ((-1, 0),), q).q is q


@pytest.mark.parametrize(
    ("parents", "sentence"),
    [
        ((0,), "node 0 has parent 0; a parent is -1 or an earlier node"),
        ((-1, 1), "node 1 has parent 1"),
        ((-1, 2, 0), "node 1 has parent 2"),
        ((-1, 0, -2), "node 2 has parent -2"),
    ],
)
def test_bad_parents_get_a_sentence(parents: tuple[int, ...], sentence: str) -> None:
    """Would catch: a cycle or a forward reference that later reads a wrong ancestor without a word.

    Asked twice, because the check is cached and a cached error must stay an error.
    """
    for _ in range(2):
        with pytest.raises(ValueError, match=sentence):
            validate_parents(parents)
    with pytest.raises(ValueError, match=sentence):
        DraftTree.from_nodes([([1] * len(parents), parents)])


def test_shapes_that_do_not_fit_get_a_sentence() -> None:
    tokens = torch.zeros(2, 1, dtype=torch.long)
    with pytest.raises(ValueError, match="of 2 rows needs 2 lists of parents, got 1"):
        DraftTree(tokens, ((-1,),))
    with pytest.raises(ValueError, match="row 1 has 2 parents but only 1 tokens"):
        DraftTree(tokens, ((-1,), (-1, 0)))


@thorough
@given(some_parents, st.integers(0, 8), st.integers(-4, 12))
def test_validation_accepts_exactly_the_trees(parents: tuple[int, ...], place: int, value: int) -> None:
    """Would catch: a bound that is off by one, on any node."""
    validate_parents(parents)
    changed = (*parents[:place], value, *parents[place + 1 :])
    place = min(place, len(parents))
    if -1 <= value < place:
        validate_parents(changed)
    else:
        with pytest.raises(ValueError, match=f"node {place} has parent {value}"):
            validate_parents(changed)


@pytest.mark.parametrize("length", [0, 1, 4])
def test_chain_parents(length: int) -> None:
    assert chain_parents(length) == tuple([-1, 0, 1, 2][:length])


@thorough
@given(path_lists)
def test_merge_paths(paths: list[list[int]]) -> None:
    """Would catch: a node entered twice, siblings under a wrong parent, an order that is not that of appearance."""
    assert merge_paths(paths) == reference.merge_paths(paths)


@thorough
@given(some_parents)
def test_depths_and_ancestors(parents: tuple[int, ...]) -> None:
    assert list(depths(parents)) == [reference.depth(parents, node) for node in range(len(parents))]
    assert ancestor_matrix(parents).int().tolist() == reference.ancestor_matrix(parents)


def test_ancestors_drawn() -> None:
    """The tree of the module's docstring: nodes 0 and 1 continue the row, 2 and 3 continue node 0.

    row 0 1 2 3
    """
    assert ancestor_matrix((-1, -1, 0, 0)).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 0, 1],
    ]
    assert ancestor_matrix(()).int().tolist() == [[1]]


@thorough
@given(path_lists, st.data())
def test_accepted_path_is_the_longest(paths: list[list[int]], data: st.DataObject) -> None:
    """Would catch: a path that stops early, goes on in a sibling's branch, or a bonus token read at a wrong node."""
    tokens, parents = merge_paths(paths)
    chosen = data.draw(st.lists(few_tokens, min_size=len(tokens) + 1, max_size=len(tokens) + 1))
    path, emitted = accepted_path(tokens, parents, chosen)
    assert path == reference.longest_accepted_path(tokens, parents, chosen)
    bonus = chosen[path[-1] + 1] if path else chosen[0]
    assert emitted == [*(tokens[node] for node in path), bonus]


def test_accepted_path_ignores_padding_behind_the_nodes() -> None:
    """Would catch: a shorter row of a batch that accepts its padding (token 0) because the target chose 0."""
    assert accepted_path([5, 0, 0], (-1,), [5, 0, 0, 0]) == ([0], [5, 0])
