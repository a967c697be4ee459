"""Targets with convolutions, recurrent states or indexed attention give the tokens of plain `generate`."""

import copy
from functools import partial
from typing import Any

import pytest
import torch

from hf_specgen import (
    CombinedCandidates,
    DraftModelCandidates,
    FixedDepth,
    MedusaCandidates,
    NgramCandidates,
)
from hf_specgen.targets.replay import ReplayQueue
from tests.helpers import SAMPLING, assert_same_tokens, prompts, tiny_model
from tests.helpers.comparison import END
from tests.helpers.medusa import random_heads
from tests.helpers.models import SPEC, fresh_model, stateful_model
from tests.helpers.oracle import ORACLES, Oracle
from tests.helpers.policies import Irregular


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", [*SPEC["convolutional"], *SPEC["recurrent"]])
def test_state_after_partial_acceptance_same_tokens(kind: str, batch: int) -> None:
    """Would catch: a window or state that has read rejected tokens or padding, or tokens that it never reads."""
    sampling = SAMPLING["sampled" if batch == 1 else "greedy"]
    statistics = assert_same_tokens(
        stateful_model(kind), prompts(batch), ORACLES["sometimes"], max_new_tokens=14, **sampling
    )
    assert 0 < statistics.accepted < statistics.drafted


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", SPEC["recurrent"])
def test_plain_steps_between_drafts_same_tokens(kind: str, batch: int) -> None:
    """Would catch: a state that kernels for a single token overwrite in a copy, or before it was remembered."""
    oracle = partial(Oracle, accuracy=0.6, policy=Irregular())
    statistics = assert_same_tokens(stateful_model(kind), prompts(batch), oracle, max_new_tokens=14)
    assert 0 < statistics.accepted < statistics.drafted


@pytest.mark.parametrize("kind", SPEC["indexed"])
def test_indexed_attention_trees_same_tokens(kind: str) -> None:
    """Would catch: an indexer that sees rejected tokens, siblings or slots of shorter rows."""
    statistics = assert_same_tokens(stateful_model(kind), prompts(3), ORACLES["tree"], max_new_tokens=14)
    assert 0 < statistics.accepted < statistics.drafted


@pytest.mark.parametrize("kind", SPEC["counting_slots"])
def test_model_that_counts_positions_in_the_cache_takes_one_row(kind: str) -> None:
    """Would catch: wrong positions of shorter rows, or of layers behind the first one."""
    statistics = assert_same_tokens(stateful_model(kind), prompts(1), ORACLES["sometimes"], max_new_tokens=14)
    assert 0 < statistics.accepted < statistics.drafted
    with pytest.raises(ValueError, match="give one prompt at a time"):
        assert_same_tokens(stateful_model(kind), prompts(2), ORACLES["sometimes"], max_new_tokens=14)


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next"])
@pytest.mark.parametrize("strategy", ["tree", "draft", "medusa", "combined"])
def test_strategies_draft_chains_for_stateful_targets(kind: str, strategy: str) -> None:
    """Would catch: trees for a state that follows one path, states of heads at a wrong token, an outcome that the
    strategy takes for that of another node."""
    model = stateful_model(kind)
    draft = DraftModelCandidates(tiny_model("llama"), k=3, tree=6)
    candidates: Any = {
        "tree": NgramCandidates(k=3, tree=9),
        "draft": draft,
        "medusa": MedusaCandidates(random_heads(model), policy=FixedDepth()),
        "combined": CombinedCandidates([NgramCandidates(k=3, tree=6), draft], tree=8, policy=FixedDepth()),
    }[strategy]
    statistics = assert_same_tokens(model, prompts(3), candidates, max_new_tokens=14, **END)
    assert statistics.drafted > 0


def test_many_uncached_tokens_are_processed_in_a_pass_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: passes that grow without end where no draft is accepted whole, or tokens read twice."""
    monkeypatch.setattr("hf_specgen.targets.target.MAX_UNCACHED", 2)
    model, widths = stateful_model("qwen3_5_text"), []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        statistics = assert_same_tokens(model, prompts(3), ORACLES["never"], max_new_tokens=16)
    finally:
        handle.remove()
    assert statistics.accepted == 0
    assert max(width for width in widths if width != prompts(3)["input_ids"].shape[1]) <= 2 + 1 + 1 + 4


def test_uncached_tokens_come_first_until_a_pass_is_kept_completely() -> None:
    """Would catch: the bookkeeping of one row in isolation."""
    queue = ReplayQueue(1)
    assert queue.next_pass([[1, 2, 3, 4]], [True]) == ([0], [[1, 2, 3, 4]])
    queue.commit([2])
    assert (queue.texts, queue.cached) == ([[1, 2]], [0])
    assert queue.next_pass([[5, 6, 7]], [True]) == ([0], [[1, 2, 5, 6, 7]])
    assert queue.align(torch.arange(5)[None, :, None], 3).flatten().tolist() == [2, 3, 4]
    queue.commit([3])
    assert (queue.texts, queue.cached) == ([[1, 2, 5, 6, 7]], [5])
    queue.cut(0, 3)
    assert (queue.texts, queue.cached) == ([[1, 2, 5]], [0])


def test_uncached_row_that_takes_no_part_in_a_pass_cannot_return_behind_it() -> None:
    """Would catch: a state that is to return to a pass before the last one, whose state is not kept."""
    queue = ReplayQueue(1)
    queue.next_pass([[1, 2]], [True])
    queue.commit([2])
    assert queue.next_pass([[3]], [False]) == ([2], [[]])
    queue.commit([None])
    with pytest.raises(RuntimeError, match="cannot return to 1 tokens: its state is known at 2"):
        queue.cut(0, 1)


def test_returned_cache_with_convolutions_is_cropped_exactly() -> None:
    """Would catch: windows that are cut without the columns before them, and zeros in place of columns not kept."""
    model = fresh_model("lfm2", layer_types=["conv", "full_attention"] * 2)
    given = prompts(1)["input_ids"]
    output = model.generate(
        given, max_new_tokens=90, candidate_generator=NgramCandidates(k=3), return_dict_in_generate=True
    )
    cache, length = output.past_key_values, output.past_key_values.get_seq_length()
    unchanged = copy.deepcopy(cache)
    cache.crop(-5)
    text = torch.cat([output.sequences[:, : length - 5], torch.tensor([[7]])], dim=1)
    arguments = {"max_new_tokens": 10, "candidate_generator": NgramCandidates(k=3)}
    expected = model.generate(text, max_new_tokens=10)
    assert torch.equal(model.generate(text, past_key_values=cache, **arguments), expected)
    with pytest.raises(RuntimeError, match="80 tokens cannot be removed"):
        unchanged.crop(-80)
