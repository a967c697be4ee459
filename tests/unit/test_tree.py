"""The draft tree against its slow reference: how trees are built, checked, and walked."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specgen.tree import DraftTree, depths, merge_paths, validate_parents
from hf_specgen.verification.result import VerificationResult, accepted_path, reindexed_result
from tests.helpers import reference
from tests.helpers.calls import frontier_of

few_tokens = st.integers(0, 2)
path_lists = st.lists(st.lists(few_tokens, max_size=5), max_size=6)
some_parents = reference.any_parents(st.integers(0, 9))


def test_chains_of_different_lengths_are_padded_on_the_right() -> None:
    """Would catch: padding on the left, or padding counted as nodes."""
    tree = DraftTree.chains([[5, 6, 7], [], [8]])
    assert tree.tokens.tolist() == [[5, 6, 7], [0, 0, 0], [8, 0, 0]]
    assert tree.parents == ((-1, 0, 1), (), (-1,))
    assert (tree.batch, tree.nodes, tree.q) == (3, 3, None)


def test_structure_of_a_grown_chain_is_on_the_device_of_its_tokens() -> None:
    """Would catch: a head that runs eagerly on a GPU and receives positions on the CPU."""
    chain = frontier_of(torch.zeros(1, 1, dtype=torch.long, device="meta"), 3, 3)
    assert {part.device.type for part in chain.structure()} == {"meta"}


@pytest.mark.parametrize("tree", [DraftTree.empty(2), DraftTree.chains([[], []]), DraftTree.from_paths([[], [[]]])])
def test_empty_tree_has_no_nodes_and_integer_tokens(tree: DraftTree) -> None:
    """Would catch: an empty list of tokens that becomes float, or of shape `[batch]`, as `torch.tensor([])` is."""
    assert tree.tokens.shape == (2, 0) and tree.tokens.dtype == torch.long
    assert tree.parents == ((), ()) and tree.nodes == 0


def test_leftmost_chain_of_a_tree_is_its_first_path() -> None:
    """Would catch: a path that ends early, nodes of another row, q of other nodes."""
    chain = DraftTree.chains([[1, 2], [3]])
    assert chain.leftmost_chain() is chain
    q = torch.rand(2, 4, 9)
    tree = DraftTree(torch.tensor([[5, 6, 7, 8], [1, 2, 3, 0]]), ((-1, -1, 0, 2), (-1, 0, -1)), q)
    first = tree.leftmost_chain()
    assert first.tokens.tolist() == [[5, 7, 8], [1, 2, 0]] and first.parents == ((-1, 0, 1), (-1, 0))
    assert torch.equal(first.q[0], q[0, [0, 2, 3]]) and torch.equal(first.q[1, :2], q[1, :2])


def test_tree_of_inconsistent_shapes_raises() -> None:
    """Would catch: a tree whose error shows in the target's pass, far from what made it."""
    tokens = torch.zeros(2, 1, dtype=torch.long)
    with pytest.raises(ValueError, match="of 2 rows needs 2 lists of parents, got 1"):
        DraftTree(tokens, ((-1,),))
    for some in (tokens, [[5, 6], [7]]):
        with pytest.raises(ValueError, match="row 1 has 2 parents but only 1 tokens"):
            DraftTree(some, ((-1,), (-1, 0)))
    with pytest.raises(ValueError, match=r"are \[batch, nodes\], got the shape \[2\]"):
        DraftTree(torch.tensor([5, 6]), ((-1,), (-1,)))


def test_checked_tree_has_zeros_as_padding() -> None:
    """Would catch: padding of a strategy's own, such as -1, that a target reads as token ids."""
    tree = DraftTree(torch.tensor([[5, -1], [6, 7]]), [[-1], [-1, 0]])  # type: ignore[arg-type]
    checked = tree.checked(vocabulary=8)
    assert checked.token_lists() == [[5, 0], [6, 7]] and checked.parents == ((-1,), (-1, 0))
    assert DraftTree.chains([[5], [6, 7]]).checked(8).token_lists() == [[5, 0], [6, 7]]


@given(some_parents, st.integers(0, 8), st.integers(-4, 12))
def test_validate_parents_accepts_exactly_the_trees(parents: tuple[int, ...], place: int, value: int) -> None:
    """Would catch: a bound that is off by one, on any node."""
    validate_parents(parents)
    changed = (*parents[:place], value, *parents[place + 1 :])
    place = min(place, len(parents))
    if -1 <= value < place:
        validate_parents(changed)
    else:
        for check in (validate_parents, lambda parents: DraftTree.from_nodes([([1] * len(parents), parents)])):
            with pytest.raises(ValueError, match=f"node {place} has parent {value}; a parent is -1 or an earlier node"):
                check(changed)


