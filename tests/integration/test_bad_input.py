"""Bad input raises an error that names the argument, its value and the remedy, and leaves the model as it was."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_specgen import DraftModelCandidates, LayerSkipCandidates, NgramCandidates, NgramHistory, attach, speculate
from hf_specgen.targets.cache import RaggedCache
from tests.helpers import FailingOracle, Oracle, fresh_model, prompts, tiny_model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "k must be at least 1, got 0"),
        ({"k": -3}, "k must be at least 1, got -3"),
        ({"k": "many"}, """k must be at least 1, got 'many'; or give "auto\""""),
        ({"k": True}, "k must be at least 1, got True"),
        ({"min_ngram": 0}, "min_ngram must be at least 1, got 0"),
        ({"min_ngram": 4, "max_ngram": 3}, "max_ngram must be at least min_ngram=4, got 3"),
        ({"branches": 0}, "branches must be at least 1, got 0"),
    ],
)
def test_ngram_candidates_bad_setting_raises(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        NgramCandidates(**arguments)


def test_ngram_history_of_no_tokens_raises() -> None:
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        NgramHistory(max_tokens=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 2}, "not with beam_search; set num_beams=1 instead of 2"),
        ({"num_beams": 2, "do_sample": True}, "set num_beams=1 instead of 2"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "not with contrastive_search; leave out penalty_alpha="),
        ({"dola_layers": "low"}, "not with dola_generation; leave out dola_layers="),
        ({"assistant_early_exit": 1}, "not with assisted_generation; leave out assistant_early_exit="),
        ({"use_cache": False}, "leave out use_cache=False"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"cache_implementation": "static"}, "StaticCache"),
        ({"synced_gpus": True}, "synced_gpus"),
        ({"verification": "magic"}, "verification must be 'exact', 'rejection', 'typical' or a Verifier, got 'magic'"),
        ({"custom_generate": lambda *args, **kwargs: None}, "custom_generate"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_generate_unsupported_argument_raises(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny_model("llama").generate(**prompts(1), max_new_tokens=4, candidate_generator=NgramCandidates(), **arguments)


@pytest.mark.parametrize("is_attached", [False, True], ids=["keyword", "attached"])
@pytest.mark.parametrize(
    ("more", "named", "message"),
    [
        ((), {"inputs": torch.tensor([[1, 2]])}, "multiple values for argument 'inputs'"),
        ((None,) * 20, {}, "too many positional arguments"),
    ],
    ids=["twice", "too_many"],
)
def test_generate_wrong_positional_arguments_raises(more: tuple, named: dict, message: str, is_attached: bool) -> None:
    """Would catch: another prompt than the first argument, or arguments that are dropped."""
    model = fresh_model("llama")
    how: dict[str, Any] = {} if is_attached else {"candidate_generator": NgramCandidates()}
    if is_attached:
        attach(model, NgramCandidates())
    with pytest.raises(TypeError, match=message):
        model.generate(prompts(1)["input_ids"], *more, **named, max_new_tokens=4, **how)


def test_generate_with_assistant_model_raises() -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="assistant_model"):
        model.generate(**prompts(1), assistant_model=model, candidate_generator=NgramCandidates())


def test_generate_with_no_candidate_generator_object_raises() -> None:
    with pytest.raises(TypeError, match=r'candidate_generator must be "auto" or a Candidate.* got 5'):
        tiny_model("llama").generate(**prompts(1), candidate_generator=5)


def test_speculate_with_no_candidate_generator_object_raises() -> None:
    with pytest.raises(TypeError, match="candidate_generator must be"):
        speculate("ngram")


@pytest.mark.parametrize("place", ["call", "strategy"])
def test_policy_of_another_type_raises(place: str) -> None:
    with pytest.raises(TypeError, match="policy must be a Policy"):
        if place == "strategy":
            NgramCandidates(policy=3)  # type: ignore[arg-type]
        tiny_model("llama").generate(**prompts(1), candidate_generator=NgramCandidates(), policy=3)


@pytest.mark.parametrize("how", ["speculate", "attach"])
def test_monitor_of_another_type_raises(how: str) -> None:
    with pytest.raises(TypeError, match=r"monitor must be a Monitor such as .* got 'x'"):
        if how == "attach":
            attach(fresh_model("llama"), monitor="x")  # type: ignore[arg-type]
        speculate(NgramCandidates(), monitor="x")  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [None, 3])
def test_draft_model_of_another_type_raises(given: Any) -> None:
    with pytest.raises(TypeError, match=f"model_or_id must be a loaded model, a Hub id or a folder, got {given}"):
        DraftModelCandidates(given)


def test_draft_model_path_is_a_folder() -> None:
    assert repr(DraftModelCandidates(Path("folder"), k=2)) == repr(DraftModelCandidates("folder", k=2))


@pytest.mark.parametrize("given", ["2", True, None, 2.0])
def test_layer_skip_exit_layer_of_another_type_raises(given: Any) -> None:
    with pytest.raises(ValueError, match=f"exit_layer must be a number of layers such as 4, got {given!r}"):
        LayerSkipCandidates(given)


