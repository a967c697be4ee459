"""Rows with equal prompts, as the samples of a group: prefilled once, with the states and tokens of rows alone."""

import inspect
from types import MethodType
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, GenerationConfig, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama.modeling_llama import LlamaAttention

from hf_specgen import AutoCandidates, NgramCandidates, compat
from hf_specgen.targets.hidden_states import HiddenStateTarget
from hf_specgen.targets.inputs import PreparedCall
from tests.fuzz.models import tiny_model
from tests.helpers import assert_same_tokens, fresh_model, prompts
from tests.helpers.head_fixtures import FIXTURES
from tests.helpers.models import small_llama
from tests.helpers.strategies import STRATEGIES, make

LAYERS = (0, 1, -1)
WITH_STATES_OF_THE_PROMPT = ["n-grams, tree", "draft model, tree", "layer skip", "Medusa, tree", "n-grams and EAGLE"]


def repeated(rows: list[int], **changes: Any) -> dict[str, torch.Tensor]:
    """Prompts of different lengths, left-padded, repeated in this order."""
    return {name: values[rows] for name, values in prompts(3).items()} | changes


def prefilled(model: Any, text: dict[str, torch.Tensor]) -> tuple[HiddenStateTarget, torch.Tensor]:
    mask = text["attention_mask"]
    kwargs = {**text, "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0), "use_cache": True}
    target = HiddenStateTarget(PreparedCall(model, kwargs.pop("input_ids"), GenerationConfig(), kwargs), LAYERS)
    return target, target.prefill()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma"])
def test_equal_prompts_are_prefilled_once_with_the_states_of_all_rows(kind: str) -> None:
    """Would catch: a prompt computed for each sample of a group, or logits, keys or states of another row's prompt."""
    model = fresh_model(kind)
    target, logits = prefilled(model, repeated([2, 0, 0, 2, 1]))
    assert target._inputs.prefill_rows == [0, 1, 1, 0, 2]
    model.register_forward_hook(lambda *_: None)  # which may hold something for each row: all rows are computed
    reference, expected = prefilled(model, repeated([2, 0, 0, 2, 1]))
    assert reference._inputs.prefill_rows is None
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(target.last_states(LAYERS), reference.last_states(LAYERS))
    assert target.cache.lengths == reference.cache.lengths
    for layer, other in zip(target.cache.layers, reference.cache.layers, strict=True):
        slots = layer.get_seq_length()
        torch.testing.assert_close(layer.keys[:, :, :slots], other.keys[:, :, :slots])


@torch.no_grad()
def test_rows_that_differ_in_anything_are_prefilled_apart() -> None:
    """Would catch: rows taken for equal whose tokens are, but not their padding."""
    model = fresh_model("llama")
    ids = torch.full((2, 6), 5)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    assert prefilled(model, {"input_ids": ids, "attention_mask": mask})[0]._inputs.prefill_rows is None
    assert prefilled(model, repeated([0, 1, 2]))[0]._inputs.prefill_rows is None


def replaced_preparation(model: Any, _: pytest.MonkeyPatch) -> None:
    model.prepare_inputs_for_generation = lambda ids, **kwargs: type(model).prepare_inputs_for_generation(
        model, ids, **kwargs
    )


def replaced_forward_of_the_class(model: Any, patch: pytest.MonkeyPatch) -> None:
    original = LlamaAttention.forward
    patch.setattr(LlamaAttention, "forward", lambda *args, **kwargs: original(*args, **kwargs))


def registered_attention(model: Any, _: pytest.MonkeyPatch) -> None:
    AttentionInterface.register("of_a_user", lambda *args, **kwargs: sdpa_attention_forward(*args, **kwargs))
    AttentionMaskInterface.register("of_a_user", sdpa_mask)
    model.set_attn_implementation("of_a_user")


@torch.no_grad()
@pytest.mark.parametrize("change", [replaced_preparation, replaced_forward_of_the_class, registered_attention])
def test_rows_are_prefilled_apart_where_a_function_may_hold_something_for_each(
    change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch: positions, or a steering vector, of the first row for all rows with its prompt."""
    model = fresh_model("llama")
    change(model, monkeypatch)
    assert prefilled(model, repeated([0, 0, 1]))[0]._inputs.prefill_rows is None


@torch.no_grad()
def test_token_ids_are_compared_exactly() -> None:
    """Would catch: ids that are rounded to those of another prompt, as beside a mask in half precision."""
    ids = torch.tensor([[0, 1000, 7], [0, 1001, 7]])
    mask = torch.tensor([[0, 1, 1]] * 2).bfloat16()
    model = small_llama(2000, seed=0)
    given = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, **given)
    assert torch.equal(plain, model.generate(ids, **given, candidate_generator=NgramCandidates()))


@torch.no_grad()
def test_samples_of_a_padded_prompt_are_prefilled_apart() -> None:
    """Would catch: padding that a layer leaves in a single row, as kernels for packed sequences may."""
    model = fresh_model("llama")
    text = {"input_ids": torch.tensor([[0, 5, 6]] * 2), "attention_mask": torch.tensor([[0, 1, 1]] * 2)}
    assert prefilled(model, text)[0]._inputs.prefill_rows is None


@pytest.mark.parametrize("kind", ["chunks", "cleared"])
def test_static_cache_that_was_made_for_all_rows_same_tokens(kind: str) -> None:
    """Would catch: a prompt prefilled in one row into a cache that has several."""
    model = fresh_model("llama")
    text = repeated([1, 1, 1])
    given: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    if kind == "chunks":
        given |= {"cache_implementation": "static", "prefill_chunk_size": 2}
    plain = model.generate(**text, **given)
    if kind == "cleared":
        cache = StaticCache(model.config, max_cache_len=64)
        model.generate(**text, **{compat.CACHE: cache}, **given)
        cache.reset()
        given[compat.CACHE] = cache
    assert torch.equal(plain, model.generate(**text, **given, candidate_generator=NgramCandidates(k=3)))


def test_equal_turns_after_states_of_different_texts_same_tokens() -> None:
    """Would catch: a cache of states alone, which has no length, taken for an empty one."""
    model = tiny_model("mamba")
    first: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    texts = torch.tensor([[5, 6, 7, 8], [9, 3, 4, 2]])
    tokens = []
    for strategy in ({}, {"candidate_generator": NgramCandidates(k=3)}):
        first[compat.CACHE] = DynamicCache(config=model.config)
        cache = model.generate(texts, **first).past_key_values
        turn = torch.cat([texts, texts, torch.tensor([[5, 6]] * 2)], dim=1)
        given = {compat.CACHE: cache, "max_new_tokens": 4, "do_sample": False}
        tokens.append(model.generate(turn, **given, **strategy))
    assert torch.equal(*tokens)


def test_draft_model_that_reads_the_target_same_tokens() -> None:
    """Would catch: features of all rows added to the embeddings of one row for each prompt."""
    fixture = FIXTURES["pard2_llama"]
    strategy = AutoCandidates.from_pretrained(fixture.head_folder, k=5)
    assert_same_tokens(fixture.target, repeated([1, 1, 0]), strategy, max_new_tokens=12, do_sample=False)


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8}])
@pytest.mark.parametrize("strategy", WITH_STATES_OF_THE_PROMPT)
def test_repeated_prompts_same_tokens(strategy: str, sampling: dict[str, Any]) -> None:
    """Would catch: samples of a group that begin with the states of another prompt, or a drafter that does."""
    given = {"max_new_tokens": 12, **sampling}
    assert_same_tokens(STRATEGIES[strategy].target(), repeated([1, 1, 0, 1]), make(strategy), **given)


def test_samples_of_a_group_same_tokens_and_cache() -> None:
    """Would catch: a returned cache with a row for each prompt in place of each sample."""
    given = {"num_return_sequences": 3, "do_sample": True, "max_new_tokens": 12, "return_dict_in_generate": True}
    model = fresh_model("llama")
    torch.manual_seed(0)
    plain = model.generate(**prompts(2), **given)
    torch.manual_seed(0)
    ours = model.generate(**prompts(2), candidate_generator=NgramCandidates(), **given)
    assert torch.equal(plain.sequences, ours.sequences)
    for layer, other in zip(plain.past_key_values.layers, ours.past_key_values.layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys)


@torch.no_grad()
def test_forward_that_a_trainer_replaces_shares_prompts() -> None:
    """Would catch: rollouts of TRL, or after mixed precision of Accelerate, that compute each row and drop none."""
    model = fresh_model("llama")
    original = model.forward
    trainers = {"__name__": "trl.trainer.utils", "original": original}
    exec("def forward(self, *args, **kwargs): return original(*args, **kwargs)", trainers)
    for replaced in (trainers["forward"], inspect.unwrap(type(model).forward)):
        model.forward = MethodType(replaced, model)
        assert prefilled(model, repeated([0, 0, 1]))[0]._inputs.prefill_rows == [0, 0, 1]
    model.forward = lambda *args, **kwargs: original(*args, **kwargs)
    assert prefilled(model, repeated([0, 0, 1]))[0]._inputs.prefill_rows is None
