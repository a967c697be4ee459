"""Targets with a state, with images or audio, with other attention kernels, give the tokens of plain `generate`.

FlashAttention does not run on a CPU: a stand-in computes what it does, and refuses what it does not take.
"""

import copy
from collections.abc import Callable
from functools import cache, partial
from random import Random
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, QuantizedCache
from transformers.masking_utils import flash_attention_mask

import hf_specgen
from hf_specgen import (
    CombinedCandidates,
    DraftModelCandidates,
    EagleCandidates,
    FixedDepth,
    LayerSkipCandidates,
    NgramCandidates,
)
from hf_specgen.compat import CACHE
from hf_specgen.targets.replay_queue import MAX_UNCACHED, ReplayQueue
from tests.checkpoints import cases
from tests.checkpoints.inputs import with_media
from tests.checkpoints.table import CHECKPOINTS
from tests.fuzz.heads import random_head
from tests.fuzz.scripted import RandomDepths
from tests.helpers import SAMPLING, Oracle, assert_same_tokens, prompts, shared_draft, tiny_model
from tests.helpers.medusa import random_heads
from tests.helpers.models import SHARED, SPEC, fresh_model, recorded_inputs, stateful_model, width
from tests.helpers.multimodal import FEATURE_TOKEN, MULTIMODAL, multimodal_model, multimodal_prompts
from tests.helpers.oracle import ORACLES


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", [*SPEC["convolutional"], *SPEC["recurrent"]])
def test_state_after_partial_acceptance_and_plain_steps_same_tokens(kind: str, batch: int) -> None:
    """Would catch: a state that has read rejected tokens or padding, misses tokens, or is overwritten too early."""
    policy, sampling = (None, "sampled") if batch == 1 else (RandomDepths(), "greedy")
    oracle, arguments = partial(Oracle, accuracy=0.6, policy=policy), {"max_new_tokens": 14, **SAMPLING[sampling]}
    statistics = assert_same_tokens(stateful_model(kind), prompts(batch), oracle, **arguments)
    assert 0 < statistics.accepted < statistics.drafted


@pytest.mark.parametrize("kind", SPEC["counting_slots"])
def test_model_that_counts_positions_in_the_cache_takes_one_row(kind: str) -> None:
    """Would catch: wrong positions of shorter rows, or of layers behind the first one."""
    statistics = assert_same_tokens(stateful_model(kind), prompts(1), ORACLES["sometimes"], max_new_tokens=14)
    assert 0 < statistics.accepted < statistics.drafted
    with pytest.raises(ValueError, match="give one prompt at a time"):
        assert_same_tokens(stateful_model(kind), prompts(2), ORACLES["sometimes"], max_new_tokens=14)


@pytest.mark.parametrize("kind", ["nemotron_h", "zamba2"])
def test_time_steps_below_the_limit_of_a_scan_same_tokens(kind: str) -> None:
    """Would catch: a scan over a draft that raises short time steps to its limit, as steps over one token do not."""
    model = copy.deepcopy(stateful_model(kind))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                parameter -= 4
            elif parameter.dim() > 1:
                parameter *= 6
    statistics = assert_same_tokens(model, prompts(3), partial(Oracle, accuracy=0.6), max_new_tokens=14)
    assert 0 < statistics.accepted < statistics.drafted


def test_many_uncached_tokens_are_processed_in_a_pass_of_their_own() -> None:
    """Would catch: passes that grow without end where no draft is accepted whole, or tokens read twice."""
    model = stateful_model("qwen3_5_text")
    with recorded_inputs(model, width) as widths:
        assert assert_same_tokens(model, prompts(3), ORACLES["never"], max_new_tokens=48).accepted == 0
    longest = max(widths[1:])  # all but the prompt
    assert MAX_UNCACHED < longest <= MAX_UNCACHED + 1 + 1 + 4


