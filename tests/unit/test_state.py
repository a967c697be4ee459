"""The text of each row, and how plain `generate` would show it to processors and stopping criteria."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specgen.state import GenerationState

thorough = settings(max_examples=150, deadline=None, derandomize=True)
PAD, STOP = 7, 9


def sequences(
    prompts: list[list[int]], max_length: float = float("inf"), pad_id: int | None = PAD, **kwargs: torch.Tensor
) -> GenerationState:
    return GenerationState(torch.tensor(prompts), kwargs.get("attention_mask"), {STOP}, max_length, pad_id)


def test_prompts_lose_their_padding_but_not_real_pad_tokens() -> None:
    """Would catch: padding recognised by its id. The pad id 7 is a real token of row 1."""
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    texts = sequences([[7, 7, 1, 7], [7, 2, 7, 3]], attention_mask=mask)
    assert texts.prompts == [[1, 7], [7, 2, 7, 3]]
    assert texts.prompt_length == 4


def test_prompts_without_a_mask_are_kept_whole() -> None:
    assert sequences([[7, 7, 1]]).prompts == [[7, 7, 1]]


def test_mask_longer_than_the_prompt() -> None:
    """Would catch: the mask read from its beginning; with a cache from an earlier turn it is longer than the input."""
    mask = torch.tensor([[1, 1, 1, 0, 1]])
    assert sequences([[7, 5]], attention_mask=mask).prompts == [[5]]


def test_extend_stops_at_a_stop_token() -> None:
    """Would catch: an accepted block that runs over an end token; the end token itself belongs to the text."""
    texts = sequences([[1], [2]])
    assert texts.extend(0, [3, STOP, 4]) == 2
    assert texts.extend(1, [3, 4]) == 2
    assert texts.generated == [[3, STOP], [3, 4]]
    assert texts.pending() == [STOP, 4]
    assert (texts.rests(0), texts.rests(1)) == (True, False)


def test_extend_stops_at_the_greatest_length() -> None:
    """Would catch: a length counted without the prompt, or without its padding, as plain `generate` counts it."""
    mask = torch.tensor([[0, 1]])
    texts = sequences([[7, 1]], max_length=5, attention_mask=mask)
    assert texts.remaining(0) == 3
    assert texts.extend(0, [3, 4]) == 2
    assert not texts.rests(0) and texts.remaining(0) == 1
    assert texts.extend(0, [5, 6]) == 1
    assert texts.rests(0) and texts.remaining(0) == 0
    assert texts.generated == [[3, 4, 5]]


def test_a_row_without_tokens_does_not_rest() -> None:
    """Would catch: a prompt that ends with an end token taken for the end of the answer."""
    assert not sequences([[STOP]]).rests(0)


def test_prefix_pads_ended_rows_and_rows_behind() -> None:
    """Would catch: a row behind shown with what it had before a cut, or an ended row shown short."""
    texts = sequences([[1, 1], [2, 2]])
    texts.extend(0, [3, STOP])
    texts.extend(1, [4, 5, 6])
    assert texts.prefix(5).tolist() == [[1, 1, 3, STOP, PAD], [2, 2, 4, 5, 6]]
    assert texts.prefix(3).tolist() == [[1, 1, 3], [2, 2, 4]]
    assert texts.prefix(1).tolist() == [[1], [2]]
    texts.extend(1, [8])
    assert texts.prefix(6).tolist() == [[1, 1, 3, STOP, PAD, PAD], [2, 2, 4, 5, 6, 8]]


def test_prefix_that_is_much_shorter_than_the_text() -> None:
    """Would catch: all tokens of a row far ahead written into a buffer that is only as wide as what is asked for."""
    texts = sequences([[1], [2]])
    texts.extend(0, [3] * 500)
    texts.extend(1, [4])
    assert texts.prefix(3).tolist() == [[1, 3, 3], [2, 4, PAD]]


def test_prefix_without_a_pad_token() -> None:
    texts = sequences([[1], [2]], pad_id=None)
    texts.extend(0, [3])
    assert texts.prefix(3).tolist() == [[1, 3, 0], [2, 0, 0]]


def test_prefix_keeps_the_padding_of_the_prompt() -> None:
    """Would catch: processors shown a prompt without its padding, other than plain `generate` shows it."""
    mask = torch.tensor([[0, 1]])
    texts = sequences([[5, 1]], attention_mask=mask)
    assert texts.prefix(2).tolist() == [[5, 1]]


def test_prefix_is_a_copy() -> None:
    """Would catch: a processor that changes its `input_ids` in place and with it the text."""
    texts = sequences([[1]])
    texts.extend(0, [3])
    texts.prefix(2).fill_(0)
    assert texts.prefix(2).tolist() == [[1, 3]]


def test_truncate_takes_the_tokens_back() -> None:
    """Would catch: tokens cut from the text that are still shown, before or after others take their place."""
    texts = sequences([[1], [2]])
    texts.extend(0, [3, 4, 5])
    texts.prefix(4)
    texts.truncate(0, 1)
    assert texts.generated == [[3], []]
    assert texts.prefix(4).tolist() == [[1, 3, PAD, PAD], [2, PAD, PAD, PAD]]
    texts.extend(0, [6])
    assert texts.prefix(4).tolist() == [[1, 3, 6, PAD], [2, PAD, PAD, PAD]]


def test_generated_lists_stay_the_same_objects() -> None:
    """Would catch: drafters left with an old text; `DraftContext` holds these very lists."""
    texts = sequences([[1]])
    mine = texts.generated[0]
    texts.extend(0, [3, 4])
    texts.truncate(0, 1)
    assert mine is texts.generated[0] and mine == [3]


@pytest.mark.parametrize("chunk", [1, 50, 1000])
def test_growth_keeps_the_text(chunk: int) -> None:
    """Would catch: columns lost or shifted when the buffer grows (it begins with 64 spare columns)."""
    texts = sequences([[1], [2]])
    expected: list[int] = []
    for first in range(0, 1000, chunk):
        block = [10 + (first + i) % 50 for i in range(chunk)]
        texts.extend(0, block)
        expected += block
        shown = texts.prefix(1 + len(expected))
        assert shown[:, -chunk:].tolist() == [block, [PAD] * chunk]
    assert texts.prefix(1001).tolist() == [[1, *expected], [2, *[PAD] * 1000]]


@thorough
@given(st.data())
def test_against_lists(data: st.DataObject) -> None:
    """Would catch: what `prefix` remembers going out of step with the text, in any order of calls."""
    texts = sequences([[1, 2], [3, 4]])
    rows: list[list[int]] = [[], []]
    for _ in range(data.draw(st.integers(1, 12))):
        row, action = data.draw(st.integers(0, 1)), data.draw(st.sampled_from(["extend", "truncate", "prefix"]))
        if action == "extend":
            first, length = data.draw(st.integers(10, 50)), data.draw(st.integers(0, 90))
            block = list(range(first, first + length))
            assert texts.extend(row, block) == len(block)
            rows[row] += block
        elif action == "truncate":
            length = data.draw(st.integers(0, len(rows[row])))
            texts.truncate(row, length)
            rows[row] = rows[row][:length]
        else:
            columns = data.draw(st.integers(1, 150))
            expected = [[1, 2, *rows[0]], [3, 4, *rows[1]]]
            assert texts.prefix(columns).tolist() == [(text + [PAD] * columns)[:columns] for text in expected]
        assert texts.generated == rows
