"""Options of layers as other programs write them: in other formats and places than those of the fixtures."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import (
    MiniMaxM3VLDecoderLayer,
    MiniMaxM3VLRMSNorm,
    MiniMaxM3VLRotaryEmbedding,
)

from hf_specgen import DFlashCandidates
from hf_specgen.heads.block import BlockAttention
from hf_specgen.heads.block_drafter import BlockDrafter, RotationChoice, SettingEvidence
from hf_specgen.heads.export import export_head, save_head
from hf_specgen.heads.head_formats import load_head
from hf_specgen.heads.layer_options import rotates_neighbours, with_neighbouring_pairs
from hf_specgen.targets.cache import RaggedCache
from tests.fuzz.heads import random_head
from tests.helpers import assert_same_tokens, prompts, tiny_model
from tests.helpers.head_fixtures import FIXTURES

ZLAB, DEEPSPEC, EAGLE3 = "dflash_zlab", "deepspec_dspark_qwen3_vanilla", "eagle3_original"
EAGLE_NESTED, BLOCK_NESTED = "speculators_eagle3_a_llama", "speculators_dflash_full"
COPIED = {"partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0], "rope_type": "default", "rope_theta": 10000.0}
LINEAR = {"partial_rotary_factor": 0.5, "rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
YARN = {"partial_rotary_factor": 0.5, "type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}


def changed(name: str, folder: Path, changes: dict[str, Any]) -> Path:
    """A copy of a fixture's head, whose config has other values: of the layers, or with a "head." of the head."""
    shutil.copytree(FIXTURES[name].head_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        place = config
        if not key.startswith("head."):
            place = config.get("transformer_layer_config", config)
        for part in key.removeprefix("head.").split(".")[:-1]:
            place = place.setdefault(part, {})
        place[key.split(".")[-1]] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


WIDTHS: list[tuple[str, dict[str, Any], float]] = [
    *((name, {"rope_parameters": COPIED}, 1.0) for name in (ZLAB, DEEPSPEC, EAGLE3, EAGLE_NESTED, BLOCK_NESTED)),
    *((name, {"rope_scaling": COPIED}, 1.0) for name in (ZLAB, DEEPSPEC, EAGLE3)),
    *((name, {"rope_parameters": LINEAR}, 0.5) for name in (ZLAB, DEEPSPEC, EAGLE3, EAGLE_NESTED, BLOCK_NESTED)),
    *((name, {"rope_parameters": YARN}, 0.5) for name in (EAGLE3, EAGLE_NESTED)),
    *((name, {"rope_parameters": COPIED | {"rope_dim": 4}}, 4) for name in (ZLAB, DEEPSPEC, EAGLE_NESTED)),
    (DEEPSPEC, {"partial_rotary_factor": 0.25, "rope_parameters": COPIED}, 1.0),
    (DEEPSPEC, {"partial_rotary_factor": 0.25}, 1.0),
    (EAGLE3, {"partial_rotary_factor": 0.25}, 1.0),
    (BLOCK_NESTED, {"partial_rotary_factor": 0.25}, 1.0),
    (ZLAB, {"partial_rotary_factor": 0.25, "rope_scaling": COPIED}, 1.0),
    (ZLAB, {"partial_rotary_factor": 0.5}, 0.5),
    (ZLAB, {"partial_rotary_factor": 0.5, "dflash_config.attention_value_scale": 0.5}, 0.5),
    (ZLAB, {"rope_scaling": LINEAR, "dflash_config.attention_value_scale": 0.5}, 0.5),
    (ZLAB, {"rope_scaling": COPIED, "dflash_config.attention_value_scale": 0.5}, 1.0),
    (EAGLE3, {"partial_rotary_factor": 0.5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 0.5),
    (EAGLE3, {"rope_parameters": {"full_attention": COPIED, "sliding_attention": LINEAR}}, 0.5),
    (ZLAB, {"rope_scaling": {"sliding_attention": COPIED, "full_attention": LINEAR}}, 1.0),
]


@pytest.mark.parametrize(("name", "changes", "width"), WIDTHS)
def test_rotated_channels_by_where_the_factor_stands(
    name: str, changes: dict[str, Any], width: float, tmp_path: Path
) -> None:
    """Would catch: a factor copied from a target that is applied, or one of the head that is not."""
    head: Any = load_head(changed(name, tmp_path / "head", changes))
    channels = width if width > 1 else int(head.config.layer.head_dim * width)
    assert len(head.rotary.inv_freq) == channels // 2
    saved: Any = load_head(save_head(head, tmp_path / "saved")[0].parent)
    assert torch.equal(saved.rotary.inv_freq, head.rotary.inv_freq)


@pytest.mark.parametrize("name", [ZLAB, DEEPSPEC, EAGLE3, EAGLE_NESTED, BLOCK_NESTED, "eagle1_original"])
@pytest.mark.parametrize("place", ["", "head."])
@torch.no_grad()
def test_weights_that_other_options_describe_are_the_same_head(name: str, place: str, tmp_path: Path) -> None:
    """Neighbouring pairs, norms without the one and scaled values, with weights changed so that nothing changes."""
    changes = {f"{place}is_neox_style": False, f"{place}use_gemma_norm": True, f"{place}attention_value_scale": 0.5}
    folder = changed(name, tmp_path / "head", changes)
    tensors = load_file(folder / "model.safetensors")
    size = load_head(folder).config.layer.head_dim
    order = torch.arange(size).view(2, -1).T.flatten()  # channel 2i is the old one i, 2i + 1 the old one i + size / 2
    for key, tensor in tensors.items():
        if key.endswith((".q_proj.weight", ".k_proj.weight", ".q_norm.weight", ".k_norm.weight")):
            tensors[key] = tensor.unflatten(0, (-1, size))[:, order].flatten(0, 1)
        if key.endswith("norm.weight"):
            tensors[key] = tensors[key] - 1
        if key.endswith("o_proj.weight"):
            tensors[key] = tensor * 2
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
    head, original = load_head(folder).state_dict(), load_head(FIXTURES[name].head_folder).state_dict()
    assert head.keys() == original.keys()
    for key, tensor in head.items():
        torch.testing.assert_close(tensor, original[key])


def test_sinks_that_are_configured_and_missing_raise(tmp_path: Path) -> None:
    """Would catch: a damaged file that loads with sinks which change nothing."""
    with pytest.raises(ValueError, match=r"tensors are missing, such as layers.0.self_attn.attention_sink_bias"):
        load_head(changed(ZLAB, tmp_path / "head", {"dflash_config.attention_sink_bias": True}))


def test_head_with_sinks_is_exported_with_them(tmp_path: Path) -> None:
    """Would catch: a config without the sinks that the tensors have, or a format that lacks them."""
    head = load_head(FIXTURES["dflash_mimo"].head_folder)
    save_head(head, tmp_path / "saved")
    saved = load_head(tmp_path / "saved")
    assert saved.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(tensor, head.state_dict()[key]) for key, tensor in saved.state_dict().items())
    with pytest.raises(ValueError, match="there is no layout of BlockHead for 'eagle'"):
        export_head(head, tmp_path / "eagle", "eagle")


@pytest.mark.parametrize(
    ("changes", "causal", "window"),
    [
        ({"dflash_config.use_swa": True, "dflash_config.swa_window_size": 6}, False, 6),
        ({"dflash_config.use_swa": True, "dflash_config.swa_window_size": 6, "is_causal": True}, True, 6),
        ({"dflash_config.use_swa": False, "dflash_config.swa_window_size": None}, False, None),
    ],
)
def test_window_for_all_layers(changes: dict[str, Any], causal: bool, window: int | None, tmp_path: Path) -> None:
    """As in published heads for MiMo-V2.5, which name no types of layers: would catch layers without the window."""
    unset = {"layer_types": None, "is_causal": None, "sliding_window": 9, "dflash_config.backbone_rotary_base": 5000000}
    head: Any = load_head(changed(ZLAB, tmp_path / "head", unset | changes))
    assert set(head.config.attention) == {BlockAttention(causal, window)}


def test_two_windows_raise(tmp_path: Path) -> None:
    """Would catch: one of two windows that is passed over."""
    with pytest.raises(ValueError, match="swa_window_size is 7, but the layers have None"):
        load_head(changed(ZLAB, tmp_path / "head", {"dflash_config.swa_window_size": 7}))


MINIMAX = {
    **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"vocab_size": 99, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "rotary_dim": 8, "max_position_embeddings": 256},
    **{"dense_intermediate_size": 96, "intermediate_size": 48, "sliding_window": 32, "use_gemma_norm": True},
    **{"hidden_act": "swigluoai", "swiglu_alpha": 1.5, "swiglu_limit": 0.7, "num_local_experts": 4},
    **{"layer_types": ["sliding_attention"] * 2, "moe_layer_freq": [0, 0], "sparse_attention_config": None},
    **{"dspark_ffn_hidden_size": 32, "dspark_markov_rank": 4, "dspark_block_size": 5, "dspark_noise_token_id": 3},
    **{"dspark_markov_head_type": "vanilla", "dspark_use_dense_ffn": True, "dspark_hybrid_context_fusion": False},
    **{"dspark_target_layer_ids": [0, 1], "dspark_config": {"hybrid_context_fusion": False}},
    **{"enable_confidence_head": True, "confidence_head_with_markov": True, "model_type": "minimax_m3_vl_text"},
}
"""The text part of the config of the DSpark head in a MiniMax-M3.1 checkpoint, with smaller sizes."""


