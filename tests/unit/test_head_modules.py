"""The modules of draft heads: masks, layers, layouts; what they compute: `test_head_fixtures.py`."""

import dataclasses
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding

from hf_specgen.heads.base import DraftHead
from hf_specgen.heads.block import BlockAttention, block_layers, block_mask
from hf_specgen.heads.eagle import eagle_layers
from hf_specgen.heads.export import PROGRAMS, export_head, save_head
from hf_specgen.heads.head_file import configured_layers
from hf_specgen.heads.head_formats import load_head
from hf_specgen.heads.layers import DecoderLayer, LayerConfig, RotaryEmbedding
from hf_specgen.targets.masks import chain_mask
from tests.fuzz.heads import random_head
from tests.helpers import tiny_model
from tests.helpers.head_fixtures import FIXTURES
from tests.helpers.medusa import random_heads

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}


def sees(kind: BlockAttention, length: int, query: int, slot: int, block: int) -> bool:
    """The definition: whether position `query` of a block sees a cache slot, with `length` context entries."""
    own = length + query
    if slot >= length + block or (kind.causal and slot > own):
        return False
    if kind.window is None:
        return True
    if kind.window_from_anchor:
        return slot >= length - kind.window
    return own - slot < kind.window and (kind.causal or slot - own < kind.window)


