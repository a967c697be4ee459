"""Best-first search, and drafts for rows cut to one size."""

from __future__ import annotations

import pytest

from hf_specgen.candidates.best_first import SearchLimits, SearchTree, best_first
from hf_specgen.candidates.tree_search import draft_rows
from tests.helpers.calls import make_call, make_state


def test_best_first_pulls_the_next_sibling_only_after_the_one_before_is_added() -> None:
    """Would catch: all children of a node computed although few are reached; they may be expensive to look up."""
    pulled = []

    def children(tag: int, depth: int):  # type: ignore[no-untyped-def]
        for token, probability in ((5, 0.5), (6, 0.3), (7, 0.1), (8, 0.05)):
            pulled.append(token)
            yield token, probability, token

    tree = best_first(0, children, 1, SearchLimits(2))
    assert tree.tokens == [5, 6] and tree.probability == [0.5, 0.3] and pulled == [5, 6, 7]


@pytest.mark.parametrize(
    ("size", "nodes", "min_probability", "is_chain"),
    [(12, 12, 0.0, False), (None, 5, 0.0, True), ("auto", 5, 0.05, False)],
    ids=["number", "chain", "auto without latencies"],
)
@pytest.mark.parametrize("is_prefill", [False, True])
def test_draft_rows_limits_follow_the_size(
    size: int | str | None, nodes: int, min_probability: float, is_chain: bool, is_prefill: bool
) -> None:
    """Would catch: a tree at prefill, which verifies chains; a fixed chain cut off by its probability."""
    limits: list[SearchLimits] = []

    def search(row: int, given: SearchLimits) -> SearchTree[None]:
        limits.append(given)
        return SearchTree([7] * row, list(range(-1, row - 1)), [0.5**depth for depth in range(1, row + 1)])

    call = make_call(make_state([[1], [2]]))
    draft, trees = draft_rows(call, size, [0, 5], search, is_prefill)  # type: ignore[arg-type]
    assert limits == [SearchLimits(nodes, min_probability, is_chain or is_prefill)] * 2
    assert draft.parents == ((), (-1,)) and draft.probability == ((), (0.5,)) and len(trees) == 2