def test_row_returns_to_where_its_last_pass_began_and_not_behind_it() -> None:
    """Would catch: a state that is to return to a pass before the last one, whose state is not kept."""
    queue = ReplayQueue(1)
    for tokens in ([1, 2], [5, 6, 7]):
        queue.next_pass([tokens], [True])
        queue.commit([len(tokens)])
    queue.cut(0, 4)
    assert (queue.texts, queue.cached) == ([[1, 2, 5, 6]], [2])
    assert queue.next_pass([[3]], [False]) == ([2], [[]])
    queue.commit([None])
    with pytest.raises(RuntimeError, match="cannot return to 1 tokens: its state is known at 2"):
        queue.cut(0, 1)


def test_given_cache_without_states_refused_and_with_them_continued() -> None:
    """Would catch: an error of Transformers about a layer that cannot take a state; states of a first turn ignored."""
    model, call = stateful_model("falcon_h1"), {"max_new_tokens": 6, "return_dict_in_generate": True}
    first = model.generate(**prompts(1), **call, **{CACHE: DynamicCache(config=model.config)})
    expected = model.generate(first.sequences, **call, **{CACHE: copy.deepcopy(first[CACHE])})
    call["candidate_generator"] = NgramCandidates(k=3)
    with pytest.raises(ValueError, match=r"are not those that .* give DynamicCache\(config=model.config\)"):
        model.generate(first.sequences, **call, **{CACHE: DynamicCache()})
    assert torch.equal(model.generate(first.sequences, **call, **{CACHE: first[CACHE]}).sequences, expected.sequences)


# Models that read images or audio beside text give the tokens of plain `generate`


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba", "qwen4_exp_text"])
def test_rows_of_equal_length_and_a_given_cache_same_tokens(kind: str) -> None:
    """Would catch: a cache of states asked for its length; an indexer with the positions of one row for all."""
    model = stateful_model(kind)
    inputs = {"input_ids": torch.randint(5, 90, (2, 9), generator=torch.Generator().manual_seed(1))}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    for arguments in ({}, {CACHE: DynamicCache(config=model.config)}):
        plain = model.generate(**inputs, max_new_tokens=14, **copy.deepcopy(arguments))
        candidates = Oracle(plain[:, 9:], accuracy=0.6)
        found = model.generate(**inputs, max_new_tokens=14, candidate_generator=candidates, **arguments)
        assert torch.equal(found, plain) and candidates.speculation.accepted > 0


def test_heads_on_layers_whose_states_are_wider_refused() -> None:
    """Would catch: matrices that do not fit, in the middle of a draft. Layers of Qwen4-Exp return two streams."""
    model = stateful_model("qwen4_exp_text")
    head = random_head("eagle3", model, Random(3))
    with pytest.raises(ValueError, match=r"read hidden states of size 64, and layers of Qwen4ExpForCausalLM return"):
        model.generate(**prompts(1), max_new_tokens=4, candidate_generator=EagleCandidates(head))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", MULTIMODAL)
def test_generate_with_image_or_audio_same_tokens(kind: str, batch: int) -> None:
    """Would catch: features passed to every step, wrong axes of positions, rows of a batch that are mixed up."""
    model, inputs = multimodal_model(kind), multimodal_prompts(kind, batch)
    sampling = SAMPLING["sampled" if batch == 1 else "greedy"]
    statistics = assert_same_tokens(model, inputs, ORACLES["tree"], max_new_tokens=14, **sampling)
    assert 0 < statistics.accepted < statistics.drafted


@pytest.mark.parametrize(
    ("kind", "speculative"), [("qwen2_5_vl", (1, 1)), ("qwen2_5_vl", (0, 1)), ("qwen3_vl", (0, 1, 0))]
)
def test_later_turns_after_an_image_same_tokens(kind: str, speculative: tuple[int, ...]) -> None:
    """Would catch: `rope_deltas` of the check's text, by which a later turn, a plain one too, places its tokens."""
    answers = []
    for turns in (speculative, [0] * len(speculative)):
        model, inputs = copy.deepcopy(multimodal_model(kind)), multimodal_prompts(kind, 1)
        for is_speculative in turns:
            more = {"candidate_generator": NgramCandidates(k=3)} if is_speculative else {}
            output = model.generate(**inputs, **more, max_new_tokens=8, return_dict_in_generate=True)
            ids = torch.cat([output.sequences, torch.tensor([[5, 6, 7]])], dim=1)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), CACHE: output[CACHE]}
            inputs["mm_token_type_ids"] = (ids == FEATURE_TOKEN).long()
        answers.append(output.sequences)
    assert torch.equal(*answers)


