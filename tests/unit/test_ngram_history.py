"""`NgramHistory`: texts of earlier calls; and `NgramCandidates` in Transformers' own loop (`get_candidates`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specgen import Call, DraftSession, NgramCandidates, NgramHistory
from hf_specgen.candidates.ngram_index import SEPARATOR
from tests.helpers.calls import make_call, make_state
from tests.helpers.ngram import ngram_draft

thorough = settings(max_examples=100, deadline=None, derandomize=True)


def history_of(*texts: list[int], **kwargs: int) -> NgramHistory:
    """A history of some texts."""
    history = NgramHistory(**kwargs)
    for text in texts:
        history.add(text)
    return history


def test_draft_with_history_continues_a_text_of_it() -> None:
    text = [9, 1, 2]
    assert ngram_draft(NgramCandidates(k=3, history=history_of([1, 2, 3, 4, 5, 6])), text)[0] == [3, 4]
    assert ngram_draft(NgramCandidates(k=3), text)[0] == []


@pytest.mark.parametrize(
    ("past", "text", "expected"), [([8, 9, 5], [9, 6, 8, 9], 6), ([7, 8, 9, 5], [9, 6, 7, 8, 9], 5)]
)
def test_draft_prefers_own_text_unless_history_matches_two_tokens_more(
    past: list[int], text: list[int], expected: int
) -> None:
    """Would catch: a match in the history that does not count as one token shorter.

    The text's own match is 9 -> 6, of one token. The history's is 8 9 -> 5, which counts as one token: the own one is
    taken. With 7 8 9 -> 5 it counts as two.
    """
    assert ngram_draft(NgramCandidates(k=1, history=history_of(past)), text)[0] == [expected]


@pytest.mark.parametrize(
    ("text", "min_ngram", "expected"),
    [([1, 2], 1, [3]), ([2, 3], 1, []), ([3, 4], 2, [])],
    ids=["continuation", "end of text", "match across texts"],
)
def test_draft_never_crosses_a_separator(text: list[int], min_ngram: int, expected: list[int]) -> None:
    """Would catch: a draft that continues in the next text, or a match that reaches back into the one before."""
    history = history_of([1, 2, 3], [4, 5, 6])
    assert ngram_draft(NgramCandidates(k=9, min_ngram=min_ngram, history=history), text)[0] == expected


def test_history_beyond_max_tokens_drops_the_oldest_texts() -> None:
    """Would catch: a history that grows without limit, drops everything at once, or drops the newest text."""
    history = NgramHistory(max_tokens=12)
    for first in range(100, 1100, 10):
        history.add([first, first + 1, first + 2, first + 3])
        assert len(history) <= 24
    candidates = NgramCandidates(k=2, history=history)
    assert ngram_draft(candidates, [1090, 1091])[0] == [1092, 1093]
    assert ngram_draft(candidates, [1080, 1081])[0] == [1082, 1083]
    assert ngram_draft(candidates, [100, 101])[0] == []


def test_history_of_a_text_longer_than_max_tokens_keeps_its_end() -> None:
    history = history_of([*range(50)], max_tokens=10)
    assert list(history.index.tokens) == [*range(40, 50), SEPARATOR]


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_history_without_tokens_raises(max_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"max_tokens must be at least 1, got {max_tokens}"):
        NgramHistory(max_tokens)


def test_session_end_adds_prompt_and_output_of_every_row() -> None:
    """Would catch: only the prompts added, or rows of a batch joined to one text."""
    history = NgramHistory()
    state = make_state([[1, 2], [3]])
    session = NgramCandidates(history=history).start(make_call(state))
    state.append(0, [7, 8])
    assert len(history) == 0
    session.end()
    assert list(history.index.tokens) == [1, 2, 7, 8, SEPARATOR, 3, SEPARATOR]


def test_add_texts_tokenizes_each_text_without_special_tokens(tokenizer: Any) -> None:
    history = NgramHistory()
    lines = ["The keeper of the lighthouse wrote a letter.", "Nobody answered for eleven years."]
    history.add_texts(lines, tokenizer)
    ids = [tokenizer(line, add_special_tokens=False)["input_ids"] for line in lines]
    assert list(history.index.tokens) == [*ids[0], SEPARATOR, *ids[1], SEPARATOR]
    assert ngram_draft(NgramCandidates(k=4, history=history), ids[1][:3])[0] == ids[1][3:7]


# Transformers' interface


class CountingCandidates(NgramCandidates):
    """Counts the sessions that are started."""

    sessions = 0

    def start(self, call: Call) -> DraftSession:
        self.sessions += 1
        return super().start(call)


def candidates_for(generator: NgramCandidates, text: list[int]) -> list[int]:
    """The tokens that `get_candidates` proposes after a text."""
    ids, q = generator.get_candidates(torch.tensor([text]))
    assert q is None and ids.dtype == torch.long and ids.shape[0] == 1
    assert ids[0, : len(text)].tolist() == text
    return ids[0, len(text) :].tolist()


def test_get_candidates_of_a_growing_text_keeps_its_session() -> None:
    """Would catch: the whole text indexed again for every draft, or the new tokens not indexed at all."""
    generator = CountingCandidates(k=2)
    assert candidates_for(generator, [5, 6, 7, 5]) == [6, 7]
    assert candidates_for(generator, [5, 6, 7, 5, 8, 9, 5, 8]) == [9, 5]
    assert candidates_for(generator, [5, 6, 7, 5, 8, 9, 5, 8]) == [9, 5]
    assert candidates_for(generator, [5, 6, 7, 5, 8, 9, 5, 8, 1, 1]) == [1, 1]
    assert generator.sessions == 1


@pytest.mark.parametrize("other", [[1, 2, 3, 1], [5, 6, 7, 5, 8], [5, 6], [5, 6, 7, 5, 9, 9, 1, 5]])
def test_get_candidates_of_another_text_starts_a_new_session(other: list[int]) -> None:
    """Would catch: drafts from another conversation; also for a text that only begins like the last one."""
    generator = CountingCandidates(k=2)
    candidates_for(generator, [5, 6, 7, 5])
    candidates_for(generator, [5, 6, 7, 5, 8, 9])
    assert candidates_for(generator, other) == candidates_for(NgramCandidates(k=2), other)
    assert generator.sessions == 2


@thorough
@given(st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(0, 2), max_size=6)), min_size=1, max_size=6))
def test_get_candidates_of_texts_in_any_order_equals_that_of_a_new_object(
    steps: list[tuple[int, list[int]]],
) -> None:
    """Would catch: a truncated text taken for one that continues."""
    generator, text = NgramCandidates(k=3), [1]
    for kept, more in steps:
        text = text[:kept] + more or [0]
        assert candidates_for(generator, text) == candidates_for(NgramCandidates(k=3), text)


def test_get_candidates_of_a_tree_is_its_leftmost_chain() -> None:
    """Would catch: the nodes of a tree returned as if they were a chain."""
    text = [5, 6, 7, 5, 8, 9, 5]
    assert ngram_draft(NgramCandidates(k=2, branches=2), text) == ([8, 9, 6, 7], (-1, 0, -1, 2))
    assert candidates_for(NgramCandidates(k=2, branches=2), text) == [8, 9]


def test_get_candidates_of_two_rows_raises() -> None:
    with pytest.raises(ValueError, match="works on one row, got 2"):
        NgramCandidates().get_candidates(torch.tensor([[1, 2], [3, 4]]))


def test_get_candidates_keeps_the_dtype_of_the_ids() -> None:
    ids, _ = NgramCandidates(k=2).get_candidates(torch.tensor([[5, 6, 7, 5]], dtype=torch.int32))
    assert ids.dtype == torch.int32 and ids.tolist() == [[5, 6, 7, 5, 6, 7]]
