"""What `NgramCandidates` remembers of earlier texts, and how it runs in Transformers' own loop (`get_candidates`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specgen.candidates import DraftContext, Drafter, NgramCandidates, NgramHistory
from hf_specgen.candidates.ngram_index import SEPARATOR
from tests.test_ngram import context_of, draft

thorough = settings(max_examples=100, deadline=None, derandomize=True)


def history_of(*texts: list[int], **kwargs: int) -> NgramHistory:
    history = NgramHistory(**kwargs)
    for text in texts:
        history.add(text)
    return history


def test_history_is_looked_into() -> None:
    candidates = NgramCandidates(k=3, history=history_of([1, 2, 3, 4, 5, 6]))
    assert draft(candidates, [9, 1, 2])[0] == [3, 4]
    assert draft(NgramCandidates(k=3), [9, 1, 2])[0] == []


def test_own_text_comes_before_history_on_ties() -> None:
    """Would catch: the history's head start of one token forgotten, or too large.

    The text's own match is 9 -> 6, of one token. The history's is 8 9 -> 5, which counts as one token: the own wins.
    With 7 8 9 -> 5 it counts as two, and the history wins.
    """
    assert draft(NgramCandidates(k=1, history=history_of([8, 9, 5])), [9, 6, 8, 9])[0] == [6]
    assert draft(NgramCandidates(k=1, history=history_of([7, 8, 9, 5])), [9, 6, 7, 8, 9])[0] == [5]


def test_separators_are_never_crossed() -> None:
    """Would catch: a guess that runs into the next text, or a match that reaches back into the one before."""
    history = history_of([1, 2, 3], [4, 5, 6])
    assert history.index.tokens == [1, 2, 3, SEPARATOR, 4, 5, 6, SEPARATOR]
    assert draft(NgramCandidates(k=9, history=history), [1, 2])[0] == [3]
    assert draft(NgramCandidates(k=9, history=history), [2, 3])[0] == []  # what followed is the end of the text
    assert draft(NgramCandidates(k=9, min_ngram=2, history=history), [3, 4])[0] == []


def test_the_oldest_texts_are_forgotten_first() -> None:
    """Would catch: a history that grows for ever, forgets everything at once, or forgets the newest."""
    history = NgramHistory(max_tokens=12)
    for first in range(100, 1100, 10):
        history.add([first, first + 1, first + 2, first + 3])
        assert len(history) <= 24
    candidates = NgramCandidates(k=2, history=history)
    assert draft(candidates, [1090, 1091])[0] == [1092, 1093]
    assert draft(candidates, [1080, 1081])[0] == [1082, 1083]
    assert draft(candidates, [100, 101])[0] == []


def test_of_a_text_that_is_too_long_the_end_is_remembered() -> None:
    history = history_of([*range(50)], max_tokens=10)
    assert history.index.tokens == [*range(40, 50), SEPARATOR]


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_a_history_of_nothing_gets_a_sentence(max_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"max_tokens must be at least 1, got {max_tokens}"):
        NgramHistory(max_tokens)


def test_calls_add_their_texts() -> None:
    """Would catch: a call that adds the prompts only, or texts of a batch run together."""
    history = NgramHistory()
    context = context_of([1, 2], [3])
    drafter = NgramCandidates(history=history).bind(context, None)
    context.generated[0] += [7, 8]
    assert len(history) == 0
    drafter.end()
    assert history.index.tokens == [1, 2, 7, 8, SEPARATOR, 3, SEPARATOR]


def test_add_texts(tokenizer: Any) -> None:
    """Would catch: special tokens between the texts, or all texts tokenised as one."""
    history = NgramHistory()
    lines = ["The keeper of the lighthouse wrote a letter.", "Nobody answered for eleven years."]
    history.add_texts(lines, tokenizer)
    ids = [tokenizer(line, add_special_tokens=False)["input_ids"] for line in lines]
    assert history.index.tokens == [*ids[0], SEPARATOR, *ids[1], SEPARATOR]
    assert draft(NgramCandidates(k=4, history=history), ids[1][:3])[0] == ids[1][3:7]


# Transformers' interface


class Counting(NgramCandidates):
    """Counts how often it is bound."""

    binds = 0

    def bind(self, context: DraftContext, model: Any) -> Drafter:
        self.binds += 1
        return super().bind(context, model)


def candidates_for(generator: NgramCandidates, text: list[int]) -> list[int]:
    ids, q = generator.get_candidates(torch.tensor([text]))
    assert q is None and ids.dtype == torch.long and ids.shape[0] == 1
    assert ids[0, : len(text)].tolist() == text
    return ids[0, len(text) :].tolist()


def test_a_text_that_goes_on_keeps_its_index() -> None:
    """Would catch: the whole text indexed anew for every token, or the new tokens not indexed at all."""
    generator = Counting(k=2)
    assert candidates_for(generator, [5, 6, 7, 5]) == [6, 7]
    assert candidates_for(generator, [5, 6, 7, 5, 8, 9, 5, 8]) == [9, 5]
    assert candidates_for(generator, [5, 6, 7, 5, 8, 9, 5, 8]) == [9, 5]
    assert candidates_for(generator, [5, 6, 7, 5, 8, 9, 5, 8, 1, 1]) == [1, 1]
    assert generator.binds == 1


@pytest.mark.parametrize("other", [[1, 2, 3, 1], [5, 6, 7, 5, 8], [5, 6], [5, 6, 7, 5, 9, 9, 1, 5]])
def test_an_unrelated_text_starts_anew(other: list[int]) -> None:
    """Would catch: guesses out of another conversation; also for a text that only begins like the last one."""
    generator = Counting(k=2)
    candidates_for(generator, [5, 6, 7, 5])
    candidates_for(generator, [5, 6, 7, 5, 8, 9])
    assert candidates_for(generator, other) == candidates_for(NgramCandidates(k=2), other)
    assert generator.binds == 2


@thorough
@given(st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(0, 2), max_size=6)), min_size=1, max_size=6))
def test_any_order_of_texts(steps: list[tuple[int, list[int]]]) -> None:
    """Would catch: a cut-back text taken for one that goes on."""
    generator, text = NgramCandidates(k=3), [1]
    for kept, more in steps:
        text = text[:kept] + more or [0]
        assert candidates_for(generator, text) == candidates_for(NgramCandidates(k=3), text)


def test_a_tree_gives_its_first_path() -> None:
    """Would catch: the nodes of a tree handed out as if they were a chain."""
    text = [5, 6, 7, 5, 8, 9, 5]
    assert draft(NgramCandidates(k=2, branches=2), text) == ([8, 9, 6, 7], (-1, 0, -1, 2))
    assert candidates_for(NgramCandidates(k=2, branches=2), text) == [8, 9]


def test_two_rows_get_a_sentence() -> None:
    with pytest.raises(ValueError, match="works on one row, got 2"):
        NgramCandidates().get_candidates(torch.tensor([[1, 2], [3, 4]]))


def test_dtype_of_the_ids_is_kept() -> None:
    ids, _ = NgramCandidates(k=2).get_candidates(torch.tensor([[5, 6, 7, 5]], dtype=torch.int32))
    assert ids.dtype == torch.int32 and ids.tolist() == [[5, 6, 7, 5, 6, 7]]