@pytest.mark.parametrize("name", ["two turns", "draft model", "oracle, sampled"])
def test_layers_that_attend_to_images_same_tokens(name: str) -> None:
    """Would catch: keys of images that are cut with the text, that a pass sees in part, or that a later turn loses."""
    checkpoint = next(row for row in CHECKPOINTS if row.kind == "mllama")
    case = next(case for case in cases.CASES if case.name == name)
    result = cases.run(cases.build(checkpoint), lambda model, batch: with_media(checkpoint, model, batch), case)
    assert result.status == cases.SAME, result.detail
    assert result.accepted > 0 or case.turns > 1  # answers of the first turn are no drafts for the second


@pytest.mark.parametrize(("length", "accuracy", "chunk"), [(1, 0.9, None), (9, 0.6, None), (17, 0.3, 5), (26, 1.0, 7)])
@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_layers_that_compress_tokens_same_tokens_and_cache(
    length: int, accuracy: float, chunk: int | None, sampling: str
) -> None:
    """Would catch: an entry with a rejected token, tokens that wait for the next entry and are lost or read twice."""
    model = cases.build(next(row for row in CHECKPOINTS if row.kind == "deepseek_v4"))
    ids = torch.randint(4, 80, (1, length), generator=torch.Generator().manual_seed(length))
    call: dict[str, Any] = {"max_new_tokens": 24, "return_dict_in_generate": True, "prefill_chunk_size": chunk}
    call |= SAMPLING[sampling]
    torch.manual_seed(0)
    plain = model.generate(ids, **call)
    torch.manual_seed(0)
    ours = model.generate(ids, **call, candidate_generator=Oracle(plain.sequences[:, length:], accuracy))
    assert torch.equal(plain.sequences, ours.sequences) and ours.speculation.drafted > 8
    for expected, found in zip(plain[CACHE].layers, ours[CACHE].layers, strict=True):
        assert type(found) is type(expected)
        torch.testing.assert_close(_tensors(found), _tensors(expected), rtol=1e-3, atol=1e-4)
    text = torch.cat([plain.sequences, torch.tensor([[5, 6, 7]])], dim=1)
    turn = {"attention_mask": torch.ones_like(text), "max_new_tokens": 6}
    later = model.generate(text, **turn, **{CACHE: plain[CACHE]})
    again = model.generate(text, **turn, **{CACHE: ours[CACHE]}, candidate_generator=NgramCandidates(k=3))
    assert torch.equal(later, again)


def test_layers_that_compress_tokens_refuse_what_would_change_them() -> None:
    """Would catch: rows whose entries are counted together, an offloaded cache whose layers stay where they are."""
    model = cases.build(next(row for row in CHECKPOINTS if row.kind == "deepseek_v4"))
    with pytest.raises(ValueError, match=r"compresses the tokens of all rows together, takes no mask.*one prompt"):
        model.generate(**prompts(2), max_new_tokens=4, candidate_generator=NgramCandidates())
    call: dict[str, Any] = {"cache_implementation": "offloaded"}
    with pytest.raises(ValueError, match="compress tokens are not offloaded while drafts are verified; give"):
        model.generate(**prompts(1), **call, max_new_tokens=4, candidate_generator=NgramCandidates())


def _tensors(layer: Any) -> dict[str, Any]:
    """The tensors and numbers that a layer of a cache holds."""
    held = {name: value for name, value in vars(layer).items() if not isinstance(value, dict)}
    objects = ((name, value) for name, value in vars(layer).items() if isinstance(value, dict))
    held |= {f"{name}.{key}": inside for name, value in objects for key, inside in value.items()}
    return {name: value for name, value in held.items() if isinstance(value, torch.Tensor | int)}


