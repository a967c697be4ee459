"""Offloaded, quantized and static caches: the tokens of plain `generate` with the same cache, and its contents."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from transformers import DynamicCache, QuantizedCache, StaticCache

from hf_specgen import FixedDepth, LayerSkipCandidates, attached
from hf_specgen.compat import CACHE
from hf_specgen.targets.cache import RaggedCache
from tests.helpers.comparison import SAMPLING, answers, assert_same_tokens, plain_and_speculative
from tests.helpers.models import fresh_model, prompts, tiny_model
from tests.helpers.oracle import ORACLES

NEW = 16
GROUPED: dict[str, dict[str, Any]] = {
    "hqq": {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1, "q_group_size": 16, "residual_length": 6},
    "hqq_2_bits": {"backend": "hqq", "nbits": 2, "q_group_size": 16, "residual_length": 6},
    "quanto": {"backend": "quanto", "nbits": 4, "q_group_size": 16, "residual_length": 6},
}
LIBRARIES = {"hqq": "hqq", "hqq_2_bits": "hqq", "quanto": "optimum"}
KINDS: dict[str, dict[str, Any]] = {
    "static": {"cache_implementation": "static"},
    "fp8": {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
    **{name: {"cache_implementation": "quantized", "cache_config": config} for name, config in GROUPED.items()},
}
STRATEGIES = {
    **{name: ORACLES[name] for name in ("always", "sometimes", "tree")},
    "layer_skip": LayerSkipCandidates(exit_layer=1, policy=FixedDepth()),
}


def needs_library(kind: str) -> None:
    """Skip where the library of a backend is not installed."""
    if kind in LIBRARIES and importlib.util.find_spec(LIBRARIES[kind]) is None:
        pytest.skip(f"{LIBRARIES[kind]} is not installed")


def new_cache(kind: str, model: Any) -> Any:
    """An empty cache of a kind, as a caller makes it."""
    needs_library(kind)
    if kind == "static":
        return StaticCache(model.config, max_cache_len=80)
    return QuantizedCache(config=model.config, **KINDS[kind]["cache_config"])


def rows_of(kind: str) -> int:
    """How many rows a cache of this kind may have where their number does not matter."""
    return 1 if kind in GROUPED else 3


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_cache_implementation_same_tokens_and_kind_of_cache(kind: str, strategy: str) -> None:
    """Would catch: drafts among quantized keys, a group that begins a token too late, a cache of another class."""
    needs_library(kind)
    model, inputs = tiny_model("llama"), prompts(rows_of(kind))
    call = {"max_new_tokens": NEW, "return_dict_in_generate": True, **KINDS[kind], **SAMPLING["sampled"]}
    plain, output = plain_and_speculative(model, inputs, STRATEGIES[strategy], **call)
    expected = model.generate(**inputs, max_new_tokens=2, return_dict_in_generate=True, **KINDS[kind])
    assert plain.tolist() == output.sequences.tolist() and output.speculation.accepted > 0
    assert type(output[CACHE]) is type(expected[CACHE])
    assert int(output[CACHE].get_seq_length()) == plain.shape[1] - 1


@pytest.mark.parametrize("plain_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_given_cache_is_filled_as_plain_generate_fills_it_and_continued(kind: str, plain_first: bool) -> None:
    """Would catch: slots, windows or quantized groups that differ after a call, or are misread by the next one."""
    model, inputs = tiny_model("llama"), prompts(1)
    call = {"max_new_tokens": NEW, "return_dict_in_generate": True}
    caches = [new_cache(kind, model) for _ in range(2)]
    text = model.generate(**inputs, **call, **{CACHE: caches[0]}).sequences
    oracle = ORACLES["tree"](answers(model, inputs, text))
    ours = model.generate(**inputs, **call, **{CACHE: caches[1]}, candidate_generator=oracle)
    assert torch.equal(ours.sequences, text) and ours[CACHE] is caches[1]
    token = {"input_ids": text[:, -1:], "logits_to_keep": 1}
    logits = [model(**token, **{CACHE: cache}).logits for cache in caches]
    assert torch.allclose(*logits, atol=1e-5)
    more = torch.cat([text, text[:, 3:9]], dim=1)
    plain = model.generate(more, max_new_tokens=NEW, **{CACHE: caches[not plain_first]})
    oracle = ORACLES["tree"](plain[:, more.shape[1] :])
    again = model.generate(more, max_new_tokens=NEW, **{CACHE: caches[plain_first]}, candidate_generator=oracle)
    assert torch.equal(again, plain)


@pytest.mark.parametrize("architecture", ["mistral", "gemma3_text", "deepseek_v3"])
def test_static_cache_of_windows_and_latent_attention_same_tokens(architecture: str) -> None:
    """Would catch: a window of the static layers that is not that of the mask; heads of other sizes."""
    call = {"max_new_tokens": 30, "cache_implementation": "static"}
    assert_same_tokens(tiny_model(architecture), prompts(3), ORACLES["tree"], **call, return_dict_in_generate=True)


@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static"])
def test_offloaded_cache_same_tokens_and_layers_on_the_cpu(kind: str) -> None:
    """Would catch: layers that stay on the device, or a cache of another class. Plain `generate` needs a GPU for it."""
    model, inputs = tiny_model("mistral"), prompts(3)
    call = {"max_new_tokens": NEW, "return_dict_in_generate": True}
    plain = model.generate(**inputs, **call)
    oracle = ORACLES["tree"](answers(model, inputs, plain.sequences))
    output = model.generate(**inputs, **call, cache_implementation=kind, candidate_generator=oracle)
    assert torch.equal(output.sequences, plain.sequences)
    assert type(output[CACHE]) is (DynamicCache if kind == "offloaded" else StaticCache) and output[CACHE].offloading
    if kind == "offloaded":
        for mine, expected in zip(output[CACHE].layers, plain[CACHE].layers, strict=True):
            assert torch.allclose(mine.keys, expected.keys, atol=1e-5) and mine.keys.device.type == "cpu"


@pytest.mark.parametrize("kind", GROUPED)
def test_rows_of_a_cache_quantized_in_groups(kind: str) -> None:
    """Would catch: rows that are quantized together at different lengths. Few new tokens begin no group."""
    needs_library(kind)
    model, inputs, oracle = tiny_model("llama"), prompts(3), ORACLES["always"]
    assert_same_tokens(model, inputs, oracle, max_new_tokens=6, return_dict_in_generate=True, **KINDS[kind])
    with pytest.raises(ValueError, match="quantizes the keys of all rows together after every 6 tokens"):
        assert_same_tokens(model, inputs, oracle, max_new_tokens=7, return_dict_in_generate=True, **KINDS[kind])


def test_static_cache_that_is_too_short_is_refused() -> None:
    """Would catch: an error after the first tokens, or tokens that plain `generate` cannot make."""
    model, oracle = tiny_model("llama"), ORACLES["always"](torch.zeros(1, 9, dtype=torch.long))
    cache = StaticCache(model.config, max_cache_len=15)
    with pytest.raises(ValueError, match="has 15 slots, and a text of 12 tokens with 5 new ones may need 16"):
        model.generate(**prompts(1), max_new_tokens=5, **{CACHE: cache}, candidate_generator=oracle)
    model.generate(**prompts(1), max_new_tokens=4, **{CACHE: cache}, candidate_generator=oracle)


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_static_cache_with_a_prompt_of_nothing_but_padding_is_refused(architecture: str) -> None:
    """Would catch: other tokens, since fully masked rows attend to all slots alike, also to those not yet written.

    All layers of Mistral have a window, so that no layer limits the length.
    """
    model, oracle = tiny_model(architecture), ORACLES["always"](torch.zeros(1, 9, dtype=torch.long))
    inputs = {"input_ids": torch.full((1, 4), 7), "attention_mask": torch.zeros(1, 4, dtype=torch.long)}
    with pytest.raises(ValueError, match="nothing but padding attends to every slot of a StaticCache"):
        model.generate(
            **inputs, max_new_tokens=5, cache_implementation="static", pad_token_id=7, candidate_generator=oracle
        )


def test_self_check_leaves_the_length_of_later_static_caches_as_it_is() -> None:
    """Would catch: an equivalence test that makes the static caches of later plain calls longer."""
    model = fresh_model("llama")
    model.generation_config.cache_implementation = "static"
    model.generation_config.pad_token_id = 0
    with attached(model, LayerSkipCandidates(exit_layer=1)):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=2)
    plain = model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, return_dict_in_generate=True)
    assert plain[CACHE].get_max_length() == 3


@pytest.mark.parametrize("kind", KINDS)
def test_memory_of_a_call_is_that_of_the_given_kind_of_cache(kind: str) -> None:
    """Would catch: keys that are kept as they were beside the quantized ones, or buffers for twice the text."""
    model, heads = tiny_model("llama"), (1, 2, 4000, 64)
    given = new_cache(kind, model)
    if kind == "static":
        given = StaticCache(model.config, max_cache_len=4100)
    states = torch.randn(heads), torch.randn(heads)
    ours = RaggedCache.from_dynamic(given)
    for cache in (given, ours):
        cache.update(*states, 0)
        cache.update(*(part[:, :, :5] for part in states), 0)
    assert numbers_of(ours) <= 1.1 * numbers_of(given)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("strategy", ["sometimes", "tree"])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_tensors_of_a_static_cache_are_used_and_not_copied(strategy: str, rows: int, is_chunked: bool) -> None:
    """Would catch: a second cache beside one that has its tensors already, drafts that are left in them."""
    model, inputs = tiny_model("llama"), prompts(rows)
    columns = inputs["input_ids"].shape[1]
    chunks = {"prefill_chunk_size": 4} if is_chunked else {}
    call = {"max_new_tokens": NEW, "return_dict_in_generate": True, **chunks}
    caches = [StaticCache(model.config, max_cache_len=columns + NEW) for _ in range(2)]
    for cache in caches:  # as `generate` does before a prefill in chunks
        cache.early_initialization(rows, model.config.num_key_value_heads, model.config.head_dim, torch.float32, "cpu")
    assert numbers_of(RaggedCache.from_dynamic(caches[1], columns + NEW)) == numbers_of(caches[1])
    held = [layer.keys.data_ptr() for layer in caches[1].layers]
    plain = model.generate(**inputs, **call, **{CACHE: caches[0]}).sequences
    oracle = ORACLES[strategy](answers(model, inputs, plain))
    ours = model.generate(**inputs, **call, **{CACHE: caches[1]}, candidate_generator=oracle)
    assert torch.equal(ours.sequences, plain)
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        assert torch.allclose(*(layer.keys for layer in layers), atol=1e-5)
        assert torch.equal(*(layer.cumulative_length for layer in layers))
        assert layers[1].keys.untyped_storage().nbytes() == layers[0].keys.untyped_storage().nbytes()
    if strategy == "sometimes" and rows == 1:
        assert [layer.keys.data_ptr() for layer in caches[1].layers] == held


def numbers_of(cache: Any) -> int:
    """The bytes of all tensors that a cache refers to."""
    found: dict[int, int] = {}
    objects = [vars(layer) for layer in cache.layers]
    while objects:
        one = objects.pop()
        if hasattr(one, "__tensor_flatten__"):
            objects += [getattr(one, name) for name in one.__tensor_flatten__()[0]]
        elif isinstance(one, torch.Tensor):
            found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        elif isinstance(one, dict):
            objects += one.values()
        elif isinstance(one, list | tuple):
            objects += one
        elif type(one).__module__.startswith("transformers.cache_utils"):
            objects.append(vars(one))
    return sum(found.values())