@pytest.mark.parametrize("window_from_anchor", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("causal", [False, True])
def test_block_mask_of_ragged_rows_follows_the_definition(causal: bool, window: Any, window_from_anchor: bool) -> None:
    """Would catch: a query that sees another row's padding, or a window that begins one position off."""
    kind, lengths, block = BlockAttention(causal, window, window_from_anchor), [0, 2, 7], 4
    mask = block_mask(kind, lengths, block)
    for row, length in enumerate(lengths):
        expected = [[sees(kind, length, query, slot, block) for slot in range(11)] for query in range(block)]
        assert mask[row].tolist() == [expected]


ROPES: dict[str, dict[str, float]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
}


@pytest.mark.parametrize("kind", ROPES)
@torch.no_grad()
def test_decoder_layer_computes_what_the_layer_of_llama_computes(kind: str) -> None:
    """Would catch: a bias left out, or rotary frequencies of another type than the config names."""
    rope = {"rope_type": kind, "rope_theta": 5e5, **ROPES[kind]}
    config = LayerConfig(**SIZES, **BIASES, qk_norm=False, rope_parameters=rope)
    more = {"max_position_embeddings": config.max_position_embeddings, "attn_implementation": "eager"}
    reference_config = LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, rope_parameters=rope, **more)
    ours, reference = DecoderLayer(config, 0), LlamaDecoderLayer(reference_config, 0)
    ours.load_state_dict(reference.state_dict())
    states, positions = torch.randn(2, 5, 16), torch.arange(40, 45)[None].expand(2, -1)
    mask = chain_mask([0, 0], 5, torch.device("cpu"))
    expected = reference(
        states,
        position_embeddings=LlamaRotaryEmbedding(reference_config)(states, positions),
        attention_mask=torch.zeros(2, 1, 5, 5).masked_fill(~mask, -torch.inf),
    )
    actual = ours(states, RotaryEmbedding(config)(states, positions), mask, None)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "rank", "interleaved"), [("default", 12, True), ("default", 0, False), ("yarn", 12, True)]
)
@torch.no_grad()
def test_latent_attention_computes_what_that_of_deepseek_computes(kind: str, rank: int, interleaved: bool) -> None:
    """Would catch: pairs of channels rotated the other way, the scale for long contexts (yarn) left out."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 5e4, **ROPES[kind]}
    rope |= {"mscale": 0.8, "mscale_all_dim": 1.2} if kind == "yarn" else {}
    latent = {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "v_head_dim": 12, "rope_interleave": interleaved}
    sizes = SIZES | latent | {"num_key_value_heads": 4, "rope_parameters": rope}
    config = LayerConfig(**sizes, q_lora_rank=rank)
    more: dict[str, Any] = {"max_position_embeddings": config.max_position_embeddings, "qk_rope_head_dim": 8}
    reference_config = DeepseekV3Config(**sizes | more, q_lora_rank=rank or None, attn_implementation="eager")
    ours, reference = DecoderLayer(config, 0).self_attn, DeepseekV3Attention(reference_config, 0)
    ours.load_state_dict(reference.state_dict())
    states, positions = torch.randn(2, 5, 16), torch.arange(40, 45)[None].expand(2, -1)
    mask = chain_mask([0, 0], 5, torch.device("cpu"))
    expected, _ = reference(
        states,
        position_embeddings=DeepseekV3RotaryEmbedding(reference_config)(states, positions),
        attention_mask=torch.zeros(2, 1, 5, 5).masked_fill(~mask, -torch.inf),
    )
    actual = ours(states, RotaryEmbedding(config)(states, positions), mask, None)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"eagle_aux_hidden_state_layer_ids": None}, None),
        ({"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}, (2, 16, 29)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, (2, 16, 29)),
        ({"aux_hidden_state_layer_ids": [2, 9]}, (2, 9)),
        ({"dflash_config": {"target_layer_ids": [1, 9, 17]}}, (2, 10, 18)),
        ({"target_layer_ids": [-1, 9]}, (0, 10)),
        ({"target_layer_ids": [1], "aux_hidden_state_layer_ids": [2]}, (2,)),
    ],
)
def test_configured_layers_are_indices_of_hidden_states(config: dict[str, Any], expected: Any) -> None:
    """Would catch: layers numbered by their output read as numbered by their input, off by one."""
    assert configured_layers(config) == expected


@pytest.mark.parametrize("value", [[], "1", [1.0], [True], [-1], [[1]], {"0": 1}])
def test_configured_layers_that_are_no_layer_numbers_raises(value: Any) -> None:
    """Would catch: a negative or missing layer that is found out in the first draft."""
    with pytest.raises(ValueError, match="must be a list of layer numbers"):
        configured_layers({"eagle_aux_hidden_state_layer_ids": value})


def test_default_layers_of_a_target() -> None:
    """Would catch: defaults that differ from those of the original implementations."""
    assert [eagle_layers(layers) for layers in (32, 8, 6)] == [(2, 16, 29), (2, 4, 5), (2, 3)]
    assert [block_layers(36, 5), block_layers(8, 3), block_layers(8, 1)] == [(2, 10, 18, 26, 34), (2, 4, 6), (5,)]


@pytest.mark.parametrize("name", [name for name, fixture in FIXTURES.items() if fixture.family == "assistant"])
def test_assistant_pass_over_several_nodes_is_that_over_each(name: str) -> None:
    """Would catch: nodes of a level that see each other, or positions that Transformers' layers leave out."""
    bound = load_head(FIXTURES[name].head_folder).bind(FIXTURES[name].target)
    head, random = bound.head, torch.Generator().manual_seed(3)
    layers: Any = [layer.self_attn for layer in head.model.layers]
    states = lambda one: torch.randn(2, 2, 12, one.head_dim, generator=random)  # noqa: E731
    shared = {one.layer_type: (states(one), states(one)) for one in layers}
    embeddings, hidden = (torch.randn(2, 3, head.config.hidden_size, generator=random) for _ in range(2))
    lengths, padding = torch.tensor([12, 9]), torch.tensor([0, 4])
    rest = shared, lengths, padding, dict.fromkeys(shared, 0)
    positions = (lengths - padding)[:, None].expand(2, 3)
    together = bound.target_logits(head(embeddings, hidden, positions, *rest).output)
    for node in range(3):
        parts = (part[:, node : node + 1] for part in (embeddings, hidden, positions))
        alone = bound.target_logits(head(*parts, *rest).output)
        torch.testing.assert_close(together[:, node : node + 1], alone, atol=1e-4, rtol=1e-4)  # other kernels


# Draft heads survive being written and read again, in every layout that can hold them

EAGLE3 = FIXTURES["eagle3_original"].head_folder
KINDS = ("eagle1", "eagle3", "peagle", "dflash")
HEADS: dict[str, Callable[[], DraftHead]] = {
    name: partial(load_head, fixture.head_folder)
    for name, fixture in FIXTURES.items()
    if fixture.family in ("autoregressive", "block", "path", "parallel")
}
HEADS |= {
    f"{kind} {seed}": lambda kind=kind, seed=seed: random_head(kind, tiny_model("llama"), Random(seed))
    for kind in KINDS
    for seed in range(12 if kind == "dflash" else 6)
}
MEDUSA: list[dict[str, Any]] = [{}, {"own_outputs": True}, {"reads_path": True, "num_layers": 2}, {"lora_rank": 4}]
HEADS |= {f"Medusa {shape}": partial(random_heads, tiny_model("llama"), **shape) for shape in MEDUSA}
"""Of every published layout, and with random options."""
EXPORTED = [
    *(("eagle3_original", to) for to in PROGRAMS),
    *((name, "sglang") for name in ("dflash_zlab", "jetspec_causal", "domino_specforge")),
    *((name, "sglang") for name in ("speculators_dspark_vanilla", "speculators_dspark_rnn")),
    ("eagle1_original", "eagle"),
]
"""What must not be refused."""
OF_FILE = ("speculative_tokens", "base_model")