@torch.no_grad()
def test_states_of_images_that_a_call_passes_itself_are_refused() -> None:
    """Plain `generate` caches their keys once more in every step: would catch an error in a pass, or other tokens."""
    checkpoint = next(row for row in CHECKPOINTS if row.kind == "mllama")
    model = cases.build(checkpoint)
    inputs = with_media(checkpoint, model, 1)
    image = {name: inputs[name] for name in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")}
    states = model.model.multi_modal_projector(model.model.vision_model(**image).last_hidden_state)
    given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    given |= {"cross_attention_states": states.view(-1, *states.shape[-2:]), "max_new_tokens": 5}
    output = model.generate(**given, return_dict_in_generate=True)
    assert output[CACHE].layers[1].get_seq_length() == 5 * states.shape[-2] * states[..., 0, 0].numel()
    with pytest.raises(ValueError, match="caches cross_attention_states again in every pass; give it pixel_values"):
        model.generate(**given, candidate_generator=NgramCandidates(k=3))


@pytest.mark.parametrize("has_image", [True, False])
def test_later_turn_from_a_quantized_cache_with_images_is_refused(has_image: bool) -> None:
    """Would catch: an error after the first turn, of quantized keys that are read as those of images are."""
    checkpoint = next(row for row in CHECKPOINTS if row.kind == "mllama")
    model = cases.build(checkpoint)
    inputs = with_media(checkpoint, model, 1)
    if not has_image:
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    answers, call = [], {"max_new_tokens": 8, "return_dict_in_generate": True}
    for more in ({}, {"candidate_generator": NgramCandidates(k=3)}):
        cache = QuantizedCache(backend="fp8", config=model.config.get_text_config())
        text = model.generate(**inputs, **call, **{CACHE: cache}).sequences
        text = torch.cat([text, torch.tensor([[5, 6, 7]])], dim=1)
        later = {"attention_mask": torch.ones_like(text), CACHE: cache, **call, **more}
        if more and has_image:
            with pytest.raises(ValueError, match="reads the keys of images from the layers of its cache"):
                model.generate(text, **later)
            assert cache.get_seq_length() == text.shape[1] - 4
            return
        answers.append(model.generate(text, **later).sequences)
    assert torch.equal(*answers)


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl", "qwen3_vl"])
def test_draft_model_with_image_same_tokens(kind: str) -> None:
    """Would catch: a draft that cannot read the placeholders of a prompt, or positions of rows that end early.

    The first row has no image where positions have several axes, so that its axes differ from those of the others.
    """
    model, inputs = multimodal_model(kind), multimodal_prompts(kind, 6, length=30)
    if kind != "llava":
        inputs["input_ids"][0] %= 90
        inputs["mm_token_type_ids"][0] = 0
        inputs |= {"pixel_values": inputs["pixel_values"][16:], "image_grid_thw": inputs["image_grid_thw"][1:]}
    draft = DraftModelCandidates(shared_draft(model, noise=0.3), k=3)
    end = {"eos_token_id": list(range(30, 36)), "pad_token_id": 0}
    assert assert_same_tokens(model, inputs, draft, max_new_tokens=20, **end).drafted > 0


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_layer_skip_with_image_same_tokens(kind: str) -> None:
    """Would catch: image features that only the second half of the layers receives."""
    model, inputs = multimodal_model(kind), multimodal_prompts(kind, 2)
    assert assert_same_tokens(model, inputs, LayerSkipCandidates(1, k=3), max_new_tokens=10).drafted > 0


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl"])
def test_text_alone_to_a_multimodal_model_same_tokens(kind: str) -> None:
    """Would catch: an equivalence test that leaves positions in the model, or a refusal of several axes."""
    model = multimodal_model(kind)
    inputs = {name: multimodal_prompts(kind, 3)[name] for name in ("input_ids", "attention_mask")}
    inputs["input_ids"] = inputs["input_ids"] % 90
    assert_same_tokens(model, inputs, NgramCandidates(k=3, tree=6), max_new_tokens=14)


# Targets with other attention kernels than SDPA: flex attention, and kernels that take no mask (FlashAttention)

STAND_IN = "flash_stand_in"


def stand_in(
    module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, sliding_window: Any = None, **_: Any
) -> tuple[torch.Tensor, None]:
    """Attention as FlashAttention computes it without a mask: causal, aligned at the last key."""
    assert mask is None, "the kernel takes no mask"
    queries, keys = query.shape[2], key.shape[2]
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    mask = distance >= 0
    if sliding_window is not None:
        mask &= distance < sliding_window
    output = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    return output.transpose(1, 2).contiguous(), None


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    AttentionInterface.register(STAND_IN, stand_in)
    AttentionMaskInterface.register(STAND_IN, flash_attention_mask)


@cache
def with_kernel(implementation: str, architecture: str = "llama") -> Any:
    """A model that runs this kernel, shared by the tests: never change it."""
    model = fresh_model(architecture)
    model.config._attn_implementation = implementation  # the method for it looks for a kernel of that name on the Hub
    SHARED.add(model)
    return model


FLASH_STRATEGIES: dict[str, Callable[[], Any]] = {
    "n-grams": lambda: NgramCandidates(k=4, tree=8),
    "draft model": lambda: DraftModelCandidates(shared_draft(tiny_model("llama")), k=3, tree=6),
    "combined": CombinedCandidates,
    "layer skip": lambda: LayerSkipCandidates(1, k=2),
    "Medusa": lambda: hf_specgen.MedusaCandidates(random_heads(tiny_model("llama")), policy=FixedDepth()),
    "oracle": lambda: partial(Oracle, accuracy=1.0, k=3),
}


@pytest.mark.parametrize("strategy", FLASH_STRATEGIES)
@pytest.mark.parametrize("mode", SAMPLING)
def test_flash_target_with_every_strategy_same_tokens(strategy: str, mode: str) -> None:
    """Would catch: a tree that reaches the kernel, which would read it as a chain."""
    candidates = FLASH_STRATEGIES[strategy]()
    statistics = assert_same_tokens(with_kernel(STAND_IN), prompts(1), candidates, max_new_tokens=13, **SAMPLING[mode])
    if strategy == "oracle":
        assert [step.accepted for step in statistics.rows[0]] == [3, 3, 3]


@pytest.mark.parametrize("architecture", ["mistral", "gemma3_text"])
def test_flash_target_with_sliding_windows_same_tokens(architecture: str) -> None:
    """Would catch: a window that is counted from dropped slots, and masks of several kinds that are left out."""
    model = with_kernel(STAND_IN, architecture)
    assert_same_tokens(model, prompts(1, 40), NgramCandidates(k=4), max_new_tokens=80)


@pytest.mark.parametrize("positions", [4, 5, 6, 7])
def test_flash_target_whose_position_table_ends_within_the_self_check_same_tokens(positions: int) -> None:
    """Would catch: a refusal where there is no position for the wrong token of the check's chain."""
    model = fresh_model("gpt2", n_positions=positions)
    model.config._attn_implementation = STAND_IN
    inputs = {"input_ids": torch.tensor([[5]]), "attention_mask": torch.ones(1, 1, dtype=torch.long)}
    assert_same_tokens(model, inputs, NgramCandidates(k=3), max_new_tokens=positions - 1)


def test_flash_target_with_batch_refused() -> None:
    """Would catch: rows that accept different numbers of tokens, which a kernel without a mask mixes up."""
    with pytest.raises(ValueError, match=r"flash_stand_in takes no mask.* one prompt at a time"):
        with_kernel(STAND_IN).generate(**prompts(2), max_new_tokens=4, candidate_generator=NgramCandidates(k=2))


def test_flash_draft_model_refused() -> None:
    """Would catch: a draft tree given to a kernel that takes no mask."""
    arguments = {"max_new_tokens": 4, "candidate_generator": DraftModelCandidates(with_kernel(STAND_IN), k=2)}
    with pytest.raises(ValueError, match="load the draft with attn_implementation='sdpa'"):
        tiny_model("llama").generate(**prompts(1), **arguments)


def test_flex_target_with_trees_same_tokens() -> None:
    """Would catch: a mask of the wrong kind, and a step without a mask, which flex attention would not make causal."""
    model = with_kernel("flex_attention", "gemma3_text")
    candidates = DraftModelCandidates(shared_draft(tiny_model("gemma3_text")), k=3, tree=6)
    with torch.compiler.set_stance("force_eager"):  # Transformers compiles the kernel; uncompiled it computes the same
        assert assert_same_tokens(model, prompts(2), candidates, max_new_tokens=8).accepted > 0