@given(path_lists)
def test_merge_paths_agrees_with_the_reference(paths: list[list[int]]) -> None:
    """Would catch: a duplicate node, siblings under a wrong parent, an order that is not that of first appearance."""
    assert merge_paths(paths) == reference.merge_paths(paths)


@given(some_parents)
def test_depths_and_structure_agree_with_the_reference(parents: tuple[int, ...]) -> None:
    """Would catch: a node that sees a sibling, or a depth that counts nodes before it."""
    expected = [reference.depth(parents, node) for node in range(len(parents))]
    structure = DraftTree.from_nodes([([1] * len(parents), parents)]).structure()
    assert list(depths(parents)) == expected and structure.depths.tolist() == [[0, *expected]]
    assert structure.ancestors[0].int().tolist() == reference.ancestor_matrix(parents)


@given(path_lists, st.data())
def test_accepted_path_is_the_longest_in_the_reference(paths: list[list[int]], data: st.DataObject) -> None:
    """Would catch: a path that ends early or continues in a sibling's branch, a bonus token of a wrong node."""
    tokens, parents = merge_paths(paths)
    chosen = data.draw(st.lists(few_tokens, min_size=len(tokens) + 1, max_size=len(tokens) + 1))
    path, emitted = accepted_path(tokens, parents, chosen)
    assert path == reference.longest_accepted_path(tokens, parents, chosen)
    bonus = chosen[path[-1] + 1] if path else chosen[0]
    assert emitted == [*(tokens[node] for node in path), bonus]


def test_accepted_path_ignores_padding_behind_the_nodes() -> None:
    """Would catch: a row with fewer nodes that accepts its padding (token 0) because the target chose 0."""
    assert accepted_path([5, 0, 0], (-1,), [5, 0, 0, 0]) == ([0], [5, 0])


# The outcome of a step in terms of another tree than the verified one

BRANCHED = DraftTree.from_nodes([([5, 8, 6, 7], (-1, -1, 0, 2))])
"""Nodes 0: 5, 1: 8, 2: 6 after 5, 3: 7 after 6."""

RESULTS: dict[str, tuple[Any, list[int], int, DraftTree, Any, int]] = {
    "the same tree": ([0, 2], [5, 6, 9], 2, BRANCHED, [0, 2], 2),
    "the row ends in an accepted token": ([0], [5, 6], 2, BRANCHED, [0], 2),
    "the row ends in the first accepted token": ([], [5], 1, BRANCHED, [], 1),
    "the bonus token is in the superset": ([0], [5, 6], 1, BRANCHED, [0], 1),
    "a part with one accepted token": ([1, 3], [5, 6, 9], 2, DraftTree.chains([[5]]), [0], 1),
    "a part without accepted tokens": ([1, 3], [5, 6, 9], 2, DraftTree.chains([[6]]), [], 0),
    "a part, and the row ends": ([1], [5, 6], 2, DraftTree.chains([[5, 6]]), [0], 2),
    "an empty part": ([], [5], 1, DraftTree.empty(1), [], 0),
    "a row that took no part": (None, [], 0, BRANCHED, None, 0),
}
"""Path, tokens and accepted tokens of a verified tree; another tree, and the path and accepted tokens there."""


@pytest.mark.parametrize("name", RESULTS)
def test_reindexed_result_has_its_nodes_and_counts_its_accepted_tokens(name: str) -> None:
    """Would catch: one accepted token too few where the row ends, which no path contains."""
    *verified, tree, path, accepted = RESULTS[name]
    found = reindexed_result(VerificationResult(*([part] for part in verified)), tree)
    assert (found.paths, found.accepted) == ([path], [accepted])


@pytest.mark.parametrize(("num_in_pass", "expected"), [(4, 3), (2, 2), (1, 1), (0, 0)])
def test_reindexed_result_counts_its_nodes_in_the_pass(num_in_pass: int, expected: int) -> None:
    """Would catch: nodes of a member's draft that count as rejected although the combination left them out."""
    result = VerificationResult([[0, 2]], [[5, 6, 9]], [2], num_in_pass=[num_in_pass])
    other = DraftTree.from_nodes([([8, 5, 6, 5], (-1, -1, 1, 2))])  # as `BRANCHED`, then a node that it lacks
    assert reindexed_result(result, other, BRANCHED).num_in_pass == [expected]
    assert reindexed_result(result, other).num_in_pass == []


def test_padded_tree_has_the_same_nodes_and_more_columns() -> None:
    """Would catch: padding that counts as nodes."""
    tree = DraftTree(torch.tensor([[5, 6]]), ((-1, 0),))
    padded = tree.padded(4)
    assert padded.tokens.tolist() == [[5, 6, 0, 0]] and padded.parents == tree.parents and tree.padded(1) is tree