def test_generate_with_static_cache_raises() -> None:
    model = tiny_model("llama")
    cache = StaticCache(config=model.config, max_cache_len=32)
    with pytest.raises(ValueError, match="not with StaticCache; leave past_key_values out"):
        model.generate(**prompts(1), max_new_tokens=4, past_key_values=cache, candidate_generator=NgramCandidates())


@pytest.mark.parametrize(
    ("configured", "named"), [("static", "StaticCache"), ("offloaded", "an offloaded DynamicCache")]
)
def test_refused_cache_of_the_generation_config_names_a_remedy_that_works(configured: str, named: str) -> None:
    """Would catch: a cause that is not true of an offloaded cache, and a remedy that does not help."""
    model = fresh_model("llama")
    model.generation_config.cache_implementation = configured
    settings = {**prompts(1), "max_new_tokens": 4, "candidate_generator": NgramCandidates()}
    with pytest.raises(ValueError, match=f'not with {named}; give cache_implementation="dynamic"'):
        model.generate(**settings)
    model.generate(**settings, cache_implementation="dynamic")


def test_refused_offloaded_cache_names_the_remedy() -> None:
    cache = DynamicCache(offloading=True)
    with pytest.raises(ValueError, match="not with an offloaded DynamicCache; leave past_key_values out"):
        tiny_model("llama").generate(
            **prompts(1), max_new_tokens=4, past_key_values=cache, candidate_generator=NgramCandidates()
        )


@pytest.mark.parametrize("shape", [(1, 0), (0, 4)])
def test_generate_empty_prompt_raises(shape: tuple[int, int]) -> None:
    ids = torch.empty(shape, dtype=torch.long)
    with pytest.raises(ValueError, match="prompt is empty"):
        tiny_model("llama").generate(ids, max_new_tokens=4, candidate_generator=NgramCandidates())


def test_generate_prompt_as_embeddings_raises() -> None:
    embeddings = torch.randn(1, 5, 64)
    with pytest.raises(ValueError, match="not as inputs_embeds"):
        tiny_model("llama").generate(inputs_embeds=embeddings, max_new_tokens=4, candidate_generator=NgramCandidates())


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("gpt_neo", "builds its local attention mask inside the layers"),
        ("bloom", "takes no position_ids"),
    ],
)
def test_generate_unsupported_architecture_raises(architecture: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_model(architecture).generate(**prompts(1), max_new_tokens=4, candidate_generator=NgramCandidates())


def test_generate_attention_without_tree_mask_raises() -> None:
    model = fresh_model("llama")
    model.config._attn_implementation = "own_kernel"
    with pytest.raises(ValueError, match="load the model with attn_implementation='sdpa' or 'eager'"):
        model.generate(**prompts(1), max_new_tokens=4, candidate_generator=NgramCandidates())


# After an exception


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_exception_in_draft_leaves_model_configs_and_given_cache_unchanged(architecture: str) -> None:
    """Would catch: a config changed for the call and not restored; a half-written cache of the caller."""
    model, inputs = tiny_model(architecture), prompts(2)
    expected = model.generate(**inputs, max_new_tokens=30)
    config, generation_config = model.config.to_dict(), model.generation_config.to_dict()
    cache = DynamicCache(config=model.config)
    failing = FailingOracle(expected[:, 12:])
    with pytest.raises(RuntimeError, match="the draft session failed"):
        model.generate(**inputs, max_new_tokens=30, past_key_values=cache, candidate_generator=failing)
    assert cache.get_seq_length() == 0
    assert model.config.to_dict() == config and model.generation_config.to_dict() == generation_config
    assert torch.equal(model.generate(**inputs, max_new_tokens=30), expected)


def test_exception_in_second_turn_leaves_ragged_cache_of_first_unchanged() -> None:
    model, inputs = tiny_model("llama"), prompts(1)
    first = model.generate(
        **inputs, max_new_tokens=5, return_dict_in_generate=True, candidate_generator=NgramCandidates()
    )
    mask = {"attention_mask": torch.ones_like(first.sequences)}  # the padding id is also a real token
    expected = model.generate(first.sequences, max_new_tokens=30, **mask)
    arguments = {"max_new_tokens": 30, **mask, "past_key_values": first.past_key_values}
    lengths = first.past_key_values.lengths
    with pytest.raises(RuntimeError, match="the draft session failed"):
        model.generate(first.sequences, **arguments, candidate_generator=FailingOracle(expected[:, 17:]))
    assert first.past_key_values.lengths == lengths
    ours = model.generate(first.sequences, **arguments, candidate_generator=NgramCandidates())
    assert torch.equal(ours, expected)


def test_exception_in_first_call_leaves_empty_ragged_cache_usable() -> None:
    model, inputs, cache = tiny_model("llama"), prompts(1), RaggedCache()
    expected = model.generate(**inputs, max_new_tokens=20)
    arguments = {**inputs, "max_new_tokens": 20, "past_key_values": cache}
    with pytest.raises(RuntimeError, match="the draft session failed"):
        model.generate(**arguments, candidate_generator=FailingOracle(expected[:, 12:]))
    ours = model.generate(**arguments, candidate_generator=Oracle(expected[:, 12:], 0.5))
    assert torch.equal(ours, expected)
