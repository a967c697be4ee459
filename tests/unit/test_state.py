"""The tokens of each row, and the prefixes that plain `generate` would pass to processors and criteria."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, StoppingCriteriaList

from hf_specgen import Call
from hf_specgen.outputs import OutputCollector
from hf_specgen.state import GenerationState
from hf_specgen.verification import VerificationResult

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


# Columns that are confirmed all at once are those that are confirmed one by one


class Streamer:
    """Receives columns, so that they are confirmed one by one."""

    def put(self, tokens: torch.Tensor) -> None:
        pass

    def end(self) -> None:
        pass


def collector(batch: int, pad_id: int | None, streamer: Any) -> tuple[GenerationState, OutputCollector]:
    stop_ids = () if pad_id is None else (1, 2)
    state = GenerationState(torch.zeros(batch, 3, dtype=torch.long), None, stop_ids, max_length=15, pad_id=pad_id)
    call = Call(None, state, GenerationConfig())
    return state, OutputCollector(call, StoppingCriteriaList(), streamer)


@pytest.mark.parametrize("pad_id", [0, None])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_columns_at_once_are_those_confirmed_one_by_one(batch: int, pad_id: int | None, seed: int) -> None:
    """Would catch: a row stopped before the other rows have reached its last column, or not at all."""
    rng = random.Random(seed)
    pairs = [collector(batch, pad_id, streamer) for streamer in (None, Streamer())]
    while not pairs[0][0].all_stopped:
        tokens = [[rng.randrange(1, 12) for _ in range(rng.randrange(1, 6))] for _ in range(batch)]
        for state, outputs in pairs:
            result = VerificationResult([None] * batch, [[] for _ in range(batch)], [0] * batch)
            for row in range(batch):
                if not state.has_ended(row):
                    state.append(row, tokens[row])
            outputs.add(result)
        (ours, at_once), (reference, one_by_one) = pairs
        assert at_once.columns == one_by_one.columns
        assert ours.generated == reference.generated
        assert [ours.is_stopped(row) for row in range(batch)] == [reference.is_stopped(row) for row in range(batch)]
    assert torch.equal(pairs[0][1].output_ids(), pairs[1][1].output_ids())
