"""Prompts that are given as `inputs_embeds`, with `input_ids` or without."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from hf_specgen import (
    DraftModelCandidates,
    EagleCandidates,
    LayerSkipCandidates,
    MedusaCandidates,
    NgramCandidates,
    PEagleCandidates,
    RecyclingCandidates,
)
from tests.fuzz.heads import random_head
from tests.helpers.comparison import END, SAMPLING
from tests.helpers.medusa import fitted_heads
from tests.helpers.models import perturbed_copy, prompts, shared_draft, tiny_model
from tests.helpers.oracle import ORACLES


def embedded(model: Any, batch: int, with_ids: bool, noise: float = 0.3) -> dict[str, torch.Tensor]:
    """Prompts of different lengths as embeddings, which are not those of their ids."""
    inputs = prompts(batch)
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).detach()
    inputs["inputs_embeds"] = embeddings + noise * torch.randn_like(embeddings)
    if not with_ids:
        inputs.pop("input_ids")
    return inputs


STRATEGIES: dict[str, Any] = {
    "ngram": NgramCandidates(k=3),
    "recycling": RecyclingCandidates(),
    "layer_skip": LayerSkipCandidates(exit_layer=1),
}


@pytest.mark.parametrize(
    ("with_ids", "batch", "sampling"),  # each pair of values
    [(False, 1, "greedy"), (False, 3, "sampled"), (True, 1, "sampled"), (True, 3, "greedy")],
)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "qwen3_next"])
def test_embeddings_same_tokens(architecture: str, with_ids: bool, batch: int, sampling: str) -> None:
    """Would catch: padding read from the ids alone, positions of an empty prompt, other columns in the output."""
    model = tiny_model(architecture)
    inputs = embedded(model, batch, with_ids)
    call = {"max_new_tokens": 14, "return_dict_in_generate": True, **SAMPLING[sampling], **END}
    torch.manual_seed(3)
    plain = model.generate(**inputs, **call).sequences
    state = torch.get_rng_state()
    new = plain[:, inputs["input_ids"].shape[1] :] if with_ids else plain
    for strategy in (ORACLES["tree"](new), ORACLES["sometimes"](new), *STRATEGIES.values()):
        if architecture == "qwen3_next" and isinstance(strategy, LayerSkipCandidates):
            continue
        torch.manual_seed(3)
        output = model.generate(**inputs, **call, candidate_generator=strategy)
        assert output.sequences.tolist() == plain.tolist() and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("batch", [1, 3])
def test_networks_draft_after_embeddings_whose_ids_are_given(batch: int) -> None:
    """Would catch: a draft model or head that is refused, or that misplaces its text, where it has ids."""
    model = tiny_model("llama")
    inputs = embedded(model, batch, with_ids=True, noise=0.0)
    plain = model.generate(**inputs, max_new_tokens=14)
    heads = fitted_heads(model, prompts(batch))
    for strategy in (DraftModelCandidates(shared_draft(model), k=3), MedusaCandidates(heads)):
        output = model.generate(**inputs, max_new_tokens=14, return_dict_in_generate=True, candidate_generator=strategy)
        assert torch.equal(output.sequences, plain) and output.speculation.accepted > 0


@pytest.mark.parametrize("name", ["eagle3", "peagle"])
def test_heads_that_read_the_embeddings_draft_after_given_ones(name: str) -> None:
    """Would catch: a crash of a head that reads hidden state 0, which the model does not compute of a given prompt."""
    model, inputs = tiny_model("llama"), embedded(tiny_model("llama"), 3, with_ids=True)
    head = random_head(name, model, Random(1))
    assert 0 in head.config.aux_hidden_state_layers
    strategy = EagleCandidates(head, k=3) if name == "eagle3" else PEagleCandidates(head, k=3)
    plain = model.generate(**inputs, max_new_tokens=14)
    output = model.generate(**inputs, max_new_tokens=14, return_dict_in_generate=True, candidate_generator=strategy)
    assert torch.equal(output.sequences, plain) and output.speculation.drafted > 0


def test_networks_without_ids_are_refused_with_the_reason() -> None:
    """Would catch: a crash inside a drafter, or drafts from a text without its prompt."""
    model = tiny_model("llama")
    inputs = embedded(model, 1, with_ids=False)
    heads = fitted_heads(model, prompts(1))
    for strategy in (DraftModelCandidates(shared_draft(model), k=3), MedusaCandidates(heads)):
        with pytest.raises(ValueError, match=r"reads the token ids of the prompt.*give input_ids beside them, or use"):
            model.generate(**inputs, max_new_tokens=4, candidate_generator=strategy)


def test_embeddings_alone_with_a_generator_of_transformers_same_tokens() -> None:
    """Would catch: a generator that is asked for candidates after the prompt, which has no tokens."""
    model = tiny_model("llama")
    inputs = embedded(model, 1, with_ids=False)
    assistant = perturbed_copy(model)
    config = GenerationConfig(min_length=0, max_length=60, pad_token_id=0, do_sample=False)
    no_text = torch.zeros(1, 0, dtype=torch.long)
    generator = AssistedCandidateGenerator(no_text, assistant, config, {})
    output = model.generate(**inputs, max_new_tokens=14, candidate_generator=generator, return_dict_in_generate=True)
    assert torch.equal(output.sequences, model.generate(**inputs, max_new_tokens=14))
    assert output.speculation.drafted > 0
