"""`FeatureQueue`: what a head reads of the target, each position once."""

from typing import Any

import torch

from hf_specgen.candidates.features import FeatureQueue
from hf_specgen.targets.hidden_states import StepStates
from tests.helpers.calls import make_batch, make_state


def queue_of(texts: list[list[int]]) -> tuple[FeatureQueue, Any, list[torch.Tensor]]:
    """A queue before the first step, the rows' state, and what the target has committed: the position as its state."""
    batch = make_batch(make_state(texts))
    for row in range(len(texts)):
        batch.state.append(row, [50 + row])
    committed = [torch.arange(len(text))[:, None].float() for text in texts]
    batch.committed_states = lambda layers: committed  # type: ignore[method-assign]
    return FeatureQueue(batch, (0,)), batch.state, committed


def test_feature_queue_take_returns_each_position_once_with_the_token_after_it() -> None:
    """Would catch: positions read twice or never, and tokens shifted by one."""
    queue, state, committed = queue_of([[3, 4, 5]])
    first: Any = queue.pop_text([2])
    assert first.features[0][:, 0].tolist() == [0, 1, 2] and first.tokens == [[4, 5, 50]] and first.is_first
    state.append(0, [6, 7])
    committed[0] = torch.tensor([[3.0], [4.0]])
    queue.receive()
    later: Any = queue.pop_text([2])
    assert later.features[0][:, 0].tolist() == [3, 4] and later.tokens == [[6, 7]] and not later.is_first


def test_feature_queue_row_that_does_not_draft_keeps_its_features() -> None:
    """Would catch: features of a row that waits for slower ones, lost or read by another row."""
    queue, _, _ = queue_of([[3, 4], [5, 6, 7]])
    assert queue.pop_text([0, 0]) is None
    first: Any = queue.pop_text([2, 0])
    assert [len(features) for features in first.features] == [2, 0]
    later: Any = queue.pop_text([0, 2])
    assert later.tokens == [[], [6, 7, 51]]


def test_feature_queue_rows_leave_and_join_in_order() -> None:
    """Would catch: features of a row that has left given to the row that takes its place."""
    queue, state, committed = queue_of([[3, 4], [5, 6, 7]])
    queue.receive()
    state.prompts, state.generated = [[5, 6, 7], [8, 9, 10]], [[51], [60]]
    committed[:] = [committed[1][:0], torch.arange(3)[:, None].float()]
    queue.keep_rows([1])
    queue.append_rows(1)
    prompts = queue.pop_prompts(1)
    assert prompts.tokens == [[9, 10]], "the last position is left for the next draft"
    both: Any = queue.pop_text([1, 1])
    assert both.tokens == [[6, 7, 51], [60]]


def test_states_of_a_step_are_unchanged_by_the_next_commit() -> None:
    """Would catch: a copy of a target, for passes over padding, that changes what drafters read of the original."""
    first = StepStates((1,)).after_prefill(torch.zeros(2, 3, 4))
    second = first.after_pass(torch.ones(2, 2, 4)).after_commit([[0], None])
    assert first.last_of([1]).tolist() == [[0.0] * 4] * 2
    assert second.last_of([1]).tolist() == [[1.0] * 4, [0.0] * 4]
