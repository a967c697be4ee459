"""Draft heads survive being written and read again, in every layout that can hold them."""

import dataclasses
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_specgen.heads.base import DraftHead
from hf_specgen.heads.block import BlockAttention, BlockConfig, BlockHead
from hf_specgen.heads.dflash2 import DFlash2Config, DFlash2Head
from hf_specgen.heads.domino import DominoConfig, DominoHead
from hf_specgen.heads.dspark import DSparkConfig, DSparkHead
from hf_specgen.heads.eagle import Eagle1Head, Eagle3Head, EagleConfig
from hf_specgen.heads.export import export_head, save_head
from hf_specgen.heads.head_formats import load_head
from hf_specgen.heads.layers import LayerConfig
from hf_specgen.heads.path_head import PathHead
from hf_specgen.targets.cache import RaggedCache
from hf_specgen.targets.masks import chain_mask

LAYER_SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
}
LAYER = LayerConfig(**LAYER_SIZES)


def changed(**options: Any) -> LayerConfig:
    """`LAYER` with other options."""
    return LayerConfig(**LAYER_SIZES, **options)


QWEN3 = changed(qk_norm=True)
BIASED = changed(qkv_bias=True, output_bias=True, mlp_bias=True)
SIZES: dict[str, Any] = {"hidden_size": 16, "vocab_size": 40, "target_hidden_size": 16}
EAGLE3: dict[str, Any] = SIZES | {"draft_vocab_size": 12, "num_aux_hidden_states": 3, "own_lm_head": True}
BLOCK: dict[str, Any] = SIZES | {
    "draft_vocab_size": 40,
    "num_aux_hidden_states": 2,
    "aux_hidden_state_layers": (2, 5),
    "block_size": 4,
    "mask_token_id": 39,
}
FULL, SLIDING = BlockAttention(), BlockAttention(causal=True, window=3, window_from_anchor=True)

EAGLE_HEADS = {
    "plain": EagleConfig(layer=LAYER, **EAGLE3),
    "qwen3": EagleConfig(layer=QWEN3, **EAGLE3, norm_before_residual=True, aux_hidden_state_layers=(1, 3, 4)),
    "biases and two layers": EagleConfig(layer=BIASED, **EAGLE3, num_layers=2, norm_before_fc=True),
    "norms of 3.1": EagleConfig(layer=LAYER, **EAGLE3, fc_norm=True, norm_output=True),
    "own embeddings": EagleConfig(layer=LAYER, **EAGLE3, own_embeddings=True),
    "other target width": EagleConfig(layer=LAYER, **(EAGLE3 | {"target_hidden_size": 10}), own_embeddings=True),
    "whole vocabulary": EagleConfig(layer=LAYER, **(EAGLE3 | {"draft_vocab_size": 40})),
    "borrowed output matrix": EagleConfig(layer=LAYER, **(EAGLE3 | {"draft_vocab_size": 40, "own_lm_head": False})),
    "P-EAGLE": EagleConfig(layer=LAYER, **EAGLE3, mask_token_id=7, own_embeddings=True),
    "scaled positions": EagleConfig(
        layer=changed(rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}), **EAGLE3
    ),
}
EAGLE1 = EagleConfig(
    layer=LAYER, **SIZES, draft_vocab_size=40, num_aux_hidden_states=1, projection_bias=True, own_embeddings=True
)
BLOCK_HEADS = {
    "DFlash": BlockConfig(layer=QWEN3, attention=(FULL, FULL), **BLOCK),
    "sliding": BlockConfig(layer=QWEN3, attention=(SLIDING, FULL), **BLOCK),
    "sliding both ways": BlockConfig(
        layer=QWEN3, attention=(dataclasses.replace(SLIDING, causal=False), FULL), **BLOCK, first_proposing_position=0
    ),
    "draft vocabulary": BlockConfig(
        layer=QWEN3, attention=(FULL,), **(BLOCK | {"draft_vocab_size": 12}), own_lm_head=True
    ),
    "JetSpec": BlockConfig(layer=QWEN3, attention=(BlockAttention(causal=True),) * 2, **BLOCK),
    "sliding by position": BlockConfig(layer=QWEN3, attention=(BlockAttention(causal=True, window=3),) * 2, **BLOCK),
}
PATH: dict[str, Any] = BLOCK | {"layer": QWEN3, "attention": (FULL, FULL)}
REDUCED: dict[str, Any] = {"draft_vocab_size": 12, "own_lm_head": True}
DFLASH2 = DFlash2Config(**PATH, conv_group_size=4, selector_rank=3, selector_top_k=5)
PATH_HEADS: dict[str, Callable[[], DraftHead]] = {
    "DSpark": lambda: DSparkHead(DSparkConfig(**PATH, markov_rank=3, first_proposing_position=0)),
    "DSpark gated": lambda: DSparkHead(
        DSparkConfig(**PATH | REDUCED, markov_rank=3, markov_head_type="gated", enable_confidence_head=False)
    ),
    "DSpark rnn": lambda: DSparkHead(
        DSparkConfig(**PATH, markov_rank=3, markov_head_type="rnn", confidence_head_with_markov=False)
    ),
    "DSpark without correction": lambda: DSparkHead(DSparkConfig(**PATH, markov_rank=0)),
    "DFlash2": lambda: DFlash2Head(DFLASH2),
    "DFlash2 with factors": lambda: DFlash2Head(
        dataclasses.replace(DFLASH2, output_multiplier=0.5, final_logit_softcapping=9.0, input_embedding_scale=3.0)
    ),
    "Domino": lambda: DominoHead(
        DominoConfig(**PATH, emb_dim=3, gru_hidden_dim=5, first_proposing_position=0, max_draft_tokens=3)
    ),
    "Domino unshifted": lambda: DominoHead(
        DominoConfig(**PATH, emb_dim=3, gru_hidden_dim=5, pure_draft_prefix_len=2, max_draft_tokens=3)
    ),
}


