"""Token Recycling: the table, the trees grown from it, and what a session reads from the target."""

import copy
from collections.abc import Sequence
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specgen import AdaptiveDepth, Candidates, CombinedCandidates, DraftTree, FixedDepth, RecyclingCandidates
from hf_specgen.candidates.base import DraftSession, vocabulary_size
from hf_specgen.candidates.best_first import SearchLimits, best_first
from hf_specgen.candidates.combined import UNPROPOSED, _Origin, merged_children
from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.candidates.recycling import RECYCLED_FRACTION, SUCCESSORS, RecyclingTable
from hf_specgen.depth import CostCurve, LatencyModel
from hf_specgen.verification import VerificationResult
from hf_specgen.verification.result import TopTokens
from tests.helpers import assert_same_tokens, fresh_model, prompts, tiny_model
from tests.helpers.calls import make_batch, make_state
from tests.helpers.reference import node_paths


def top_tokens(rows: dict[int, list[int]]) -> TopTokens:
    """What the target expected after some tokens; the first is the most probable."""
    count = max(map(len, rows.values()))
    probabilities = np.tile(0.6 ** np.arange(1, count + 1), (len(rows), 1))
    return TopTokens(np.array(list(rows)), np.array(list(rows.values())), probabilities)


def random_table(seed: int, vocab_size: int = 12) -> RecyclingTable:
    """A table that knows the successors of two thirds of its tokens, few of some of them."""
    generator, table = np.random.default_rng(seed), RecyclingTable(vocab_size)
    known = generator.permutation(vocab_size)[: 2 * vocab_size // 3]
    successors = np.array([generator.permutation(vocab_size)[:SUCCESSORS] for _ in known])
    probabilities = -np.sort(-generator.dirichlet(np.ones(SUCCESSORS), len(known)), axis=1)
    table.update(TopTokens(known, successors, probabilities))
    table.update(TopTokens(known[:2], successors[:2, :3], probabilities[:2, :3]))
    return table


# What the target expected


def test_top_tokens_of_a_step_are_those_of_every_node_of_active_rows() -> None:
    """Would catch: padding or inactive rows, the successors of another node, probabilities of other tokens."""
    torch.manual_seed(0)
    tree = DraftTree.from_nodes([([5, 6, 7], (-1, -1, 0)), ([8], (-1,)), ([9], (-1,))])
    logits = torch.randn(3, 4, 20, dtype=torch.bfloat16)
    top = TopTokens.of_step(logits, tree, [1, 2, 3], [True, False, True], count=4)
    places = [(0, 0), (0, 1), (0, 2), (0, 3), (2, 0), (2, 1)]
    assert top.tokens.tolist() == [1, 5, 6, 7, 3, 9]
    for (row, node), successors, probabilities in zip(places, top.successors, top.probabilities, strict=True):
        expected = logits[row, node].float().sort(descending=True).values[:4]
        assert torch.equal(logits[row, node].float()[successors], expected)
        assert np.allclose(probabilities, expected.softmax(dim=-1).numpy(), atol=1e-6)


# The table


def test_update_of_a_token_read_twice_keeps_the_last() -> None:
    """Would catch: successors of an earlier position that replace those of the later one."""
    table = RecyclingTable(20)
    table.update(top_tokens({3: [7, 8]}))
    table.update(TopTokens(np.array([3, 3]), np.array([[1, 2], [4, 5]]), np.full((2, 2), 0.3)))
    assert table.row(3)[0] == [4, 5]


# Trees


def enumerate_nodes(
    table: RecyclingTable, token: int, depth: int, probability: float = 1.0, path: tuple[int, ...] = ()
) -> dict[tuple[int, ...], float]:
    """Every path by the table, with its path probability."""
    nodes: dict[tuple[int, ...], float] = {}
    for successor, value in zip(*table.row(token), strict=True):
        if len(path) < depth:
            above = probability * RECYCLED_FRACTION * value
            nodes[(*path, successor)] = above
            nodes.update(enumerate_nodes(table, successor, depth, above, (*path, successor)))
    return nodes


@given(st.integers(0, 100), st.integers(0, 3), st.integers(0, 40))
def test_search_agrees_with_the_reference(seed: int, depth: int, count: int) -> None:
    """Would catch: a node that is not among the most probable, a sibling lost, empty places drafted as token -1."""
    session: Any = RecyclingCandidates().start(make_batch(make_state([[1, 3]]), model=tiny_model("llama")))
    session._table = table = random_table(seed)
    tree = session.search(0, depth, SearchLimits(count))
    expected = enumerate_nodes(table, 3, depth)
    paths = node_paths(tree.tokens, tree.parents)
    assert tree.probability == pytest.approx([expected[path] for path in paths])
    assert len(set(paths)) == len(paths)
    assert tree.probability == pytest.approx(sorted(expected.values(), reverse=True)[:count])


# The strategy


def test_recycling_accepts_tokens_in_later_calls() -> None:
    """Would catch: a table that is not kept from call to call: the second call repeats the text of the first."""
    model, candidates = copy.deepcopy(tiny_model("llama")), RecyclingCandidates(k=4, tree=16)
    accepted = [assert_same_tokens(model, prompts(1), candidates, max_new_tokens=12).accepted for _ in range(2)]
    assert accepted[1] > accepted[0]


def test_recycling_of_a_target_whose_vocabulary_was_resized_starts_anew() -> None:
    """Would catch: successors looked up for tokens that the table of an earlier call does not have."""
    model, candidates = fresh_model("llama"), RecyclingCandidates(k=4, tree=16)
    size = vocabulary_size(model)
    for vocab_size in (size, size + 8):
        model.resize_token_embeddings(vocab_size)
        ids = torch.tensor([[5, vocab_size - 1]])
        ours = model.generate(ids, max_new_tokens=20, candidate_generator=candidates)
        assert torch.equal(ours, model.generate(ids, max_new_tokens=20)) and candidates.speculation.drafted > 0


def test_recycling_without_memory_drafts_alike_in_equal_calls() -> None:
    """Would catch: `memory=False` that still drafts from the table of earlier calls."""
    model, candidates = copy.deepcopy(tiny_model("llama")), RecyclingCandidates(k=4, tree=16)
    accepted = []
    for _ in range(2):
        model.generate(**prompts(1), max_new_tokens=30, candidate_generator=candidates, memory=False)
        accepted.append(candidates.speculation.accepted)
    assert accepted[0] == accepted[1]


def test_recycling_rejection_sampling_does_not_depend_on_earlier_calls() -> None:
    """Would catch: a table of an earlier call used where the text depends on the draft."""
    model, candidates = tiny_model("llama"), RecyclingCandidates(k=4, tree=8)
    texts = []
    for _ in range(2):
        torch.manual_seed(3)
        arguments = {"max_new_tokens": 20, "do_sample": True, "verification": "rejection"}
        texts.append(model.generate(**prompts(2), candidate_generator=candidates, **arguments).tolist())
    assert texts[0] == texts[1]


# Combinations: the merged tree against a slow reference, and which members draft in a step

Path = tuple[int, ...]
some_paths = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)
tries = st.dictionaries(some_paths, st.floats(0.05, 0.95), max_size=5)


