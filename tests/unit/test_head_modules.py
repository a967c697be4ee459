"""The modules of draft heads: masks, caches whose rows differ in length, and what padding must not change."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from hf_specgen.heads.block import BlockAttention, BlockConfig, BlockHead, block_layers, block_mask
from hf_specgen.heads.eagle import Eagle1Head, Eagle3Head, EagleConfig, eagle_layers
from hf_specgen.heads.head_file import configured_layers
from hf_specgen.heads.layers import DecoderLayer, LayerConfig, RotaryEmbedding
from hf_specgen.targets.masks import chain_mask
from tests.helpers.head_sessions import RaggedCache, causal_mask

LAYER = LayerConfig(
    hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=8, qk_norm=True
)
BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
BLOCK: dict[str, Any] = {"block_size": 4, "mask_token_id": 1}
SIZES: dict[str, Any] = {"hidden_size": 16, "vocab_size": 40, "draft_vocab_size": 40, "target_hidden_size": 16}


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
def test_block_mask_of_ragged_rows_follows_the_definition(
    causal: bool, window: int | None, window_from_anchor: bool
) -> None:
    kind, lengths, block = BlockAttention(causal, window, window_from_anchor), [0, 2, 7], 4
    mask = block_mask(kind, lengths, block)
    expected = [
        [[[sees(kind, length, query, slot, block) for slot in range(11)] for query in range(block)]]
        for length in lengths
    ]
    assert mask.tolist() == expected


def test_causal_mask_of_ragged_rows_follows_the_definition() -> None:
    lengths = [3, 0, 5]
    expected = [[[[slot <= length + query for slot in range(7)] for query in range(2)]] for length in lengths]
    assert causal_mask(lengths, 2).tolist() == expected
    assert chain_mask(lengths, 2, torch.device("cpu")).tolist() == expected


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 32},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
@torch.no_grad()
def test_decoder_layer_computes_what_the_layer_of_llama_computes(rope: dict[str, Any]) -> None:
    from transformers import LlamaConfig

    config = LayerConfig(**{**LAYER.to_dict(), **BIASES, "qk_norm": False, "rope_parameters": rope})
    reference_config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attention_bias=True,
        mlp_bias=True,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=rope,
        attn_implementation="eager",
    )
    ours, reference = DecoderLayer(config, 0), LlamaDecoderLayer(reference_config, 0)
    ours.load_state_dict(reference.state_dict())
    states, positions = torch.randn(2, 5, 16), torch.arange(40, 45)[None].expand(2, -1)
    mask = causal_mask([0, 0], 5)
    expected = reference(
        states,
        position_embeddings=LlamaRotaryEmbedding(reference_config)(states, positions),
        attention_mask=torch.zeros(2, 1, 5, 5).masked_fill(~mask, -torch.inf),
    )
    actual = ours(states, RotaryEmbedding(config)(states, positions), mask, None)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def heads() -> dict[str, Any]:
    torch.manual_seed(0)
    eagle1 = Eagle1Head(EagleConfig(layer=LAYER, num_aux_hidden_states=1, num_layers=2, **SIZES))
    eagle3 = Eagle3Head(EagleConfig(layer=LAYER, num_aux_hidden_states=3, num_layers=2, **SIZES))
    return {"EAGLE-1": eagle1, "EAGLE-3": eagle3}


@pytest.mark.parametrize("name", ["EAGLE-1", "EAGLE-3"])
@torch.no_grad()
def test_eagle_head_reading_in_pieces_computes_the_same_as_at_once(name: str) -> None:
    head = heads()[name]
    embeddings = torch.randn(1, 9, 16)
    hidden = head.combine(torch.randn(1, 9, 16 * head.config.num_aux_hidden_states))
    positions = torch.arange(9)[None]
    whole, cache = head(embeddings, hidden, positions, causal_mask([0], 9)), DynamicCache()
    pieces = [
        head(embeddings[:, a:b], hidden[:, a:b], positions[:, a:b], causal_mask([a], b - a), cache).output
        for a, b in ((0, 4), (4, 5), (5, 9))
    ]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole.output)


@pytest.mark.parametrize("name", ["EAGLE-1", "EAGLE-3"])
@torch.no_grad()
def test_eagle_head_is_not_changed_by_what_padding_holds(name: str) -> None:
    head = heads()[name]
    results = []
    for padding in (0.0, 1e4):
        torch.manual_seed(1)
        cache = RaggedCache()
        embeddings, features = torch.randn(2, 5, 16), torch.randn(2, 5, 16 * head.config.num_aux_hidden_states)
        embeddings[1, 3:], features[1, 3:] = padding, padding  # the second row has three positions only
        head(embeddings, head.combine(features), torch.arange(5).expand(2, -1), causal_mask([0, 0], 5), cache)
        cache.set_lengths([5, 3])
        lengths = torch.tensor([[5], [3]])
        step = head(torch.randn(2, 1, 16), torch.randn(2, 1, 16), lengths, causal_mask([5, 3], 1), cache)
        results.append(step.output)
    assert torch.equal(*results)


@torch.no_grad()
def test_block_head_extending_in_pieces_computes_the_same_as_at_once() -> None:
    torch.manual_seed(0)
    attention = (BlockAttention(), BlockAttention(causal=True, window=3))
    head = BlockHead(
        BlockConfig(layer=LAYER, attention=attention, num_aux_hidden_states=2, block_size=4, mask_token_id=1, **SIZES)
    )
    features, block = torch.randn(1, 9, 32), torch.randn(1, 4, 16)
    outputs = []
    for parts in ([slice(0, 9)], [slice(0, 4), slice(4, 5), slice(5, 9)]):
        cache = DynamicCache()
        for part in parts:
            head.extend(features[:, part], torch.arange(9)[None, part], cache)
        outputs.append(head(block, 9 + torch.arange(4)[None], cache).output)
    torch.testing.assert_close(*outputs)


@torch.no_grad()
def test_causal_block_head_predicts_the_same_whatever_follows_in_the_block() -> None:
    torch.manual_seed(0)
    attention = (BlockAttention(causal=True),) * 2
    head = BlockHead(
        BlockConfig(layer=LAYER, attention=attention, num_aux_hidden_states=1, block_size=4, mask_token_id=1, **SIZES)
    )
    features, block = torch.randn(1, 5, 16), torch.randn(1, 4, 16)
    outputs = []
    for last in (0.0, 7.0):
        block[:, 3] = last
        cache = DynamicCache()
        head.extend(features, torch.arange(5)[None], cache)
        outputs.append(head(block, 5 + torch.arange(4)[None], cache).output)
    torch.testing.assert_close(outputs[0][:, :3], outputs[1][:, :3])
    assert not torch.allclose(outputs[0][:, 3], outputs[1][:, 3])


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
def test_configured_layers_are_indices_of_hidden_states(
    config: dict[str, Any], expected: tuple[int, ...] | None
) -> None:
    assert configured_layers(config) == expected


@pytest.mark.parametrize("value", [[], "1", [1.0], [True], [-1], [[1]], {"0": 1}])
def test_configured_layers_that_are_no_layer_numbers_raises(value: Any) -> None:
    with pytest.raises(ValueError, match="must be a list of layer numbers"):
        configured_layers({"eagle_aux_hidden_state_layer_ids": value})


@pytest.mark.parametrize(("layers", "expected"), [(32, (2, 16, 29)), (8, (2, 4, 5)), (6, (2, 3))])
def test_eagle_layers_of_a_target(layers: int, expected: tuple[int, ...]) -> None:
    assert eagle_layers(layers) == expected


@pytest.mark.parametrize(
    ("layers", "draft_layers", "expected"), [(36, 5, (2, 10, 18, 26, 34)), (8, 3, (2, 4, 6)), (8, 1, (5,))]
)
def test_block_layers_of_a_target(layers: int, draft_layers: int, expected: tuple[int, ...]) -> None:
    assert block_layers(layers, draft_layers) == expected