def minimax_layers() -> torch.nn.ModuleList:
    """The layers of Transformers' class, without experts and index; weights that float8 has."""
    sizes = {name: MINIMAX[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")}
    options = {"dense_intermediate_size": 32, "num_hidden_layers": 2, "mlp_layer_types": ["dense"] * 2}
    options |= {name: MINIMAX[name] for name in ("swiglu_alpha", "swiglu_limit", "rms_norm_eps")}
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    config = MiniMaxM3VLTextConfig(**sizes, **options, rope_parameters=rope)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(MiniMaxM3VLDecoderLayer(config, index) for index in range(2))
    for name, weight in layers.named_parameters():
        torch.nn.init.normal_(weight, std=0.2)
        if "_proj" in name:
            weight.data = weight.to(torch.float8_e4m3fn).float()
    return layers


def minimax_head(folder: Path, layers: torch.nn.Module, **changes: Any) -> Path:
    """Such a checkpoint with random weights and those layers, in mxfp8 with scales of 1."""
    config = {"architectures": ["DSparkMiniMaxDraftModel"], "text_config": MINIMAX | changes}
    config["quantization_config"] = {"quant_method": "mxfp8", "weight_block_size": [1, 32]}
    torch.manual_seed(0)
    sizes = {"fc": (64, 128), "hidden_norm": (64,), "final_norm": (64,), "confidence_head.proj": (1, 68)}
    sizes |= {"markov_head.markov_w1": (99, 4), "markov_head.markov_w2": (99, 4)}
    tensors = {f"{name}.weight": torch.randn(size) * 0.1 for name, size in sizes.items()}
    tensors["confidence_head.proj.bias"] = torch.zeros(1)
    for name, weight in layers.state_dict().items():
        index, _, part = name.partition(".")
        place = f"layers.{index}.decoder_layer.{part}"
        if "gate_up_proj" in part:
            of_gate, of_up = weight.chunk(2)
            halves = {"gate_proj": of_gate, "up_proj": of_up}
            tensors |= {place.replace("gate_up_proj", half): value.clone() for half, value in halves.items()}
        else:
            tensors[place] = weight.clone()
    for name in [name for name in tensors if "_proj" in name and "layers" in name]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        scales = (tensors[name].shape[0], tensors[name].shape[1] // 32)
        tensors[f"{name}_scale_inv"] = torch.full(scales, 127, dtype=torch.uint8)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    named = {f"language_model.model.dspark.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")
    return folder


@torch.no_grad()
def test_head_in_a_minimax_checkpoint_computes_what_its_layers_do(tmp_path: Path) -> None:
    """Would catch: the MLP, norms without the one, a rotated width, or names of the published layout read otherwise."""
    layers = minimax_layers()
    head: Any = load_head(minimax_head(tmp_path / "head", layers))
    assert set(head.config.attention) == {BlockAttention(window=32)} and head.config.block_size == 5
    assert head.config.aux_hidden_state_layers == (1, 2) and head.config.first_proposing_position == 0
    states = torch.randn(1, 5, 64)
    positions = torch.arange(5)[None]
    found = head(states, positions, RaggedCache(), [0])
    mask = torch.zeros(1, 1, 5, 5)
    rotary = MiniMaxM3VLRotaryEmbedding(layers[0].self_attn.config)(states, positions)
    for layer in layers:
        states = layer(states, position_embeddings=rotary, attention_mask=mask, position_ids=positions)
        states = states[0] if isinstance(states, tuple) else states
    torch.testing.assert_close(found.hidden, states, rtol=1e-4, atol=1e-4)
    norm = MiniMaxM3VLRMSNorm(64, eps=1e-5)
    norm.weight.data = head.norm.weight - 1
    torch.testing.assert_close(found.output, norm(states), rtol=1e-4, atol=1e-4)
    save_head(head, tmp_path / "saved")
    saved = load_head(tmp_path / "saved")
    assert saved.config.layer.swiglu_limit == pytest.approx(0.7) and saved.config.attention == head.config.attention
    assert all(torch.equal(tensor, head.state_dict()[name]) for name, tensor in saved.state_dict().items())


@pytest.mark.parametrize(
    "change", [{"dspark_hybrid_context_fusion": True}, {"dspark_use_dense_ffn": False}, {"attention_wobble": 1}]
)
def test_options_of_a_minimax_head_that_are_not_read_raise(change: dict[str, Any], tmp_path: Path) -> None:
    """Would catch: a head with experts or with another context, which would draft as if it were untrained."""
    with pytest.raises(ValueError, match=f"{next(iter(change))} = "):
        load_head(minimax_head(tmp_path / "head", minimax_layers(), **change))


MIMO = "dflash_mask_embedding"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            {"mask_token_id": 127, "embedding": torch.ones(64), "per_position": True},
            "embedding of mask_token_id 127 alone",
        ),
        ({"mask_token_id": 126, "embedding": torch.ones(64)}, "embedding of mask_token_id 127 alone"),
        ({"mask_token_id": 127}, "must be a vector of 64 numbers, got None"),
        (torch.ones(8, 64), "must be a vector of 64 numbers"),
        (torch.ones(64).long(), "floating-point numbers, got torch.int64"),
        (torch.ones(10**6), "4,00.*bytes, more than a vector of 64 numbers"),
        (b"no torch file", "cannot be read as a vector"),
    ],
)
def test_damaged_vector_of_the_mask_token_raises(content: Any, reason: str, tmp_path: Path) -> None:
    """Would catch: a vector of another token or of each position, or a file that takes memory before it is checked."""
    folder = changed(MIMO, tmp_path / "head", {})
    if isinstance(content, bytes):
        (folder / "mask_embedding.pt").write_bytes(content)
    else:
        torch.save(content, folder / "mask_embedding.pt")
    with pytest.raises(ValueError, match=f"mask_embedding.pt: .*{reason}"):
        load_head(folder)


