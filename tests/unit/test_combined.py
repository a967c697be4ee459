"""Combinations: the merged tree against a slow reference, and which members draft in a step."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specgen import AdaptiveDepth, Candidates, CombinedCandidates, DraftTree, FixedDepth, RecyclingCandidates
from hf_specgen.candidates.base import DraftCall, DraftSession
from hf_specgen.candidates.combined import UNPROPOSED, _RowSearch, union
from hf_specgen.candidates.tree_search import SearchLimits, best_first
from hf_specgen.depth import CostCurve, LatencyModel
from hf_specgen.verification import VerificationResult
from tests.helpers import assert_same_tokens, prompts, tiny_model
from tests.helpers.calls import make_call, make_state

Path = tuple[int, ...]
tries = st.dictionaries(
    st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple), st.floats(0.05, 0.95), max_size=5
)


def draft_of(acceptance: dict[Path, float]) -> tuple[DraftTree, dict[Path, float]]:
    """A draft with these paths and all their beginnings, and the acceptance of the last token of each."""
    paths = sorted({path[:end] for path in acceptance for end in range(1, len(path) + 1)}, key=lambda p: (len(p), p))
    known = {path: acceptance.get(path, 0.5) for path in paths}
    probability = {path: _product(known, path) for path in paths}
    parents = tuple(paths.index(path[:-1]) if len(path) > 1 else -1 for path in paths)
    tree = DraftTree.from_nodes([([path[-1] for path in paths], parents)], (tuple(probability.values()),))
    return tree, known


def _product(acceptance: dict[Path, float], path: Path) -> float:
    result = 1.0
    for end in range(1, len(path) + 1):
        result *= acceptance[path[:end]]
    return result


def reference(copied: Sequence[dict[Path, float]], network: dict[Path, float]) -> dict[Path, float]:
    """The path probability of every node that somebody proposes."""
    paths = {path for draft in [*copied, network] for path in draft}
    found: dict[Path, float] = {(): 1.0}
    for path in sorted(paths, key=len):
        siblings = {other for other in paths if other[:-1] == path[:-1]}
        has_network = any(other in network for other in siblings)
        acceptance = {}
        for other in siblings:
            rejected = 1.0
            for draft in copied:
                rejected *= 1 - draft.get(other, 0.0)
            acceptance[other] = (1 - rejected) * (UNPROPOSED if has_network else 1.0)
            if other in network:
                acceptance[other] = 1 - rejected * (1 - network[other])
        scale = max(1.0, sum(acceptance.values()))
        found[path] = found[path[:-1]] * acceptance[path] / scale
    del found[()]
    return found


@settings(max_examples=80, deadline=None)
@given(tries, tries, tries, st.integers(1, 8))
def test_merged_tree_has_the_most_probable_nodes_of_all_drafts(
    first: dict[Path, float], second: dict[Path, float], third: dict[Path, float], nodes: int
) -> None:
    """Would catch: a path of one draft continued in another's, a network's estimate mixed with that of copied text."""
    drafts, known = zip(*map(draft_of, (first, second, third)), strict=True)
    search = _RowSearch(drafts, first_network=2, row=0, last_token=0, recycling=None)
    tree = best_first(search.root, search.children, 3, SearchLimits(nodes))
    expected = reference(known[:2], known[2])
    paths: list[Path] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert tree.probability == pytest.approx([expected[path] for path in paths])
    assert tree.probability == pytest.approx(sorted(expected.values(), reverse=True)[:nodes])


def test_drafts_without_estimates_and_with_zeros_are_merged() -> None:
    """Would catch: a division by zero; tokens of a strategy that estimates nothing taken for certain."""
    unknown = DraftTree.chains([[5, 6]])
    zeros = DraftTree.from_nodes([([7, 8], (-1, 0))], ((0.0, 0.0),))
    search = _RowSearch([unknown, zeros], first_network=2, row=0, last_token=0, recycling=None)
    tree = best_first(search.root, search.children, 9, SearchLimits(9))
    assert (tree.tokens, tree.parents) == ([5, 6], [-1, 0])
    assert tree.probability == pytest.approx([0.6, 0.36])


@settings(max_examples=80, deadline=None)
@given(tries, tries)
def test_union_has_exactly_the_paths_of_both_drafts_and_q_of_the_drawn_ones(
    copied: dict[Path, float], drawn: dict[Path, float]
) -> None:
    """Would catch: a path lost or present twice, q of another node, drawn siblings before copied ones."""
    (first, known), (second, others) = draft_of(copied), draft_of(drawn)
    q = torch.rand(1, second.nodes, 4)
    merged = union(first, DraftTree(second.token_lists(), second.parents, q))
    paths: list[Path] = []
    for token, parent in zip(merged.token_lists()[0], merged.parents[0], strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert sorted(paths) == sorted({*known, *others}) and paths[: len(known)] == [*known]
    assert merged.q is not None
    for node, path in enumerate(paths):
        expected = torch.zeros(4) if path in known else q[0, [*others].index(path)]
        assert torch.equal(merged.q[0, node], expected)


class Scripted(Candidates):
    """Drafts a chain whose tokens are all accepted with this probability, and records what it is called with."""

    def __init__(self, tokens: list[int], acceptance: float, is_network: bool):
        super().__init__(16)
        self.tokens, self.acceptance, self.negligible_draft_cost = tokens, acceptance, not is_network
        self.depths: list[int] = []
        self.observed: list[Any] = []

    def start(self, call: DraftCall) -> DraftSession:
        return _ScriptedSession(self, call)


class _ScriptedSession(DraftSession):
    def __init__(self, settings: Scripted, call: DraftCall):
        super().__init__(call)
        self._settings = settings

    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        self._settings.depths.append(max_depths[0])
        tokens = self._settings.tokens[: max_depths[0]]
        probability = tuple(self._settings.acceptance ** (depth + 1) for depth in range(len(tokens)))
        return DraftTree.from_nodes([(tokens, tuple(range(-1, len(tokens) - 1)))], (probability,))

    def observe(self, result: VerificationResult) -> None:
        self._settings.observed.append(result.paths[0])


@pytest.mark.parametrize(("acceptance", "drafts"), [(0.95, False), (0.5, True)])
def test_network_is_left_out_where_many_tokens_are_expected_without_it(acceptance: float, drafts: bool) -> None:
    """Would catch: a network that drafts beside long copied text; one that is not told that it has no draft."""
    copied = Scripted(list(range(1, 17)), acceptance, is_network=False)
    network = Scripted([40, 41], 0.9, is_network=True)
    session = CombinedCandidates([network, copied], tree=32).start(make_call(make_state([[1, 2, 3]])))
    tree = session.draft([16])
    assert network.depths == [16 if drafts else 0]
    assert (40 in tree.tokens[0].tolist()) == drafts and 1 in tree.tokens[0].tolist()
    session.observe(VerificationResult([[0]], [[int(tree.tokens[0, 0]), 9]], [1]))
    assert network.observed == [[0]] if drafts else network.observed == [[]]
    session.draft([0])
    assert network.depths[-1] == copied.depths[-1] == 0


FREE_TOKENS = LatencyModel.from_curves(CostCurve((1, 257), (0.010, 0.0101), context=256, batch=1))


@pytest.mark.parametrize(
    ("tree", "policy"),
    [("auto", FixedDepth(3)), (None, None), (8, FixedDepth(3)), ("auto", AdaptiveDepth(FREE_TOKENS))],
    ids=str,
)
def test_recycling_alone_drafts_with_any_size(tree: Any, policy: Any) -> None:
    """Would catch: Token Recycling waiting to extend a tree that is not extended without a latency model."""
    candidates = CombinedCandidates([RecyclingCandidates(k=3)], tree=tree, policy=policy)
    model = tiny_model("llama")
    drafted = sum(assert_same_tokens(model, prompts(2), candidates, max_new_tokens=24).drafted for _ in range(2))
    assert drafted > 0