def randomised(head: DraftHead) -> DraftHead:
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    if head.draft_to_target is not None:
        head.draft_to_target.copy_(torch.randperm(head.config.vocab_size)[: head.config.draft_vocab_size].sort().values)
    return head.eval()


@torch.no_grad()
def outputs(head: Any) -> list[torch.Tensor]:
    """What the head computes for fixed inputs, and its vocabulary."""
    config, generator = head.config, torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    embeddings, features = random(1, 6, 16), random(1, 6, config.num_aux_hidden_states * config.target_hidden_size)
    positions, cache = torch.arange(6)[None], RaggedCache()
    vocabulary = head.target_ids(torch.arange(config.draft_vocab_size))
    if isinstance(head, BlockHead):
        head.extend(features, positions, cache)
        hidden, output = head(embeddings[:, :4], 6 + positions[:, :4], cache)
        if isinstance(head, PathHead):
            tokens, embed = torch.tensor([7]), torch.nn.Embedding.from_pretrained(embeddings[0].repeat(8, 1))
            state = head.first_state(output, tokens, embed)
            vocabulary = (
                head.step(output[:, 1], tokens, state, torch.tensor([config.depth]), embed).query @ head.keys().T
            )
        return [hidden, output, vocabulary]
    if config.mask_token_id is not None:
        features = torch.cat((features[:, :5], head.mask_hidden), dim=1)
    return [
        *head(embeddings, head.combine(features), positions, chain_mask([0], 6, torch.device("cpu")), cache),
        vocabulary,
    ]


def assert_same(loaded: DraftHead, head: DraftHead) -> None:
    assert type(loaded) is type(head)
    for found, expected in zip(outputs(loaded), outputs(head), strict=True):
        assert torch.equal(found, expected)
    state = loaded.state_dict()
    assert state.keys() == head.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in head.state_dict().items())


