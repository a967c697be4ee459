"""The n-gram index and the drafts made from it, against quadratic loops over the whole text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specgen.candidates import DraftContext, NgramCandidates, NgramHistory
from hf_specgen.candidates import ngram_index as module
from hf_specgen.candidates.ngram_index import SEPARATOR, NgramIndex
from hf_specgen.state import GenerationState
from tests import reference

thorough = settings(max_examples=200, deadline=None, derandomize=True)
# Few different tokens: matches of every length, and many of each. 2^31 is beyond any vocabulary, 0 a common pad id.
texts = st.lists(st.sampled_from([0, 1, 2**31]), max_size=40)
AMPLE = 2**31


def index_of(tokens: list[int], max_ngram: int) -> NgramIndex:
    index = NgramIndex(max_ngram)
    index.extend(tokens)
    return index


def context_of(*rows: list[int], budget: int = AMPLE) -> DraftContext:
    return DraftContext([list(row) for row in rows], [[] for _ in rows], [budget] * len(rows))


def draft(candidates: NgramCandidates, text: list[int], budget: int = AMPLE) -> tuple[list[int], tuple[int, ...]]:
    """The nodes of a one-row draft."""
    context = context_of(text, budget=budget)
    tree = candidates.bind(context, None).draft(context)
    return tree.tokens[0].tolist(), tree.parents[0]


# The index


@thorough
@given(texts, st.integers(1, 6), st.integers(1, 3), st.integers(1, 5))
def test_matches_of_its_own_end(tokens: list[int], max_ngram: int, min_ngram: int, limit: int) -> None:
    """Would catch: an occurrence missed, given twice or too short, an old one before a recent one, one too many."""
    found = list(index_of(tokens, max_ngram).matches(tokens, min_ngram, limit))
    assert found == reference.ngram_matches(tokens, tokens, min_ngram, max_ngram, limit)


@thorough
@given(texts, texts, st.integers(1, 6), st.integers(1, 5))
def test_matches_of_another_text(tokens: list[int], text: list[int], max_ngram: int, limit: int) -> None:
    """Would catch: a match that nothing follows, or one read out of the text that is looked for."""
    found = list(index_of(tokens, max_ngram).matches(text, 1, limit))
    assert found == reference.ngram_matches(tokens, text, 1, max_ngram, limit)


@thorough
@given(st.lists(texts, max_size=6), st.integers(1, 5), st.integers(1, 30))
def test_bulk_and_one_by_one_agree(parts: list[list[int]], max_ngram: int, bulk: int) -> None:
    """Would catch: n-grams lost or linked wrongly where a long piece meets a short one, in any order.

    Pieces of at least `bulk` tokens go through numpy, the others do not; separators lie between some of them.
    """
    mixed, one_by_one = NgramIndex(max_ngram), NgramIndex(max_ngram)
    with pytest.MonkeyPatch.context() as patch:
        for number, part in enumerate(parts):
            piece = [*part, SEPARATOR] if number % 2 else part
            patch.setattr(module, "BULK", bulk)
            mixed.extend(piece)
            patch.setattr(module, "BULK", AMPLE)
            one_by_one.extend(piece)
    assert mixed.tokens == one_by_one.tokens
    assert mixed._latest == one_by_one._latest
    assert mixed._earlier == one_by_one._earlier


def test_equal_hashes_are_no_match(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: trust in the hash alone. With a multiplier of 1 the hash is a sum: (1, 4) looks like (2, 3)."""
    monkeypatch.setattr(module, "MULTIPLIER", 1)
    index = index_of([2, 3, 7, 1, 4], 2)
    assert list(index.matches([1, 4], min_ngram=2, limit=8)) == []
    assert list(index.matches([9, 2, 3], min_ngram=2, limit=8)) == [(2, 2)]


def test_the_most_recent_within_the_limit() -> None:
    assert list(index_of([5] * 50, 1).matches([5], 1, limit=3)) == [(1, 49), (1, 48), (1, 47)]


class Counted:
    """Counts the reads of a dictionary or an array."""

    reads = 0

    def __init__(self, inner: Any):
        self.inner = inner

    def __getitem__(self, key: int) -> int:
        Counted.reads += 1
        return self.inner[key]

    def get(self, key: int, default: int) -> int:
        Counted.reads += 1
        return self.inner.get(key, default)


@pytest.mark.parametrize("text", [[5] * 60, [5, 6] * 300, [*range(40), 5] * 1000])
def test_lookup_cost_is_bounded_whatever_the_length(text: list[int]) -> None:
    """Would catch: a lookup that walks the whole text, where everything matches: 1 probe and `limit` steps per n."""
    index = index_of(text, 4)
    index._latest, index._earlier = [Counted(d) for d in index._latest], [Counted(a) for a in index._earlier]
    Counted.reads = 0
    assert len(list(index.matches(text, 1, limit=8))) == 8
    assert 8 <= Counted.reads <= 4 * (1 + 8)


# Drafts


@thorough
@given(texts, st.lists(texts, max_size=3), st.integers(1, 9), st.integers(1, 2), st.integers(2, 5), st.integers(1, 4))
def test_drafts(text: list[int], past: list[list[int]], k: int, min_ngram: int, max_ngram: int, branches: int) -> None:
    """Would catch: the wrong occurrence (length, own text first, votes, recency), followed too far or not far enough,
    a branch given twice, a match or a copy that reaches across a separator."""
    history = NgramHistory(max_ngram=max_ngram)
    for old in past:
        history.add(old)
    past_tokens = [token for old in past for token in (*old, SEPARATOR)]
    candidates = NgramCandidates(k, min_ngram=min_ngram, max_ngram=max_ngram, branches=branches, history=history)
    paths = reference.ngram_paths(text, past_tokens, k, min_ngram, max_ngram, branches)
    assert draft(candidates, text) == reference.merge_paths(paths)


