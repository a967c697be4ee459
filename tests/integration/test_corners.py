"""Unusual inputs: prompts of one token, other integer types, positional arguments, lower precision."""

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from hf_specgen import NgramCandidates
from tests.helpers import RecordingStreamer, fresh_model, prompts, tiny_model


def test_generate_int32_prompt_keeps_its_dtype() -> None:
    model, inputs = tiny_model("llama"), {"input_ids": prompts(1)["input_ids"].int()}
    plain = model.generate(**inputs, max_new_tokens=6)
    ours = model.generate(**inputs, max_new_tokens=6, candidate_generator=NgramCandidates())
    assert ours.dtype == plain.dtype and torch.equal(ours, plain)


def test_generate_with_positional_arguments_same_tokens() -> None:
    """`generate(inputs, generation_config, logits_processor, stopping_criteria, …, streamer)`."""
    model, ids, seen = tiny_model("llama"), prompts(1)["input_ids"], RecordingStreamer()
    arguments = (ids, None, LogitsProcessorList(), StoppingCriteriaList(), None, None, None, seen)
    ours = model.generate(*arguments, max_new_tokens=5, candidate_generator=NgramCandidates())
    assert torch.equal(ours, model.generate(ids, max_new_tokens=5))
    assert seen.ended == 1 and len(seen.chunks) == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_generate_in_lower_precision_same_first_token(dtype: torch.dtype) -> None:
    """Later tokens may differ at near-ties, since k rows round differently from one; the first pass is the same."""
    model = fresh_model("llama").to(dtype)
    plain = model.generate(**prompts(2), max_new_tokens=10)
    ours = model.generate(**prompts(2), max_new_tokens=10, candidate_generator=NgramCandidates(tree=16))
    assert ours.shape == plain.shape and torch.equal(ours[:, :13], plain[:, :13])