def draft_of(acceptance: dict[Path, float]) -> tuple[DraftTree, dict[Path, float]]:
    """A draft with these paths and all their beginnings, and the acceptance of the last token of each."""
    paths = sorted({path[:end] for path in acceptance for end in range(1, len(path) + 1)}, key=lambda p: (len(p), p))
    known = {path: acceptance.get(path, 0.5) for path in paths}
    probability = {path: prod(known[path[:end]] for end in range(1, len(path) + 1)) for path in paths}
    parents = tuple(paths.index(path[:-1]) if len(path) > 1 else -1 for path in paths)
    tree = DraftTree.from_nodes([([path[-1] for path in paths], parents)], (tuple(probability.values()),))
    return tree, known


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


@given(tries, tries, tries, st.integers(1, 8))
def test_merged_tree_has_the_most_probable_nodes_of_all_drafts(
    first: dict[Path, float], second: dict[Path, float], third: dict[Path, float], nodes: int
) -> None:
    """Would catch: a path of one draft continued in another's, a network's estimate mixed with that of copied text."""
    drafts, known = zip(*map(draft_of, (first, second, third)), strict=True)
    children = merged_children(drafts, first_network=2, row=0, recycling=None)
    tree = best_first(_Origin(0, dict.fromkeys(range(3), -1)), children, 3, SearchLimits(nodes))
    expected = reference(known[:2], known[2])
    paths = node_paths(tree.tokens, tree.parents)
    assert tree.probability == pytest.approx([expected[path] for path in paths])
    assert tree.probability == pytest.approx(sorted(expected.values(), reverse=True)[:nodes])


