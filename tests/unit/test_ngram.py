"""The n-gram index and the drafts made from it, against quadratic loops over the whole text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specgen import NgramCandidates, NgramHistory
from hf_specgen.candidates import ngram_index as module
from hf_specgen.candidates.ngram_index import SEPARATOR, NgramIndex
from hf_specgen.state import GenerationState
from tests.helpers import reference
from tests.helpers.calls import AMPLE, make_call, make_state
from tests.helpers.ngram import ngram_draft

thorough = settings(max_examples=200, deadline=None, derandomize=True)
# Few different tokens: matches of every length, and many of each. 2^31 is beyond any vocabulary, 0 a common pad id.
texts = st.lists(st.sampled_from([0, 1, 2**31]), max_size=40)


def index_of(tokens: list[int], max_ngram: int) -> NgramIndex:
    """An index that contains a text."""
    index = NgramIndex(max_ngram)
    index.extend(tokens)
    return index


# The index


@thorough
@given(texts, st.integers(1, 6), st.integers(1, 3), st.integers(1, 5))
def test_matches_of_own_text_agree_with_the_reference(
    tokens: list[int], max_ngram: int, min_ngram: int, limit: int
) -> None:
    """Would catch: an occurrence missed, given twice or too short, older ones before recent ones, one too many."""
    found = list(index_of(tokens, max_ngram).matches(tokens, min_ngram, limit))
    assert found == reference.ngram_matches(tokens, tokens, min_ngram, max_ngram, limit)


@thorough
@given(texts, texts, st.integers(1, 6), st.integers(1, 5))
def test_matches_of_another_text_agree_with_the_reference(
    tokens: list[int], text: list[int], max_ngram: int, limit: int
) -> None:
    """Would catch: a match without a following token, or one read from the text that is looked for."""
    found = list(index_of(tokens, max_ngram).matches(text, 1, limit))
    assert found == reference.ngram_matches(tokens, text, 1, max_ngram, limit)


@thorough
@given(st.lists(texts, max_size=6), texts, st.integers(1, 5), st.integers(1, 30))
def test_extend_in_pieces_agrees_with_the_reference(
    parts: list[list[int]], text: list[int], max_ngram: int, bulk: int
) -> None:
    """Would catch: n-grams lost or linked wrongly where a piece indexed in bulk meets one indexed token by token.

    Pieces of at least `bulk` tokens are indexed by numpy, the others are not; separators follow some of them.
    """
    index = NgramIndex(max_ngram)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BULK", bulk)
        for number, part in enumerate(parts):
            index.extend([*part, SEPARATOR] if number % 2 else part)
    tokens = [token for number, part in enumerate(parts) for token in (*part, *([SEPARATOR] if number % 2 else []))]
    assert list(index.tokens) == tokens
    for wanted in (text, tokens):
        expected = reference.ngram_matches(tokens, wanted, 1, max_ngram, limit=AMPLE)
        assert list(index.matches(wanted, 1, limit=1000)) == expected


def test_matches_equal_hash_of_other_tokens_is_no_match(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: comparison by hash alone. With a multiplier of 1 the hash is a sum: (1, 4) looks like (2, 3)."""
    monkeypatch.setattr(module, "MULTIPLIER", 1)
    index = index_of([2, 3, 7, 1, 4], 2)
    assert list(index.matches([1, 4], min_ngram=2, limit=8)) == []
    assert list(index.matches([9, 2, 3], min_ngram=2, limit=8)) == [(2, 2)]


def test_matches_beyond_the_limit_keeps_the_most_recent() -> None:
    assert list(index_of([5] * 50, 1).matches([5], 1, limit=3)) == [(1, 49), (1, 48), (1, 47)]


