"""The texts of a call as every plug-in reads them, and the memory that calls of a model share."""

import gc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.generation.stopping_criteria import EosTokenCriteria, StoppingCriteriaList

from hf_specgen import MedusaCandidates
from hf_specgen.call import GenerationState, Memory, memory
from tests.helpers import prompts, tiny_model
from tests.helpers.medusa import random_heads

# The tokens of each row, and the prefixes that plain `generate` would pass to processors and criteria

PAD, STOP = 7, 9


def new_state(
    prompts: list[list[int]], max_length: float = float("inf"), pad_id: int | None = PAD, **kwargs: torch.Tensor
) -> GenerationState:
    return GenerationState(torch.tensor(prompts), kwargs.get("attention_mask"), {STOP}, max_length, pad_id)


def test_prompts_with_a_longer_mask_use_its_end() -> None:
    """Would catch: the mask read from its beginning; with a cache from an earlier turn it is longer than the input."""
    mask = torch.tensor([[1, 1, 1, 0, 1]])
    assert new_state([[7, 5]], attention_mask=mask).prompts == [[5]]


@given(st.data())
def test_state_agrees_with_lists(data: st.DataObject) -> None:
    """Would catch: padding recognised by its id, tokens behind an end, a prefix that is stale, shared or unpadded."""
    prompt, width = [[PAD, 2, PAD], [3, PAD, 4]], 3
    padding = [data.draw(st.integers(0, 2)) for _ in prompt]
    limit = data.draw(st.one_of(st.just(float("inf")), st.integers(4, 40)))
    mask = torch.tensor([[0] * count + [1] * (width - count) for count in padding])
    state, rows = new_state(prompt, limit, attention_mask=mask), [[], []]  # type: ignore[var-annotated]
    assert state.prompts == [row[count:] for row, count in zip(prompt, padding, strict=True)]

    def has_ended(row: int) -> bool:
        return rows[row][-1:] == [STOP] or width + len(rows[row]) >= limit

    for _ in range(data.draw(st.integers(1, 12))):
        row, action = data.draw(st.integers(0, 1)), data.draw(st.sampled_from(["append", "truncate", "prefix"]))
        if action == "append" and not has_ended(row):
            block = [10 + index for index in range(data.draw(st.integers(0, 90)))]
            if data.draw(st.integers(0, 3)) == 0:
                block.insert(data.draw(st.integers(0, len(block))), STOP)
            kept = block[: block.index(STOP) + 1] if STOP in block else block
            kept = kept[: int(min(limit - width - len(rows[row]), 999))]
            assert state.count_until_end(row, block) == state.append(row, block) == len(kept)
            rows[row] += kept
        elif action == "truncate" and not has_ended(row):
            length = data.draw(st.integers(0, len(rows[row])))
            state.truncate(row, length)
            rows[row] = rows[row][:length]
        elif action == "prefix":
            length = data.draw(st.integers(1, width + max(map(len, rows))))
            texts = [text + rows[index] + [PAD] * length for index, text in enumerate(prompt)]
            prefix = state.prefix(length)
            assert prefix.tolist() == [text[:length] for text in texts]
            prefix.fill_(0)
        assert state.generated == rows and [state.has_ended(r) for r in (0, 1)] == [has_ended(r) for r in (0, 1)]
        assert [state.remaining(r) for r in (0, 1)] == [limit - width - len(text) for text in rows]
    assert [state.last_token(r) for r in (0, 1)] == [(rows[r] or prompt[r])[-1] for r in (0, 1)]
    assert not all(rows) or state.pending() == [text[-1] for text in rows]


def test_tentative_appends_are_undone_on_exit() -> None:
    """Would catch: tokens of the look-ahead of verification left in the text, its prefix or another row."""
    state = new_state([[1], [2]])
    state.append(0, [3])
    with pytest.raises(RuntimeError, match="inside"), state.tentative():
        state.append(0, [4, 5])
        state.append(1, [6])
        assert state.prefix(4).tolist() == [[1, 3, 4, 5], [2, 6, PAD, PAD]]
        raise RuntimeError("inside")
    assert state.generated == [[3], []]
    assert state.prefix(2).tolist() == [[1, 3], [2, PAD]]


def test_stopped_row_without_padding_continues_until_all_have_stopped() -> None:
    """As in plain `generate`, which pads stopped rows only if there is an EOS token."""
    padded, unpadded = new_state([[1], [2]]), new_state([[1], [2]], pad_id=None)
    for state in (padded, unpadded):
        state.append(0, [3])
        state.stopped[0] = True
    assert padded.has_ended(0) and not unpadded.has_ended(0)
    assert not padded.all_stopped and padded.stopped == [True, False]


# The memory across calls: copies, bounded, freed with the model, safe to share between threads, off on request


def test_memory_is_bounded_and_keeps_the_newest() -> None:
    """Would catch: entries that are kept for the model's lifetime (one per temperature or history)."""
    small, model = Memory(max_entries=8), nn.Linear(1, 1)
    for key in range(30):
        small.store(model, key, Counter(accepted=10))
    assert small.recall(model, 29, Counter).total() == 10
    assert small.recall(model, 0, Counter).total() == 0
    assert small.recall(None, 29, Counter).total() == 0
    assert len(small._entries[model]) == 8


def test_memory_keeps_an_entry_that_calls_use() -> None:
    """Would catch: a history that calls with many temperatures remove, although every call reads it."""
    small, model = Memory(max_entries=4), nn.Linear(1, 1)
    small.store(model, "history", Counter(answers=1))
    for key in range(10):
        small.store(model, key, Counter())
        assert small.recall(model, "history", Counter).total() == 1


def test_end_token_of_a_criterion_may_have_no_dimension() -> None:
    """Would catch: a TypeError where plain `generate`, which compares with the tensor, has none."""
    criteria = StoppingCriteriaList([EosTokenCriteria(torch.tensor(5))])
    assert GenerationState.of_call(torch.ones(1, 2, dtype=torch.long), None, criteria, pad_id=0).stop_ids == {5}


class Learnt(Counter[str]):
    """Counts of a call, of which a later one begins with a copy."""

    def for_later_call(self) -> "Learnt":
        """A copy."""
        return Learnt(self)


def test_memory_returns_what_a_later_call_begins_with_and_that_of_a_freed_model_is_freed() -> None:
    """Would catch: a call that changes what another one has learnt, a model kept alive by what was counted with it."""
    one, model = Memory(), nn.Linear(1, 1)
    one.store(model, "key", Learnt(accepted=10))
    one.recall(model, "key", Learnt).clear()
    assert one.recall(model, "key", Learnt).total() == 10
    del model
    gc.collect()
    assert not len(one._entries)


def test_memory_used_by_many_threads_raises_nothing() -> None:
    """Would catch: 'dictionary changed size during iteration' when calls of several threads end together."""
    one, model = Memory(max_entries=16), nn.Linear(1, 1)

    def work(thread: int) -> None:
        for call in range(200):
            one.store(model, (thread, call % 7), one.recall(model, (thread, call % 7), Counter))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))


@pytest.mark.parametrize("remembers", [True, False])
def test_memory_setting_of_a_call(remembers: bool) -> None:
    """Would catch: a call with memory=False that leaves something for later ones."""
    model = tiny_model("llama")
    memory.clear()
    candidates = MedusaCandidates(random_heads(model))
    model.generate(**prompts(1), max_new_tokens=16, candidate_generator=candidates, memory=remembers)
    learnt = [key for key in memory._entries[model] if "T(q)" not in key]
    assert bool(learnt) == remembers
