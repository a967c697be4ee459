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

from hf_specgen import DFlashCandidates
from hf_specgen.heads.block_drafter import BlockDrafter, ReadingEvidence, RotationTrial
from hf_specgen.heads.export import export_head, save_head
from hf_specgen.heads.head_formats import load_head
from hf_specgen.heads.layer_options import rotates_neighbours, with_neighbouring_pairs
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
    """The text after each block is what one reading proposes: would catch the other one, or a text read in halves."""
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
    evidence = ReadingEvidence()
    drafter.rotation = RotationTrial(other, evidence)
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
    """Both readings are tried in a call, and doctor's sentence says which one stays."""
    target = tiny_model("glm4")
    head: Any = random_head("dflash", target, Random(1))
    head.config = replace(head.config, pairs_undecided=True)
    candidates = DFlashCandidates(head, k=3)
    assert_same_tokens(target, prompts(2), candidates, max_new_tokens=8)
    assert all("rotated" in found for found in candidates.readings(target))
