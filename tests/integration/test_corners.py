"""Unusual inputs: prompts of one token, other integer types, positional arguments, lower precision."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from hf_specgen import Candidates, CombinedCandidates, DraftModelCandidates, NgramCandidates, RecyclingCandidates
from tests.helpers import Oracle, RecordingStreamer, assert_same_tokens, fresh_model, prompts, tiny_model


@pytest.mark.parametrize("candidates", [partial(Oracle, accuracy=0.7), NgramCandidates(tree=16)])
def test_generate_prompt_of_one_token_same_tokens(candidates: object) -> None:
    assert_same_tokens(tiny_model("llama"), {"input_ids": torch.tensor([[5]])}, candidates, max_new_tokens=12)


@pytest.mark.parametrize("candidates", [RecyclingCandidates(k=3), CombinedCandidates()], ids=repr)
def test_generate_row_of_padding_only_same_tokens(candidates: Candidates) -> None:
    """Would catch: the last token taken of a prompt that has none."""
    model, ids = tiny_model("llama"), torch.tensor([[0, 0, 0], [5, 6, 5]])
    arguments = {"attention_mask": (ids != 0).long(), "max_new_tokens": 8}
    assert torch.equal(
        model.generate(ids, **arguments, candidate_generator=candidates), model.generate(ids, **arguments)
    )


@pytest.mark.parametrize("batch", [1, 2])
def test_generate_prompts_of_padding_only_same_tokens(batch: int) -> None:
    """Would catch: a draft model's prompt without a column."""
    model, ids = tiny_model("llama"), torch.zeros(batch, 2, dtype=torch.long)
    arguments = {"attention_mask": torch.zeros_like(ids), "max_new_tokens": 8}
    draft = DraftModelCandidates(tiny_model("llama"), k=3)
    assert torch.equal(model.generate(ids, **arguments, candidate_generator=draft), model.generate(ids, **arguments))
    assert draft.speculation is not None and draft.speculation.accepted > 0


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