def executed_lines(function: Callable[[], Any]) -> int:
    """How many lines of the index module a call executes: a cost that does not depend on the machine."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != module.__file__:
            return None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("period", [1, 2, 41])
def test_matches_cost_does_not_grow_with_the_text(period: int) -> None:
    """Would catch: a lookup that visits every occurrence, where everything matches."""
    costs = []
    for repeats in (20, 2000):
        index = index_of([*range(5, 5 + period)] * repeats, 4)
        text = index.tokens[-period:]
        costs.append(executed_lines(lambda index=index, text=text: list(index.matches(text, 1, limit=8))))
    assert costs[0] == costs[1] > 0


# Drafts


@thorough
@given(texts, st.lists(texts, max_size=3), st.integers(1, 9), st.integers(1, 2), st.integers(2, 5), st.integers(1, 4))
def test_draft_agrees_with_the_reference(
    text: list[int], past: list[list[int]], k: int, min_ngram: int, max_ngram: int, branches: int
) -> None:
    """Would catch: a wrong occurrence (length, own text first, votes, recency), followed too far or not far enough, a
    duplicate branch, a match or a copy across a separator."""
    history = NgramHistory(max_ngram=max_ngram)
    for old in past:
        history.add(old)
    past_tokens = [token for old in past for token in (*old, SEPARATOR)]
    candidates = NgramCandidates(k, min_ngram=min_ngram, max_ngram=max_ngram, branches=branches, history=history)
    paths = reference.ngram_paths(text, past_tokens, k, min_ngram, max_ngram, branches)
    assert ngram_draft(candidates, text) == reference.merge_paths(paths)


@thorough
@given(texts.filter(len), st.lists(texts, min_size=2, max_size=4), st.integers(1, 2))
def test_draft_of_growing_text_equals_that_of_a_new_session(
    prompt: list[int], steps: list[list[int]], branches: int
) -> None:
    """Would catch: generated tokens indexed twice or not at all after steps without a draft (budget 0)."""
    candidates = NgramCandidates(k=4, branches=branches)
    state = make_state([prompt, [1]])
    session = candidates.start(make_call(state, candidates=candidates))
    for number, step in enumerate(steps):
        state.append(0, step)
        tree = session.draft([0 if number % 2 else AMPLE, 0])
        nodes = len(tree.parents[0])
        expected = ([], ()) if number % 2 else ngram_draft(candidates, prompt + state.generated[0])
        assert (tree.tokens[0, :nodes].tolist(), tree.parents[0]) == expected
        assert tree.parents[1] == ()


@pytest.mark.parametrize(("k", "text", "expected"), [(7, [1, 2, 3] * 4, [1, 2, 3, 1, 2, 3, 1]), (5, [4] * 9, [4] * 5)])
def test_draft_of_periodic_text_continues_past_its_end(k: int, text: list[int], expected: list[int]) -> None:
    """Would catch: a draft that ends where the text ends, although the text repeats itself."""
    assert ngram_draft(NgramCandidates(k=k), text) == (expected, tuple(range(-1, k - 1)))


@pytest.mark.parametrize(
    ("branches", "expected"),
    [(1, ([6, 1], (-1, 0))), (2, ([6, 1, 7], (-1, 0, 0))), (4, ([6, 1, 7, 8, 9], (-1, 0, 0, -1, 3)))],
)
def test_draft_branches_are_distinct(branches: int, expected: tuple) -> None:
    """Would catch: the same continuation verified twice, or a branch lost.

    5 was followed by 6 7 (twice), 8 9, and 6 1. The longest match (6 7 5) is followed by 6 1, so it comes first; most
    other matches are followed by 6 7.
    """
    text = [5, 6, 7, 5, 6, 1, 5, 8, 9, 5, 6, 7, 5]
    assert ngram_draft(NgramCandidates(k=2, branches=branches), text) == expected


def test_draft_of_equally_long_matches_follows_the_majority() -> None:
    """Would catch: the most recent of equally long matches taken, although two others agree on another token."""
    assert ngram_draft(NgramCandidates(k=1), [5, 6, 5, 6, 5, 9, 5])[0] == [6]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([5, 1, 2, 3, 4, 6, 5], [1, 2]),
        ([5, 1, 2, 3, 4, 5, 1, 2, 3, 7, 5], [1, 2, 3]),
        ([8, 5, 1, 2, 3, 4, 6, 7, 9, 8, 5], [1, 2, 3, 4, 6, 7]),
    ],
    ids=["one occurrence", "two occurrences", "longer match"],
)
def test_draft_length_depends_on_the_precision_of_the_match(text: list[int], expected: list[int]) -> None:
    """Would catch: a draft of full depth after a match of one token, which is mostly rejected.

    One matched token, one occurrence: 2 tokens. Two occurrences: as far as both agree. Two matched tokens: 4 more.
    """
    assert ngram_draft(NgramCandidates(k=9), text)[0] == expected


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("budget", [0, 1, 3, 50])
def test_draft_depth_is_limited_by_the_budget(branches: int, budget: int) -> None:
    """Would catch: nodes behind the maximum length, whose scores nobody can use."""
    _, parents = ngram_draft(NgramCandidates(k=9, branches=branches), [1, 2, 3] * 5, budget)
    assert max((reference.depth(parents, node) for node in range(len(parents))), default=0) == min(9, budget)


@pytest.mark.parametrize("text", [[5], [1, 2, 3]])
def test_draft_without_a_match_is_empty(text: list[int]) -> None:
    assert ngram_draft(NgramCandidates(), text) == ([], ())


def test_draft_of_rows_uses_their_own_texts() -> None:
    """Would catch: one index for the batch."""
    candidates = NgramCandidates(k=1)
    state = make_state([[1, 2, 8, 1, 2], [1, 2, 9, 1, 2]])
    assert candidates.start(make_call(state)).draft([1, 1]).tokens.tolist() == [[8], [9]]


# Padding


def draft_of_padded(row: list[int], mask: list[int] | None) -> list[int]:
    """The draft for a prompt as `generate` passes it."""
    attention_mask = None if mask is None else torch.tensor([mask])
    state = GenerationState(torch.tensor([row]), attention_mask, (), 100, None)
    return NgramCandidates(k=2).start(make_call(state)).draft([2]).tokens[0].tolist()


@pytest.mark.parametrize("mask", [[0, 0, 0, 1, 1, 1, 1], [1] * 7, None], ids=["padded", "full", "none"])
def test_draft_can_contain_the_pad_id_as_a_token(mask: list[int] | None) -> None:
    """Would catch: every token with the pad id removed from the prompt; here 0 really follows 5."""
    assert draft_of_padded([0, 0, 0, 5, 0, 7, 5], mask) == [0, 7]


def test_draft_never_matches_left_padding() -> None:
    """The text 3 4 0 contains no earlier 0; with its padding it would contain three."""
    padded = [0, 0, 0, 3, 4, 0]
    assert draft_of_padded(padded, [0, 0, 0, 1, 1, 1]) == []
    assert draft_of_padded(padded, None) != []
