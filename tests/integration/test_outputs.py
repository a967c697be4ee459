"""Promise 6: shapes, scores, logits and cache of plain `generate`."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_specgen import NgramCandidates
from hf_specgen.target.cache import RaggedCache
from tests.helpers import Oracle, prompts, tiny_model

# One matmul over several rows rounds differently from several over one: about 1e-6 in logits of size 1.
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
ENDS = {"eos_token_id": list(range(0, 30)), "pad_token_id": 0}
ARGUMENTS = [
    {},
    ENDS,
    {"do_sample": True, "top_k": 12, **ENDS},
    {"repetition_penalty": 1.3, **ENDS},
]


def _both(model, inputs, **arguments):
    torch.manual_seed(5)
    plain = model.generate(**inputs, **arguments, return_dict_in_generate=True)
    oracle = Oracle(plain.sequences[:, inputs["input_ids"].shape[1] :], accuracy=0.7, branching=True)
    torch.manual_seed(5)
    return plain, model.generate(**inputs, **arguments, return_dict_in_generate=True, candidate_generator=oracle)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_scores_and_logits(batch: int, arguments: dict) -> None:
    """Would catch: scores of rejected nodes, missing columns, rows mixed up, padding of ended rows left out."""
    plain, ours = _both(
        tiny_model("llama"), prompts(batch), max_new_tokens=16, output_scores=True, output_logits=True, **arguments
    )
    assert isinstance(ours, GenerateDecoderOnlyOutput)
    assert torch.equal(plain.sequences, ours.sequences)
    assert len(plain.scores) == len(ours.scores) == len(ours.logits) == plain.sequences.shape[1] - 12
    for expected, got in zip(plain.scores + plain.logits, ours.scores + ours.logits, strict=True):
        torch.testing.assert_close(got, expected, **TOLERANCE)


def test_only_what_was_asked_for() -> None:
    _, ours = _both(tiny_model("llama"), prompts(1), max_new_tokens=8)
    assert ours.scores is None and ours.logits is None
    assert ours.speculation.emitted == 8


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("batch", [1, 3])
def test_returned_cache_holds_what_plain_generate_cached(architecture: str, batch: int) -> None:
    """Would catch: tree nodes left in wrong slots, padding of ended rows not read, a length off by one."""
    plain, ours = _both(tiny_model(architecture), prompts(batch), max_new_tokens=16, **ENDS)
    cache = ours.past_key_values
    assert isinstance(cache, RaggedCache)
    assert cache.get_seq_length() == plain.past_key_values.get_seq_length()
    assert len(set(cache.lengths)) == 1
    first = (prompts(batch)["attention_mask"] == 0).sum(dim=1)
    for layer, expected in zip(cache.layers, plain.past_key_values.layers, strict=True):
        held, length = expected.keys.shape[2], cache.get_seq_length()
        for row in range(batch):
            start = max(int(first[row]), length - held)
            torch.testing.assert_close(
                layer.keys[row, :, start:length], expected.keys[row, :, start - length + held :], **TOLERANCE
            )


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mistral"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("given", ["none", "dynamic"])
def test_second_turn_continues_from_the_first(architecture: str, batch: int, given: str) -> None:
    """A chat: the cache of the first turn goes into the second, which reads only the new tokens."""
    model, inputs = tiny_model(architecture), prompts(batch)

    def turns(speculative: bool):
        arguments = {"max_new_tokens": 9, "return_dict_in_generate": True}
        if speculative:
            arguments["candidate_generator"] = NgramCandidates(k=4, branches=2)
        cache = {} if given == "none" else {"past_key_values": DynamicCache(config=model.config)}
        first = model.generate(**inputs, **arguments, **cache)
        question = torch.full((batch, 3), 17)
        ids = torch.cat([first.sequences, question], dim=1)
        mask = torch.cat([inputs["attention_mask"], torch.ones(batch, 12, dtype=torch.long)], dim=1)
        read: list[int] = []
        handle = model.register_forward_pre_hook(
            lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        second = model.generate(input_ids=ids, attention_mask=mask, past_key_values=first.past_key_values, **arguments)
        handle.remove()
        return second, read[0]

    (plain, _), (ours, read) = turns(False), turns(True)
    assert torch.equal(plain.sequences, ours.sequences)
    assert 4 <= read <= 4 + 4  # the question, the last token of the first turn, and what was guessed behind them
    assert type(ours.past_key_values) is (RaggedCache if given == "none" else DynamicCache)


def test_a_given_dynamic_cache_is_updated_in_place() -> None:
    """Plain `generate` leaves the text in the cache object that the user gave; so do we, even without a dict."""
    model, inputs = tiny_model("gemma2"), prompts(1)
    plain, ours = DynamicCache(config=model.config), DynamicCache(config=model.config)
    model.generate(**inputs, max_new_tokens=12, past_key_values=plain)
    model.generate(**inputs, max_new_tokens=12, past_key_values=ours, candidate_generator=NgramCandidates())
    assert ours.get_seq_length() == plain.get_seq_length()
    for expected, got in zip(plain.layers, ours.layers, strict=True):
        torch.testing.assert_close(got.keys, expected.keys, **TOLERANCE)
        torch.testing.assert_close(got.values, expected.values, **TOLERANCE)


def test_our_cache_works_in_plain_generate() -> None:
    model, inputs = tiny_model("gemma2"), prompts(1)
    first = model.generate(
        **inputs, max_new_tokens=8, return_dict_in_generate=True, candidate_generator=NgramCandidates()
    )
    ids = torch.cat([first.sequences, torch.tensor([[3, 4]])], dim=1)
    expected = model.generate(ids, max_new_tokens=8)
    assert torch.equal(model.generate(ids, max_new_tokens=8, past_key_values=first.past_key_values), expected)


def test_chunked_prefill() -> None:
    model, inputs = tiny_model("llama"), prompts(2)
    expected = model.generate(**inputs, max_new_tokens=10)
    ours = model.generate(**inputs, max_new_tokens=10, prefill_chunk_size=5, candidate_generator=NgramCandidates())
    assert torch.equal(expected, ours)


def test_statistics_stay_with_the_generator() -> None:
    """Only a tensor is returned: the user's own object keeps the numbers; another object has none."""
    model, mine, other = tiny_model("llama"), NgramCandidates(), NgramCandidates()
    ids = model.generate(**prompts(2), max_new_tokens=20, candidate_generator=mine)
    assert mine.speculation.emitted == 2 * (ids.shape[1] - 12)
    assert other.speculation is None
    assert mine.speculation.seconds["total"] >= mine.speculation.seconds["forward"] > 0


def test_origins_tell_every_token() -> None:
    model, inputs = tiny_model("llama"), prompts(2)
    answers = model.generate(**inputs, max_new_tokens=20)[:, 12:]
    output = model.generate(
        **inputs, max_new_tokens=20, return_dict_in_generate=True, candidate_generator=Oracle(answers, 1.0, k=4)
    )
    for row in range(2):
        assert output.speculation.origins(row) == ([True] * 4 + [False]) * 4
