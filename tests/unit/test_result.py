"""The outcome of a step in terms of another tree than the verified one."""

import pytest

from hf_specgen.tree import DraftTree
from hf_specgen.verification.result import VerificationResult, result_for

BRANCHED = DraftTree.from_nodes([([5, 8, 6, 7], (-1, -1, 0, 2))])
"""Nodes 0: 5, 1: 8, 2: 6 after 5, 3: 7 after 6."""


@pytest.mark.parametrize(
    ("tokens", "accepted", "path", "tree", "expected_path", "expected"),
    [
        pytest.param([5, 6, 9], 2, [0, 2], BRANCHED, [0, 2], 2, id="the same tree"),
        pytest.param([5, 6], 2, [0], BRANCHED, [0], 2, id="the row ends in an accepted token"),
        pytest.param([5], 1, [], BRANCHED, [], 1, id="the row ends in the first accepted token"),
        pytest.param([5, 6], 1, [0], BRANCHED, [0], 1, id="the bonus token is in the superset"),
        pytest.param([5, 6, 9], 2, [1, 3], DraftTree.chains([[5]]), [0], 1, id="a part with one accepted token"),
        pytest.param([5, 6, 9], 2, [1, 3], DraftTree.chains([[6]]), [], 0, id="a part without accepted tokens"),
        pytest.param([5, 6], 2, [1], DraftTree.chains([[5, 6]]), [0], 2, id="a part, and the row ends"),
        pytest.param([5], 1, [], DraftTree.empty(1), [], 0, id="an empty part"),
        pytest.param([], 0, None, BRANCHED, None, 0, id="a row that took no part"),
    ],
)
def test_result_for_another_tree_has_its_nodes_and_counts_its_accepted_tokens(
    tokens: list[int],
    accepted: int,
    path: list[int] | None,
    tree: DraftTree,
    expected_path: list[int] | None,
    expected: int,
) -> None:
    """Would catch: one accepted token too few where the row ends, which no path contains."""
    found = result_for(VerificationResult([path], [tokens], [accepted]), tree)
    assert (found.paths, found.accepted) == ([expected_path], [expected])