HEADS: dict[str, Callable[[], DraftHead]] = {
    **{name: partial(Eagle3Head, config) for name, config in EAGLE_HEADS.items()},
    **{name: partial(BlockHead, config) for name, config in BLOCK_HEADS.items()},
    "EAGLE-1": partial(Eagle1Head, EAGLE1),
    **PATH_HEADS,
}
EAGLE_EXPORTS = ("plain", "own embeddings", "other target width", "scaled positions")
EXPORTS = [
    *((name, None) for name in HEADS),
    *product(EAGLE_EXPORTS, ("eagle", "sglang", "vllm")),
    *product(("DFlash", "JetSpec", "sliding by position"), ("sglang",)),
    *((name, "sglang") for name in PATH_HEADS if name != "DSpark gated"),
]


@pytest.mark.parametrize(("name", "to"), EXPORTS)
def test_head_saved_or_exported_and_loaded_computes_the_same(tmp_path: Path, name: str, to: str | None) -> None:
    head = randomised(HEADS[name]())
    if to is None:
        save_head(head, tmp_path)
    else:
        export_head(head, tmp_path, to)
    loaded = load_head(tmp_path)
    assert_same(loaded, head)
    if name in EAGLE_EXPORTS and to is not None:
        assert (to == "vllm") == ("layers.0.hidden_norm.weight" in load_file(tmp_path / "model.safetensors"))
    if to is None:
        of_file = ("speculative_tokens", "num_target_layers")
        kept = {field: getattr(loaded.config, field) for field in of_file}
        assert loaded.config == dataclasses.replace(head.config, **kept)


def test_eagle_head_in_bfloat16_saved_and_loaded_keeps_dtype_and_exact_frequencies(tmp_path: Path) -> None:
    head: Any = randomised(Eagle3Head(EAGLE_HEADS["plain"])).to(torch.bfloat16)
    assert head.rotary.module.inv_freq.dtype == torch.float32
    save_head(head, tmp_path)
    assert load_head(tmp_path).fc.weight.dtype == torch.bfloat16
    assert load_head(tmp_path, dtype=torch.float32).fc.weight.dtype == torch.float32


def test_eagle_head_exported_for_sglang_names_layers_by_their_output(tmp_path: Path) -> None:
    config = dataclasses.replace(EAGLE_HEADS["plain"], aux_hidden_state_layers=(2, 5, 9))
    export_head(randomised(Eagle3Head(config)), tmp_path, "sglang")
    assert (
        '"eagle_aux_hidden_state_layer_ids": [\n      1,\n      4,\n      8\n    ]'
        in (tmp_path / "config.json").read_text()
    )
    assert load_head(tmp_path).config.aux_hidden_state_layers == (2, 5, 9)


def test_whole_vocabulary_exported_for_sglang_has_identity_mapping(tmp_path: Path) -> None:
    export_head(randomised(Eagle3Head(EAGLE_HEADS["whole vocabulary"])), tmp_path, "sglang")
    tensors = load_file(tmp_path / "model.safetensors")
    assert not tensors["d2t"].any() and tensors["t2d"].all() and len(tensors["t2d"]) == 40
    assert load_head(tmp_path).draft_to_target is None


Z_LAB = "z-lab's layout cannot express a head with"


@pytest.mark.parametrize(
    ("name", "to", "reason"),
    [
        ("qwen3", "eagle", "norms of queries and keys, norm_before_residual, aux_hidden_state_layers "),
        ("biases and two layers", "sglang", "several layers, biases, norm_before_fc"),
        ("norms of 3.1", "sglang", "norm_output"),
        ("P-EAGLE", "eagle", "a mask token"),
        ("plain", "tgi", "there are eagle, sglang, vllm"),
        *((name, "sglang", Z_LAB) for name in ("sliding", "sliding both ways", "draft vocabulary")),
    ],
)
def test_export_of_head_that_layout_cannot_express_raises(tmp_path: Path, name: str, to: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        export_head(HEADS[name](), tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


def test_export_into_folder_with_config_raises(tmp_path: Path) -> None:
    head = Eagle3Head(EAGLE_HEADS["plain"])
    export_head(head, tmp_path, "vllm")
    with pytest.raises(ValueError, match=r"holds a config\.json already"):
        export_head(head, tmp_path, "eagle")
