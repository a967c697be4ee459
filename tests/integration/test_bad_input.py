"""Promise 8: bad input gets one sentence that names the argument, and the model is left as it was."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_specgen import Candidates, DraftTree, NgramCandidates, NgramHistory, speculate
from hf_specgen.candidates import Drafter
from tests.helpers import Oracle, plain_and_speculative, prompts, tiny_model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "k must be at least 1, got 0"),
        ({"k": -3}, "k must be at least 1, got -3"),
        ({"min_ngram": 0}, "min_ngram must be at least 1, got 0"),
        ({"min_ngram": 4, "max_ngram": 3}, "max_ngram must be at least min_ngram=4, got 3"),
        ({"branches": 0}, "branches must be at least 1, got 0"),
    ],
)
def test_ngram_settings(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        NgramCandidates(**arguments)


def test_history_settings() -> None:
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        NgramHistory(max_tokens=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"num_beams": 2, "do_sample": True}, "num_beams=2"),
        ({"use_cache": False}, "leave out use_cache=False"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"cache_implementation": "static"}, "StaticCache"),
        ({"synced_gpus": True}, "synced_gpus"),
        (
            {"verification": "magic"},
            "verification must be 'coupled', 'rejection', 'typical' or a Verifier, got 'magic'",
        ),
        ({"custom_generate": lambda *args, **kwargs: None}, "custom_generate"),
    ],
)
def test_arguments_of_generate(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny_model("llama").generate(**prompts(1), max_new_tokens=4, candidate_generator=NgramCandidates(), **arguments)


def test_assistant_model_as_well() -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="assistant_model"):
        model.generate(**prompts(1), assistant_model=model, candidate_generator=NgramCandidates())


def test_something_that_is_no_generator() -> None:
    with pytest.raises(TypeError, match=r"candidate_generator must be a CandidateGenerator .* got 5"):
        tiny_model("llama").generate(**prompts(1), candidate_generator=5)
    with pytest.raises(TypeError, match="candidate_generator must be"):
        speculate("ngram")


def test_a_static_cache_of_the_user() -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="not with StaticCache"):
        model.generate(
            **prompts(1),
            max_new_tokens=4,
            past_key_values=StaticCache(config=model.config, max_cache_len=32),
            candidate_generator=NgramCandidates(),
        )


@pytest.mark.parametrize("shape", [(1, 0), (0, 4)])
def test_empty_prompts(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        tiny_model("llama").generate(
            torch.empty(shape, dtype=torch.long), max_new_tokens=4, candidate_generator=NgramCandidates()
        )


def test_prompts_as_embeddings() -> None:
    with pytest.raises(ValueError, match="not as inputs_embeds"):
        tiny_model("llama").generate(
            inputs_embeds=torch.randn(1, 5, 64), max_new_tokens=4, candidate_generator=NgramCandidates()
        )


def test_a_prompt_of_one_token() -> None:
    model, inputs = tiny_model("llama"), {"input_ids": torch.tensor([[5]])}
    plain, output = plain_and_speculative(model, inputs, {"accuracy": 0.7}, max_new_tokens=12)
    assert torch.equal(plain, output.sequences)
    ours = model.generate(**inputs, max_new_tokens=12, candidate_generator=NgramCandidates(branches=3))
    assert torch.equal(plain, ours)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("gpt_neo", "builds its local attention mask inside the layers"),
        ("bloom", "takes no position_ids"),
        ("qwen3_5_text", "cannot be rolled back"),
        ("qwen3_next", "cannot be rolled back"),
    ],
)
def test_models_that_cannot(architecture: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_model(architecture).generate(**prompts(1), max_new_tokens=4, candidate_generator=NgramCandidates())


def test_attention_without_mask_support() -> None:
    model = tiny_model("llama")
    before = model.config._attn_implementation
    try:
        model.config._attn_implementation = "flash_attention_2"
        with pytest.raises(ValueError, match="load the model with attn_implementation='sdpa' or 'eager'"):
            model.generate(**prompts(1), max_new_tokens=4, candidate_generator=NgramCandidates())
    finally:
        model.config._attn_implementation = before


def test_encoder_decoder() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=99, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    with pytest.raises(ValueError, match="encoder-decoder"):
        T5ForConditionalGeneration(config).generate(
            torch.tensor([[1, 2]]), max_new_tokens=4, candidate_generator=NgramCandidates()
        )


class _Breaks(Candidates):
    """Guesses right for two steps, then raises."""

    def __init__(self, answers: torch.Tensor):
        self.inner = Oracle(answers, 1.0)

    def bind(self, context, model) -> Drafter:
        inner = self.inner.bind(context, model)

        class Breaking(Drafter):
            steps = 0

            def draft(self, context) -> DraftTree:
                self.steps += 1
                if self.steps > 2:
                    raise RuntimeError("no more guesses")
                return inner.draft(context)

        return Breaking()


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_an_exception_in_the_middle_leaves_everything_as_it_was(architecture: str) -> None:
    """Model, configs and the user's cache are the same; the next plain call writes the same text."""
    model, inputs = tiny_model(architecture), prompts(2)
    expected = model.generate(**inputs, max_new_tokens=30)
    config, generation_config = model.config.to_dict(), model.generation_config.to_dict()
    cache = DynamicCache(config=model.config)
    with pytest.raises(RuntimeError, match="no more guesses"):
        model.generate(
            **inputs, max_new_tokens=30, past_key_values=cache, candidate_generator=_Breaks(expected[:, 12:])
        )
    assert cache.get_seq_length() == 0
    assert model.config.to_dict() == config and model.generation_config.to_dict() == generation_config
    assert torch.equal(model.generate(**inputs, max_new_tokens=30), expected)


def test_an_exception_leaves_our_own_cache_as_it_was() -> None:
    model, inputs = tiny_model("llama"), prompts(1)
    first = model.generate(
        **inputs, max_new_tokens=5, return_dict_in_generate=True, candidate_generator=NgramCandidates()
    )
    expected = model.generate(first.sequences, max_new_tokens=30)
    lengths = first.past_key_values.lengths
    with pytest.raises(RuntimeError, match="no more guesses"):
        model.generate(
            first.sequences,
            max_new_tokens=30,
            past_key_values=first.past_key_values,
            candidate_generator=_Breaks(expected[:, 17:]),
        )
    assert first.past_key_values.lengths == lengths
    ours = model.generate(
        first.sequences, max_new_tokens=30, past_key_values=first.past_key_values, candidate_generator=NgramCandidates()
    )
    assert torch.equal(ours, expected)