def assert_same(loaded: DraftHead, head: DraftHead) -> None:
    """The same module with the same weights: what both compute follows from these."""
    assert type(loaded) is type(head)
    kept = {field: getattr(loaded.config, field) for field in OF_FILE}
    assert loaded.config == dataclasses.replace(head.config, **kept)
    state, expected = loaded.state_dict(), head.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("name", HEADS)
def test_head_saved_or_exported_and_loaded_is_the_same(tmp_path: Path, name: str) -> None:
    """Would catch: an option or a tensor that a layout leaves out without a word."""
    with torch.random.fork_rng():
        head = HEADS[name]()
    for to in ("", *PROGRAMS):
        try:
            export_head(head, tmp_path / to, to) if to else save_head(head, tmp_path)
        except ValueError as refusal:
            assert re.search("cannot|there is no layout|give the target", str(refusal))
            assert (name, to) not in EXPORTED and not (tmp_path / to / "config.json").exists()
            assert to or name in ("dflash2_zlab", "eagle3_mla") or name not in FIXTURES
        else:
            assert_same(load_head(tmp_path / to), head)


def test_eagle_head_in_bfloat16_saved_and_loaded_keeps_dtype_and_exact_frequencies(tmp_path: Path) -> None:
    """Would catch: rotary frequencies rounded to bfloat16, or weights that come back in float32."""
    head: Any = load_head(EAGLE3).to(torch.bfloat16)
    assert head.rotary.inv_freq.dtype == torch.float32
    save_head(head, tmp_path)
    assert load_head(tmp_path).fc.weight.dtype == torch.bfloat16
    assert load_head(tmp_path, dtype=torch.float32).fc.weight.dtype == torch.float32


def test_eagle_head_exported_for_sglang_names_layers_by_their_output(tmp_path: Path) -> None:
    """Would catch: a head that reads states one layer too late in another program."""
    head = load_head(EAGLE3)
    head.config = dataclasses.replace(head.config, aux_hidden_state_layers=(2, 5, 7))
    export_head(head, tmp_path, "sglang")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 4, 6]


Z_LAB = "z-lab's layout cannot express a head with"
medusa = partial(random_heads, tiny_model("llama"))


@pytest.mark.parametrize(
    ("make", "to", "reason"),
    [
        (partial(medusa, own_outputs=True, lora_rank=2), "medusa", "take no LoRA"),
        (partial(random_heads, tiny_model("phi"), own_outputs=True), "medusa", "has a bias"),
        (medusa, "onnx", "cannot be written for 'onnx'; choose"),
        (partial(medusa, reads_path=True), "tgi", "reads_path"),
        (partial(medusa, num_layers=2), "tgi", "one layer"),
        (medusa, "vllm", "give the target"),
        (HEADS["speculators_eagle3_b_qwen3_nbr"], "eagle", "norm_before_residual"),
        (HEADS["speculators_eagle3_e_twolayers_bias_fourtaps"], "sglang", "several layers, biases"),
        (HEADS["speculators_eagle3_c_fcnorm_normout"], "sglang", "norm_output"),
        (HEADS["speculators_peagle_llama"], "eagle", "a mask token"),
        (HEADS["eagle1 0"], "eagle", "an output matrix of its own, states of inner layers"),
        (HEADS["eagle3_original"], "tgi", "choose eagle, sglang, vllm"),
        (HEADS["speculators_dflash_sliding_causal"], "sglang", Z_LAB),
        (HEADS["speculators_dflash_full"], "sglang", Z_LAB),
    ],
)
def test_export_of_head_that_layout_cannot_express_raises(tmp_path: Path, make: Any, to: str, reason: str) -> None:
    """Would catch: a checkpoint that another program loads and that drafts something else, or half a folder."""
    with pytest.raises(ValueError, match=reason):
        export_head(make(), tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


def test_export_into_folder_with_config_raises(tmp_path: Path) -> None:
    """Would catch: a checkpoint of another head that is overwritten."""
    export_head(load_head(EAGLE3), tmp_path, "vllm")
    assert "layers.0.hidden_norm.weight" in load_file(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"holds a config\.json already"):
        export_head(load_head(EAGLE3), tmp_path, "eagle")