@thorough
@given(texts, st.lists(texts, min_size=2, max_size=4), st.integers(1, 2))
def test_a_growing_text_drafts_as_if_it_were_new(prompt: list[int], steps: list[list[int]], branches: int) -> None:
    """Would catch: generated tokens entered twice or not at all, when some steps give no draft (budget 0)."""
    context = context_of(prompt, [1])
    candidates = NgramCandidates(k=4, branches=branches)
    drafter = candidates.bind(context, None)
    for number, step in enumerate(steps):
        context.generated[0] += step
        context.budget = [0 if number % 2 else AMPLE, 0]
        tree = drafter.draft(context)
        nodes = len(tree.parents[0])
        expected = ([], ()) if number % 2 else draft(candidates, prompt + context.generated[0])
        assert (tree.tokens[0, :nodes].tolist(), tree.parents[0]) == expected
        assert tree.parents[1] == ()


def test_periodic_text_runs_into_its_own_end() -> None:
    """Would catch: a draft that ends where the text ends, although the text repeats."""
    assert draft(NgramCandidates(k=7), [1, 2, 3] * 4) == ([1, 2, 3, 1, 2, 3, 1], (-1, 0, 1, 2, 3, 4, 5))
    assert draft(NgramCandidates(k=5), [4] * 9) == ([4] * 5, (-1, 0, 1, 2, 3))


def test_branches_are_distinct() -> None:
    """Would catch: verifying the same guess twice, or a branch lost. After 5 came 6 7 (twice), 8 9, and 6 1.

    That after 6 1 is the longest match (6 7 5), so it comes first; 6 7 is what most of the others say.
    """
    text = [5, 6, 7, 5, 6, 1, 5, 8, 9, 5, 6, 7, 5]
    assert draft(NgramCandidates(k=2), text) == ([6, 1], (-1, 0))
    assert draft(NgramCandidates(k=2, branches=2), text) == ([6, 1, 7], (-1, 0, 0))
    assert draft(NgramCandidates(k=2, branches=4), text) == ([6, 1, 7, 8, 9], (-1, 0, 0, -1, 3))


def test_most_matches_agree() -> None:
    """Would catch: the most recent of equally long matches taken, although two others say something else."""
    assert draft(NgramCandidates(k=1), [5, 6, 5, 6, 5, 9, 5])[0] == [6]


def test_evidence_buys_length() -> None:
    """Would catch: a draft followed to its end on the word of one matched token.

    One matched token, seen once: 2 tokens. Seen twice: as far as both agree. Two matched tokens: 4 more.
    """
    assert draft(NgramCandidates(k=9), [5, 1, 2, 3, 4, 6, 5])[0] == [1, 2]
    assert draft(NgramCandidates(k=9), [5, 1, 2, 3, 4, 5, 1, 2, 3, 7, 5])[0] == [1, 2, 3]
    assert draft(NgramCandidates(k=9), [8, 5, 1, 2, 3, 4, 6, 7, 9, 8, 5])[0] == [1, 2, 3, 4, 6, 7]


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("budget", [0, 1, 3, 50])
def test_budget_limits_the_depth(branches: int, budget: int) -> None:
    """Would catch: guesses beyond the greatest length, whose scores nobody can use."""
    _, parents = draft(NgramCandidates(k=9, branches=branches), [1, 2, 3] * 5, budget)
    assert max((reference.depth(parents, node) for node in range(len(parents))), default=0) == min(9, budget)


@pytest.mark.parametrize(("mask", "guess"), [([0, 0, 0, 1, 1, 1, 1], [0, 7]), ([1] * 7, [0, 7]), (None, [0, 7])])
def test_the_pad_id_can_be_a_real_token(mask: list[int] | None, guess: list[int]) -> None:
    """Would catch: every token with the pad's id dropped from the prompt; here 0 really follows 5."""
    assert draft(NgramCandidates(k=2), _unpadded([0, 0, 0, 5, 0, 7, 5], mask))[0] == guess


def test_left_padding_never_is_context() -> None:
    """Would catch: a match in the padding. The text 3 4 0 never had a 0 before; with padding it had three."""
    padded = [0, 0, 0, 3, 4, 0]
    assert draft(NgramCandidates(k=2), _unpadded(padded, [0, 0, 0, 1, 1, 1]))[0] == []
    assert draft(NgramCandidates(k=2), _unpadded(padded, None))[0] != []


def _unpadded(row: list[int], mask: list[int] | None) -> list[int]:
    attention_mask = None if mask is None else torch.tensor([mask])
    return GenerationState(torch.tensor([row]), attention_mask, (), 100, None).prompts[0]


@pytest.mark.parametrize("text", [[], [5], [1, 2, 3]])
def test_nothing_to_go_by(text: list[int]) -> None:
    assert draft(NgramCandidates(), text) == ([], ())


@pytest.mark.parametrize("name", ["k", "min_ngram", "branches", "max_ngram"])
def test_numbers_out_of_range_get_a_sentence(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least .* got 0"):
        NgramCandidates(**{name: 0})


def test_rows_have_texts_of_their_own() -> None:
    """Would catch: one index for the batch."""
    context = context_of([1, 2, 8, 1, 2], [1, 2, 9, 1, 2])
    tree = NgramCandidates(k=1).bind(context, None).draft(context)
    assert tree.tokens.tolist() == [[8], [9]]