def test_drafts_without_estimates_and_with_zeros_are_merged() -> None:
    """Would catch: a division by zero; tokens of a strategy that estimates nothing taken for certain."""
    unknown = DraftTree.chains([[5, 6]])
    zeros = DraftTree.from_nodes([([7, 8], (-1, 0))], ((0.0, 0.0),))
    children = merged_children([unknown, zeros], first_network=2, row=0, recycling=None)
    tree = best_first(_Origin(0, {0: -1, 1: -1}), children, 9, SearchLimits(9))
    assert (tree.tokens, tree.parents) == ([5, 6], [-1, 0])
    assert tree.probability == pytest.approx([0.6, 0.36])


class Scripted(Candidates):
    """Drafts a chain whose tokens are all accepted with this probability, and records what it is called with."""

    def __init__(self, tokens: list[int], acceptance: float, is_network: bool):
        super().__init__(16)
        self.tokens, self.acceptance, self.negligible_draft_cost = tokens, acceptance, not is_network
        self.depths: list[int] = []
        self.observed: list[Any] = []

    def start(self, batch: DraftBatch) -> DraftSession:
        return _ScriptedSession(self, batch)


class _ScriptedSession(DraftSession):
    def __init__(self, settings: Scripted, batch: DraftBatch):
        super().__init__(batch)
        self._settings = settings

    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        self._settings.depths.append(max_depths[0])
        tokens = self._settings.tokens[: max_depths[0]]
        probability = tuple(self._settings.acceptance ** (depth + 1) for depth in range(len(tokens)))
        return DraftTree.from_nodes([(tokens, tuple(range(-1, len(tokens) - 1)))], (probability,))

    def observe(self, result: VerificationResult) -> None:
        self._settings.observed.append(result.paths[0])


@pytest.mark.parametrize(
    ("acceptance", "drafts", "samples"),
    [(0.95, False, False), (0.95, False, True), (0.5, True, False), (0.5, True, True)],
)
def test_network_is_left_out_where_many_tokens_are_expected_without_it(
    acceptance: float, drafts: bool, samples: bool
) -> None:
    """Would catch: a network that drafts beside long copied text, copied text beside nodes that were drawn."""
    copied = Scripted(list(range(1, 17)), acceptance, is_network=False)
    network = Scripted([40, 41], 0.9, is_network=True)
    batch = make_batch(make_state([[1, 2, 3]]), verification=SimpleNamespace(wants_q=samples))
    session = CombinedCandidates([network, copied], tree=32).start(batch)
    tree = session.draft([16])
    assert network.depths == [16 if drafts else 0]
    assert (40 in tree.tokens[0].tolist()) == drafts and (1 in tree.tokens[0].tolist()) == (not drafts or not samples)
    session.observe(VerificationResult([[0]], [[int(tree.tokens[0, 0]), 9]], [1]))
    assert network.observed == [[0]] if drafts else network.observed == [[]]
    session.draft([0])
    assert network.depths[-1] == copied.depths[-1] == 0


FREE_TOKENS = LatencyModel.from_curves(CostCurve((1, 257), (0.010, 0.0101), context=256, batch=1))


@pytest.mark.parametrize(
    ("tree", "policy"),
    [
        ("auto", FixedDepth(3)),
        (None, AdaptiveDepth(FREE_TOKENS)),
        (8, FixedDepth(3)),
        ("auto", AdaptiveDepth(FREE_TOKENS)),
    ],
    ids=str,
)
def test_recycling_alone_drafts_with_any_size(tree: Any, policy: Any) -> None:
    """Would catch: Token Recycling waiting to extend a tree that is not extended without a latency model."""
    candidates = CombinedCandidates([RecyclingCandidates(k=3)], tree=tree, policy=policy)
    model = tiny_model("llama")
    drafted = sum(assert_same_tokens(model, prompts(2), candidates, max_new_tokens=24).drafted for _ in range(2))
    assert drafted > 0
