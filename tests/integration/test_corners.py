"""Corners where something broke once."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from hf_specgen import DraftModelCandidates, LayerSkipCandidates, NgramCandidates, speculate
from tests.helpers import Oracle, plain_and_speculative, prompts, tiny_model
from tests.test_stops import Recorder


@pytest.mark.parametrize("batch", [1, 3])
def test_a_grammar_that_knows_only_its_own_texts(batch: int) -> None:
    """A trie raises on a text that plain `generate` would never show it, such as one padded in the middle."""
    model, inputs = tiny_model("llama"), prompts(batch)

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        new = ids[12:].tolist()
        return [(ids[0].item() + 7 * len(new) + row) % 90 + 1, 95] if 0 not in new else []

    plain, output = plain_and_speculative(
        model, inputs, {"accuracy": 0.7}, max_new_tokens=14, prefix_allowed_tokens_fn=allowed
    )
    assert torch.equal(plain, output.sequences)


def test_a_cache_made_in_inference_mode_goes_on_outside() -> None:
    model, inputs = tiny_model("llama"), prompts(1)
    with torch.inference_mode():
        first = model.generate(
            **inputs, max_new_tokens=6, return_dict_in_generate=True, candidate_generator=NgramCandidates()
        )
    expected = model.generate(first.sequences.clone(), max_new_tokens=8)
    ours = model.generate(
        first.sequences.clone(),
        max_new_tokens=8,
        past_key_values=first.past_key_values,
        candidate_generator=NgramCandidates(),
    )
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("batch", [1, 3, 5])
@pytest.mark.parametrize("ends", [{}, {"eos_token_id": list(range(20)), "pad_token_id": 0}])
@pytest.mark.parametrize("table", [24, 16])
def test_draft_with_a_table_of_positions(batch: int, ends: dict, table: int) -> None:
    """The text ends with the target's table, and behind the draft's."""
    target, draft = tiny_model("gpt2", n_positions=24), tiny_model("gpt2", n_positions=table)
    plain = target.generate(**prompts(batch), max_length=24, **ends)
    ours = target.generate(
        **prompts(batch), max_length=24, **ends, candidate_generator=DraftModelCandidates(draft, k=5)
    )
    assert torch.equal(plain, ours)


def test_prompt_longer_than_the_draft_reads() -> None:
    target, draft = tiny_model("llama"), tiny_model("gpt2", n_positions=8)
    with pytest.raises(ValueError, match="the prompt has 12 tokens, but the draft reads at most 8"):
        target.generate(**prompts(1), max_new_tokens=4, candidate_generator=DraftModelCandidates(draft))


def test_layer_skip_to_the_end_of_a_table() -> None:
    model = tiny_model("gptj", n_positions=24)
    for batch in (1, 3):
        plain = model.generate(**prompts(batch), max_length=24)
        ours = model.generate(**prompts(batch), max_length=24, candidate_generator=LayerSkipCandidates(2, k=5))
        assert torch.equal(plain, ours)


def test_ids_of_another_integer_type() -> None:
    model, inputs = tiny_model("llama"), {"input_ids": prompts(1)["input_ids"].int()}
    plain = model.generate(**inputs, max_new_tokens=6)
    ours = model.generate(**inputs, max_new_tokens=6, candidate_generator=NgramCandidates())
    assert ours.dtype == plain.dtype and torch.equal(ours, plain)


def test_arguments_by_position() -> None:
    """`generate(inputs, generation_config, logits_processor, stopping_criteria, …, streamer)`."""
    model, ids, seen = tiny_model("llama"), prompts(1)["input_ids"], Recorder()
    arguments = (ids, None, LogitsProcessorList(), StoppingCriteriaList(), None, None, None, seen)
    ours = model.generate(*arguments, max_new_tokens=5, candidate_generator=NgramCandidates())
    assert torch.equal(ours, model.generate(ids, max_new_tokens=5))
    assert seen.ended == 1 and len(seen.chunks) == 6


def test_criteria_come_before_the_streamer() -> None:
    """As in plain `generate`: a criterion sees a token before the streamer does."""
    order: list[str] = []

    class Notes(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
            order.append("criterion")
            return torch.tensor([False])

    class Streams(Recorder):
        def put(self, value: torch.Tensor) -> None:
            order.append("streamer")

    model, inputs = tiny_model("llama"), prompts(1)
    seen = []
    for extra in ({}, {"candidate_generator": NgramCandidates()}):
        order.clear()
        criteria = StoppingCriteriaList([Notes()])
        model.generate(**inputs, max_new_tokens=6, stopping_criteria=criteria, streamer=Streams(), **extra)
        seen.append(list(order))
    assert seen[0] == seen[1]


def test_one_method_object_in_two_threads() -> None:
    """What `speculate` gives may be shared: the state of a call belongs to the call."""
    from concurrent.futures import ThreadPoolExecutor

    model, method = tiny_model("llama"), speculate(NgramCandidates(k=4))
    inputs = [prompts(1, length=length) for length in (8, 12, 16, 20)]
    expected = [model.generate(**each, max_new_tokens=24) for each in inputs]
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(model.generate, **each, max_new_tokens=24, custom_generate=method) for each in inputs]
    assert all(torch.equal(call.result(), want) for call, want in zip(calls, expected, strict=True))


def test_an_exception_before_anything_was_cached() -> None:
    """A cache object of ours that was still empty can be used again."""
    from hf_specgen.target.cache import RaggedCache
    from tests.test_bad_input import _Breaks

    model, inputs, cache = tiny_model("llama"), prompts(1), RaggedCache()
    expected = model.generate(**inputs, max_new_tokens=20)
    with pytest.raises(RuntimeError):
        model.generate(
            **inputs, max_new_tokens=20, past_key_values=cache, candidate_generator=_Breaks(expected[:, 12:])
        )
    ours = model.generate(
        **inputs, max_new_tokens=20, past_key_values=cache, candidate_generator=Oracle(expected[:, 12:], 0.5)
    )
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lower_precision_runs_and_mostly_agrees(dtype: torch.dtype) -> None:
    """Near-ties may fall differently there; the first token comes from the same pass and cannot."""
    model = tiny_model("llama").to(dtype)
    try:
        plain = model.generate(**prompts(2), max_new_tokens=10)
        ours = model.generate(**prompts(2), max_new_tokens=10, candidate_generator=NgramCandidates(branches=2))
    finally:
        model.float()
        tiny_model.cache_clear()
    assert ours.shape == plain.shape and torch.equal(ours[:, :13], plain[:, :13])