@pytest.mark.parametrize("shape", [(64,), (1, 64)])
def test_vector_of_the_mask_token_without_a_dictionary(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Would catch: a bare tensor refused, or the head in the vector's dtype."""
    folder = changed(MIMO, tmp_path / "head", {})
    torch.save(torch.full(shape, 0.5, dtype=torch.bfloat16), folder / "mask_embedding.pt")
    head = load_head(folder)
    assert head.mask_embedding is not None and head.mask_embedding.shape == (64,)
    assert {tensor.dtype for tensor in head.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize("is_other", [False, True])
@torch.no_grad()
def test_rotation_that_a_file_leaves_open_is_decided_by_the_first_text(is_other: bool) -> None:
    """After each block is what the head proposes with one rotation. Would catch: another one, or half a text."""
    fixture = FIXTURES[ZLAB]
    bound = load_head(fixture.head_folder).bind(fixture.target)
    other = with_neighbouring_pairs(bound.head)
    right = bound.of_head(other) if is_other else bound
    config: Any = bound.head.config
    features = torch.randn(1 + 4 * config.block_size, config.num_aux_hidden_states * config.target_hidden_size)
    source: Any = None
    tokens = list(range(1, config.block_size + 1))
    while len(tokens) < len(features):
        drafter = BlockDrafter(right, source, 1)
        output = drafter.run_block([features[: len(tokens)]], [tokens], config.block_size)[0, 1:]
        tokens = [*tokens, *bound.logits(output).argmax(dim=-1).tolist(), 5]
    drafter = BlockDrafter(bound, source, 1)
    evidence = SettingEvidence()
    drafter.rotation = RotationChoice(other, evidence)
    drafter.run_block([features], [tokens[: len(features)]], config.block_size)
    assert evidence.is_clear and (evidence.lead > 0) == is_other
    assert (drafter.bound.head is other) == is_other and drafter.rotation is None
    configured = load_head(fixture.head_folder).state_dict()
    assert all(torch.equal(tensor, configured[name]) for name, tensor in bound.head.state_dict().items())


def test_copy_with_neighbouring_pairs_is_what_the_field_says(tmp_path: Path) -> None:
    """Would catch: another order of channels than that of a file which has the field, or weights in memory twice."""
    head = load_head(FIXTURES[ZLAB].head_folder)
    other = with_neighbouring_pairs(head)
    read = load_head(changed(ZLAB, tmp_path / "head", {"is_neox_style": False})).state_dict()
    assert all(torch.equal(tensor, read[name]) for name, tensor in other.state_dict().items())
    assert other.fc.weight is head.fc.weight


@pytest.mark.parametrize(
    ("name", "expected"), [("llama", False), ("qwen3", False), ("glm4", True), ("deepseek_v3", True)]
)
def test_rotation_of_targets(name: str, expected: bool) -> None:
    """Would catch: heads of Llama or Qwen whose first prompt is read twice, or those of GLM that are not tried."""
    assert rotates_neighbours(tiny_model(name)) is expected


def test_head_of_a_target_with_neighbouring_pairs_same_tokens() -> None:
    """Both rotations are tried in a call, and doctor's sentence says which one stays."""
    target = tiny_model("glm4")
    head: Any = random_head("dflash", target, Random(1))
    head.config = replace(head.config, pairs_undecided=True)
    candidates = DFlashCandidates(head, k=3)
    assert_same_tokens(target, prompts(2), candidates, max_new_tokens=8)
    assert all("rotated" in setting for setting in candidates.inferred_settings(target))
