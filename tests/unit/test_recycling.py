"""Token Recycling: the table, the trees grown from it, and what a session reads from the target."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specgen import AdaptiveDepth, CombinedCandidates, DraftTree, FixedDepth, RecyclingCandidates
from hf_specgen.candidates.base import vocabulary_size
from hf_specgen.candidates.best_first import SearchLimits
from hf_specgen.candidates.recycling import (
    CANDIDATES_PER_TOKEN,
    FRACTION_AFTER_RECYCLED,
    RECYCLED_FRACTION,
    RecyclingTable,
)
from hf_specgen.depth import CostCurve, LatencyModel
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
    """A table with rows for two thirds of its tokens, of which two are not full."""
    generator, table = np.random.default_rng(seed), RecyclingTable(vocab_size)
    known = generator.permutation(vocab_size)[: 2 * vocab_size // 3]
    candidates = np.array([generator.permutation(vocab_size)[:CANDIDATES_PER_TOKEN] for _ in known])
    probabilities = -np.sort(-generator.dirichlet(np.ones(CANDIDATES_PER_TOKEN), len(known)), axis=1)
    table.update(TopTokens(known, candidates, probabilities))
    table.update(TopTokens(known[:2], candidates[:2, :3], probabilities[:2, :3]))
    return table


# What the target expected


def test_top_tokens_of_a_step_are_those_of_every_node_of_active_rows() -> None:
    """Would catch: padding or inactive rows, the candidate tokens of another node, probabilities of other tokens."""
    torch.manual_seed(0)
    tree = DraftTree.from_nodes([([5, 6, 7], (-1, -1, 0)), ([8], (-1,)), ([9], (-1,))])
    logits = torch.randn(3, 4, 20, dtype=torch.bfloat16)
    top = TopTokens.of_step(logits, tree, [1, 2, 3], [True, False, True], count=4)
    places = [(0, 0), (0, 1), (0, 2), (0, 3), (2, 0), (2, 1)]
    assert top.tokens.tolist() == [1, 5, 6, 7, 3, 9]
    for (row, node), candidates, probabilities in zip(places, top.candidate_tokens, top.probabilities, strict=True):
        expected = logits[row, node].float().sort(descending=True).values[:4]
        assert torch.equal(logits[row, node].float()[candidates], expected)
        assert np.allclose(probabilities, expected.softmax(dim=-1).numpy(), atol=1e-6)


# The table


def test_update_of_a_token_read_twice_keeps_the_last() -> None:
    """Would catch: candidate tokens of an earlier position that replace those of the later one."""
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
    for candidate, value in zip(*table.row(token), strict=True):
        if len(path) < depth:
            above = probability * (FRACTION_AFTER_RECYCLED if path else RECYCLED_FRACTION) * value
            nodes[(*path, candidate)] = above
            nodes.update(enumerate_nodes(table, candidate, depth, above, (*path, candidate)))
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
    """Would catch: candidate tokens looked up for tokens that the table of an earlier call does not have."""
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
