"""The n-gram index, against loops over the whole text."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specgen.candidates import ngram_index as module
from hf_specgen.candidates.ngram_index import MAX_MATCH_LENGTH, SEPARATOR, NgramIndex
from tests.helpers import reference

thorough = settings(max_examples=300, deadline=None, derandomize=True)
texts = st.lists(st.sampled_from([0, 1, 2**30]), max_size=40)  # few tokens: matches of every length, many of each
ALL = 10**6


@thorough
@given(st.lists(texts, max_size=6), texts, st.integers(1, 30))
def test_occurrences_in_a_growing_text_agree_with_the_reference(
    parts: list[list[int]], other: list[int], batch: int
) -> None:
    """Would catch: an occurrence missed, one too short, n-grams lost where the tables grow or between two batches.

    Separators follow some of the pieces.
    """
    tokens: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_BATCH", batch)
        patch.setattr(module, "MIN_CAPACITY", 3)
        index = NgramIndex()
        for number, part in enumerate(parts):
            part = [*part, SEPARATOR] if number % 2 else part
            index.extend(part)
            tokens += part
            tail = tokens[-MAX_MATCH_LENGTH:]
            assert index.occurrences(tail, ALL) == reference.ngram_occurrences(tokens, tail)
    assert index.tokens.tolist() == tokens
    assert index.occurrences(other, ALL) == reference.ngram_occurrences(tokens, other)


def test_occurrences_collision_of_hashes_is_no_match(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: comparison by hash alone. With powers of 1 the hash is a sum: (1, 4) looks like (2, 3)."""
    monkeypatch.setattr(module, "POWERS", np.minimum(module.POWERS, 1))
    index = NgramIndex([2, 3, 7, 1, 9, 9])
    assert index.occurrences([1, 4], ALL) == {}
    assert index.occurrences([8, 2, 3], ALL) == {2: 2}


def test_occurrences_beyond_the_limit_are_the_most_recent_of_the_longest_ngrams() -> None:
    """Would catch: recent short matches before an old long one; of 4 tokens there is one, of 2 there are many."""
    text = [7, 5, 6, 5, *[5] * 9, 9]
    assert list(NgramIndex(text).occurrences([7, 5, 6, 5], limit=3)) == [4, 13, 12]


def executed_lines(function: Callable[[], Any]) -> int:
    """How many lines of the index's module a call executes: a cost that does not depend on the machine."""
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
def test_occurrences_cost_does_not_grow_with_the_text(period: int) -> None:
    """Would catch: a lookup that visits every occurrence, where everything matches."""
    costs = []
    for repeats in (100, 4000):
        index = NgramIndex([*range(5, 5 + period)] * repeats)
        tail = index.tokens[-MAX_MATCH_LENGTH:]
        costs.append(executed_lines(lambda index=index, tail=tail: index.occurrences(tail, limit=8)))
    assert costs[0] == costs[1] > 0


def test_extend_cost_does_not_grow_with_the_text() -> None:
    """Would catch: chains that are walked, or tables that are rebuilt, when a token is added."""
    index, costs = NgramIndex(), []
    for length in (1_000, 49_990, 120_000):
        index.extend([7] * (length - 500))
        costs.append(executed_lines(lambda: index.extend([7] * 30)))
    assert max(costs) <= costs[0] + 10
