"""The n-gram index, against loops over the whole text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specgen.candidates import ngram_index as module
from hf_specgen.candidates import ngram_match
from hf_specgen.candidates.ngram_index import SEPARATOR, NgramIndex
from hf_specgen.candidates.ngram_match import MAX_MATCH_LENGTH
from tests.helpers import reference

thorough = settings(max_examples=300, deadline=None, derandomize=True)
texts = st.lists(st.sampled_from([0, 1, 2**30]), max_size=40)  # few tokens: matches of every length, many of each
ALL = 10**6


def index_of(tokens: list[int], max_tokens: int | None = None) -> NgramIndex:
    """An index that contains a text."""
    index = NgramIndex(max_tokens)
    index.extend(tokens)
    return index


@thorough
@given(st.lists(texts, max_size=6), texts, st.integers(1, 30), st.integers(2, 20))
def test_occurrences_in_a_growing_text_agree_with_the_reference(
    parts: list[list[int]], other: list[int], bulk: int, capacity: int
) -> None:
    """Would catch: an occurrence missed, one too short, n-grams lost where the arrays grow or where a piece that numpy
    indexed meets one that was indexed token by token, and match lengths carried on wrongly.

    Separators follow some of the pieces.
    """
    tokens: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MIN_BULK_TOKENS", bulk)
        patch.setattr(module, "INITIAL_CAPACITY", capacity)
        index, known = NgramIndex(), {}
        for number, part in enumerate(parts):
            part = [*part, SEPARATOR] if number % 2 else part
            index.extend(part)
            tokens += part
            tail = tokens[-MAX_MATCH_LENGTH:]
            found = index.occurrences(tail, ALL, known, len(part))
            assert found == reference.ngram_occurrences(tokens, tail, len(tokens))
            assert list(index.repetitions(ALL, known, len(part)).items()) == list(found.items())
            known = found
    assert list(index.tokens[: index.end]) == tokens
    assert index.occurrences(other, ALL) == reference.ngram_occurrences(tokens, other, len(tokens))


@thorough
@given(st.lists(texts, max_size=8), texts, st.integers(1, 30), st.integers(1, 30))
def test_occurrences_in_a_bounded_text_agree_with_the_reference(
    parts: list[list[int]], tail: list[int], max_tokens: int, bulk: int
) -> None:
    """Would catch: a match with overwritten tokens, or one across the place of the next token."""
    ring: list[int] = []
    end = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MIN_BULK_TOKENS", bulk)
        index = NgramIndex(max_tokens)
        for part in parts:
            index.extend(part)
            for token in part:
                end = 0 if end == max_tokens else end
                ring[end : end + 1] = [token]
                end += 1
    assert (index.end, list(index.tokens[: len(ring)])) == (end, ring)
    is_full = len(ring) == max_tokens
    assert index.occurrences(tail, ALL) == reference.ngram_occurrences(ring, tail, end, is_full)


def test_occurrences_collision_of_hashes_is_no_match(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: comparison by hash alone. With powers of 1 the hash is a sum: (1, 4) looks like (2, 3)."""
    monkeypatch.setattr(module, "POWERS", (1,) * 8)
    monkeypatch.setattr(module, "OFFSETS", tuple((order - 1, 2 * order) for order in module.ORDERS))
    index = index_of([2, 3, 7, 1, 9, 9])
    assert index.occurrences([1, 4], ALL) == {}
    assert index.occurrences([8, 2, 3], ALL) == {2: 2}


def test_occurrences_beyond_the_limit_are_the_most_recent_of_the_longest_ngrams() -> None:
    """Would catch: recent short matches before an old long one; of 4 tokens there is one, of 2 there are many."""
    text = [7, 5, 6, 5, *[5] * 9, 9]
    assert list(index_of(text).occurrences([7, 5, 6, 5], limit=3)) == [4, 13, 12]


def executed_lines(function: Callable[[], Any]) -> int:
    """How many lines of the index's modules a call executes: a cost that does not depend on the machine."""
    lines, files = 0, (module.__file__, ngram_match.__file__)

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename not in files:
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
def test_occurrences_cost_does_not_grow_with_the_text(period: int) -> None:
    """Would catch: a lookup that visits every occurrence, where everything matches."""
    costs = []
    for repeats in (100, 4000):
        index = index_of([*range(5, 5 + period)] * repeats)
        tail = list(index.tokens[: index.end])[-MAX_MATCH_LENGTH:]
        costs.append(executed_lines(lambda index=index, tail=tail: index.occurrences(tail, limit=8)))
    assert costs[0] == costs[1] > 0


@pytest.mark.parametrize("limit", [1, 3, 8])
@pytest.mark.parametrize("period", [1, 2, 5, 300])
def test_repetitions_are_the_occurrences_of_the_end(period: int, limit: int) -> None:
    """Would catch: other occurrences where the limit leaves out some, or another order."""
    index = index_of([*range(period), 7] * 40 + [*range(period)])
    tail = list(index.tokens[: index.end])
    assert list(index.repetitions(limit).items()) == list(index.occurrences(tail, limit).items())


@pytest.mark.parametrize("max_tokens", [None, 50_000])
def test_extend_cost_does_not_grow_with_the_text(max_tokens: int | None) -> None:
    """Would catch: a bounded text that is rebuilt when it is full, or chains that are walked when a token is added."""
    index, costs = NgramIndex(max_tokens), []
    for length in (1_000, 49_990, 120_000):
        index.extend([7] * (length - 500))
        costs.append(executed_lines(lambda: index.extend([7] * 30)))
    assert max(costs) <= costs[0] + 10


def test_nbytes_of_a_bounded_text_are_36_a_token() -> None:
    assert index_of([1, 2, 3], max_tokens=1000).nbytes == 36_000
