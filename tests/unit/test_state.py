"""The tokens of each row, and the prefixes that plain `generate` would pass to processors and criteria."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specgen.state import GenerationState

thorough = settings(max_examples=150, deadline=None, derandomize=True)
PAD, STOP = 7, 9


def new_state(
    prompts: list[list[int]], max_length: float = float("inf"), pad_id: int | None = PAD, **kwargs: torch.Tensor
) -> GenerationState:
    return GenerationState(torch.tensor(prompts), kwargs.get("attention_mask"), {STOP}, max_length, pad_id)


def test_prompts_lose_their_padding_and_keep_real_pad_tokens() -> None:
    """Would catch: padding recognised by its id. The pad id 7 is a real token of row 1."""
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    state = new_state([[7, 7, 1, 7], [7, 2, 7, 3]], attention_mask=mask)
    assert state.prompts == [[1, 7], [7, 2, 7, 3]]
    assert state.prompt_length == 4


def test_prompts_without_a_mask_are_kept_whole() -> None:
    assert new_state([[7, 7, 1]]).prompts == [[7, 7, 1]]


def test_prompts_with_a_longer_mask_use_its_end() -> None:
    """Would catch: the mask read from its beginning; with a cache from an earlier turn it is longer than the input."""
    mask = torch.tensor([[1, 1, 1, 0, 1]])
    assert new_state([[7, 5]], attention_mask=mask).prompts == [[5]]


def test_append_ends_at_a_stop_token() -> None:
    """Would catch: tokens appended behind EOS; EOS itself belongs to the text."""
    state = new_state([[1], [2]])
    assert state.append(0, [3, STOP, 4]) == 2
    assert state.append(1, [3, 4]) == 2
    assert state.generated == [[3, STOP], [3, 4]]
    assert state.pending() == [STOP, 4]
    assert (state.has_ended(0), state.has_ended(1)) == (True, False)


def test_append_ends_at_max_length() -> None:
    """Would catch: a length counted without the prompt or without its padding: plain `generate` counts both."""
    mask = torch.tensor([[0, 1]])
    state = new_state([[7, 1]], max_length=5, attention_mask=mask)
    assert state.remaining(0) == 3
    assert state.append(0, [3, 4]) == 2
    assert not state.has_ended(0) and state.remaining(0) == 1
    assert state.append(0, [5, 6]) == 1
    assert state.has_ended(0) and state.remaining(0) == 0
    assert state.generated == [[3, 4, 5]]


def test_row_without_tokens_has_not_ended() -> None:
    """Would catch: a prompt that ends with EOS taken for a finished output."""
    assert not new_state([[STOP]]).has_ended(0)


def test_prefix_pads_ended_and_shorter_rows() -> None:
    """Would catch: a shorter row with tokens from before it was truncated, or an ended row without padding."""
    state = new_state([[1, 1], [2, 2]])
    state.append(0, [3, STOP])
    state.append(1, [4, 5, 6])
    assert state.prefix(5).tolist() == [[1, 1, 3, STOP, PAD], [2, 2, 4, 5, 6]]
    assert state.prefix(3).tolist() == [[1, 1, 3], [2, 2, 4]]
    assert state.prefix(1).tolist() == [[1], [2]]
    state.append(1, [8])
    assert state.prefix(6).tolist() == [[1, 1, 3, STOP, PAD, PAD], [2, 2, 4, 5, 6, 8]]


def test_prefix_without_a_pad_token_pads_with_zero() -> None:
    state = new_state([[1], [2]], pad_id=None)
    state.append(0, [3])
    assert state.prefix(3).tolist() == [[1, 3, 0], [2, 0, 0]]


def test_prefix_keeps_the_padding_of_the_prompt() -> None:
    """Would catch: processors that receive the prompt without its padding, unlike in plain `generate`."""
    mask = torch.tensor([[0, 1]])
    state = new_state([[5, 1]], attention_mask=mask)
    assert state.prefix(2).tolist() == [[5, 1]]


def test_prefix_is_a_copy() -> None:
    """Would catch: a processor that changes its `input_ids` in place, and with it the text."""
    state = new_state([[1]])
    state.append(0, [3])
    state.prefix(2).fill_(0)
    assert state.prefix(2).tolist() == [[1, 3]]


def test_generated_lists_stay_the_same_objects() -> None:
    """Would catch: draft sessions that hold an outdated list."""
    state = new_state([[1]])
    mine = state.generated[0]
    state.append(0, [3, 4])
    state.truncate(0, 1)
    assert mine is state.generated[0] and mine == [3]


@thorough
@given(st.data())
def test_state_agrees_with_lists(data: st.DataObject) -> None:
    """Would catch: a cached prefix that no longer matches the text, in any order of calls."""
    state = new_state([[1, 2], [3, 4]])
    rows: list[list[int]] = [[], []]
    for _ in range(data.draw(st.integers(1, 12))):
        row, action = data.draw(st.integers(0, 1)), data.draw(st.sampled_from(["append", "truncate", "prefix"]))
        if action == "append":
            first, length = data.draw(st.integers(10, 50)), data.draw(st.integers(0, 90))
            block = list(range(first, first + length))
            assert state.append(row, block) == len(block)
            rows[row] += block
        elif action == "truncate":
            length = data.draw(st.integers(0, len(rows[row])))
            state.truncate(row, length)
            rows[row] = rows[row][:length]
        else:
            columns = data.draw(st.integers(1, 150))
            expected = [[1, 2, *rows[0]], [3, 4, *rows[1]]]
            assert state.prefix(columns).tolist() == [(text + [PAD] * columns)[:columns] for text in expected]
        assert state.generated == rows


def test_tentative_appends_are_undone_on_exit() -> None:
    """Would catch: tokens of the look-ahead of verification left in the text, its prefix or another row."""
    state = new_state([[1], [2]])
    state.append(0, [3])
    state.prefix(2)
    with pytest.raises(RuntimeError, match="inside"), state.tentative():
        state.append(0, [4, 5])
        state.append(1, [6])
        assert state.prefix(4).tolist() == [[1, 3, 4, 5], [2, 6, PAD, PAD]]
        raise RuntimeError("inside")
    assert state.generated == [[3], []]
    assert state.prefix(4).tolist() == [[1, 3, PAD, PAD], [2, PAD, PAD, PAD]]


@thorough
@given(st.lists(st.sampled_from([3, 4, STOP]), max_size=8), st.integers(1, 9))
def test_count_until_end_is_what_append_appends(tokens: list[int], max_length: int) -> None:
    """Would catch: verification and state that disagree about where a row ends."""
    if max_length <= 1:
        return
    state = new_state([[1]], max_length=max_length)
    counted = state.count_until_end(0, tokens)
    assert counted == state.append(0, tokens) == len(state.generated[0])


def test_stopped_row_without_padding_continues_until_all_have_stopped() -> None:
    """As in plain `generate`, which pads stopped rows only if there is an EOS token."""
    padded, unpadded = new_state([[1], [2]]), new_state([[1], [2]], pad_id=None)
    for state in (padded, unpadded):
        state.append(0, [3])
        state.stop(0)
    assert padded.has_ended(0) and not unpadded.has_ended(0)
    assert not padded.all_stopped and padded.is_stopped(0) and not padded.is_stopped(1)
