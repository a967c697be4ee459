"""Weights of heads and MTP layers that a library has quantised, against slow references that read number by number."""

import json
import shutil
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from hf_specgen import MTPCandidates
from hf_specgen.heads.checkpoint import Checkpoint, TensorInfo
from hf_specgen.heads.head_formats import load_head
from hf_specgen.heads.mtp import load_mtp
from hf_specgen.heads.quantised import dequantised
from hf_specgen.heads.source import Source
from tests.helpers.head_fixtures import FIXTURES

Tensors = dict[str, torch.Tensor]
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


def checkpoint(tensors: Tensors, config: Any, **other: Any) -> Checkpoint:
    """A checkpoint in memory."""
    infos = {name: TensorInfo.of(name, tensor, Path("model.safetensors")) for name, tensor in tensors.items()}
    return Checkpoint(Source("head"), {"quantization_config": config, **other}, infos)


def weight_of(tensors: Tensors, config: Any, name: str = "fc.weight") -> torch.Tensor:
    info = dequantised(checkpoint(tensors, config)).tensors[name]
    weight = info.read()
    assert info.shape == weight.shape and info.dtype == weight.dtype
    return weight


def by_block(values: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], zero: Any = None) -> torch.Tensor:
    """The reference: each number minus the zero point of its block, times the scale of its block."""
    result = torch.zeros(values.shape)
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            place = row // block[0], column // block[1]
            number = float(values[row, column]) - (0 if zero is None else float(zero[place]))
            result[row, column] = number * float(scale[place])
    return result


def packed(values: torch.Tensor, bits: int) -> torch.Tensor:
    """The reference: integers around 0 side by side in int32, the first one in the lowest bits."""
    words = torch.zeros(values.shape[0], ceil(values.shape[1] * bits / 32), dtype=torch.int64)
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            place = column * bits
            words[row, place // 32] |= (int(values[row, column]) + 2 ** (bits - 1)) << (place % 32)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@pytest.mark.parametrize(
    ("size", "block"),
    [
        *(([rows, columns], (rows, columns)) for rows, columns in ((128, 128), (64, 32), (48, 40), (2**31 - 1, 8))),
        *((None, block) for block in ((128, 128), (1, 136), (200, 136))),
        ("absent", (128, 128)),
    ],
)
def test_fp8_weight_with_cut_blocks_is_each_number_times_its_scale(size: Any, block: tuple[int, int]) -> None:
    """Would catch: a size of blocks by division, which is another one where the last block is cut."""
    torch.manual_seed(0)
    values = torch.randn(200, 136).to(torch.float8_e4m3fn)
    scale = torch.rand(ceil(200 / block[0]), ceil(136 / block[1]))
    config = FP8 | ({} if size == "absent" else {"weight_block_size": size})
    expected = by_block(values, scale, block)
    tensors = {"fc.weight": values, "fc.weight_scale_inv": scale, "norm.weight": torch.ones(4)}
    assert torch.equal(weight_of(tensors, config), expected)
    if size == "absent":  # also where the config says nothing of layers in fp8, or an object inside does
        assert torch.equal(weight_of(tensors, {}), expected)
        nested = dequantised(checkpoint(tensors, None, text_config={"quantization_config": config}))
        assert torch.equal(nested.tensors["fc.weight"].read(), expected)


@pytest.mark.parametrize("shape", [(), (1,), (6,), (6, 1)])
def test_fp8_weight_with_a_scale_for_each_row_or_one_for_all(shape: tuple[int, ...]) -> None:
    """Would catch: a scale of rows that is taken for one of columns; those of activations as unknown tensors."""
    values, scale = torch.randn(6, 6).to(torch.float8_e4m3fn), torch.rand(shape)
    expected = values.float() * (scale[:, None] if shape == (6,) else scale)
    for name in ("fc.weight_scale", "fc.weight_scale_inv"):
        read = dequantised(checkpoint({"fc.weight": values, name: scale, "fc.input_scale": torch.ones(1)}, FP8))
        assert read.tensors.keys() == {"fc.weight"}
        assert torch.equal(read.tensors["fc.weight"].read(), expected)
    assert (
        dequantised(checkpoint({"fc.weight": values, name: scale}, FP8), torch.bfloat16)
        .tensors["fc.weight"]
        .read()
        .dtype
        == torch.bfloat16
    )


def test_fp8_experts_in_one_tensor() -> None:
    """Would catch: scales of the first expert for all."""
    values, scale = torch.randn(3, 20, 12).to(torch.float8_e4m3fn), torch.rand(3, 3, 2)
    tensors = {"mlp.experts.down_proj": values, "mlp.experts.down_proj_scale_inv": scale}
    weight = weight_of(tensors, FP8 | {"weight_block_size": [8, 8]}, "mlp.experts.down_proj")
    assert all(torch.equal(weight[index], by_block(values[index], scale[index], (8, 8))) for index in range(3))


@pytest.mark.parametrize("program", ["modelopt", "modelopt without a config", "compressed-tensors"])
def test_four_bit_numbers_are_each_number_times_both_scales(program: str) -> None:
    """Would catch: the order of both numbers in a byte, the sign, the scale of another group, a factor that divides."""
    torch.manual_seed(0)
    rows, columns = 5, 64
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    codes = torch.randint(0, 16, (rows, columns))
    values = torch.tensor([[(-1) ** (int(code) // 8) * table[int(code) % 8] for code in row] for row in codes])
    stored = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    scale, factor = torch.rand(rows, 4).to(torch.float8_e4m3fn), torch.tensor(0.25)
    expected = by_block(values, scale.float() * 0.25, (1, 16))
    tensors = {"fc.weight": stored, "fc.weight_scale": scale, "fc.weight_scale_2": factor}
    config: Any = MODELOPT if program == "modelopt" else None
    if program == "compressed-tensors":
        weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
        config = of_library(weights, format="nvfp4-pack-quantized")
        tensors = {"fc.weight_packed": stored, "fc.weight_scale": scale, "fc.weight_global_scale": 1 / factor[None]}
    torch.testing.assert_close(weight_of(tensors | {"fc.input_scale": torch.ones(1)}, config), expected)


def test_exponents_as_scales_are_powers_of_two() -> None:
    """Would catch: bytes of mxfp8 that are taken for the scales themselves."""
    values = torch.randn(3, 64).to(torch.float8_e4m3fn)
    exponents = torch.randint(120, 134, (3, 2), dtype=torch.uint8)
    tensors = {"fc.weight": values, "fc.weight_scale_inv": exponents}
    expected = by_block(values, 2.0 ** (exponents.float() - 127), (1, 32))
    assert torch.equal(weight_of(tensors, {"quant_method": "mxfp8", "weight_block_size": [1, 32]}), expected)
    assert torch.equal(weight_of(tensors, FP8 | {"weight_block_size": [1, 32]}), expected)


def test_head_of_modelopt_is_that_of_the_products(tmp_path: Path) -> None:
    """Would catch: a head in NVFP4 that is not recognised, or one whose other weights are taken for quantised ones."""
    folders = [tmp_path / "quantised", tmp_path / "plain"]
    for folder in folders:
        shutil.copytree(FIXTURES["deepspec_dspark_qwen3_vanilla"].head_folder, folder)
    tensors = load_file(folders[0] / "model.safetensors")
    plain = dict(tensors)
    for name in [name for name in tensors if "_proj.weight" in name]:
        rows, columns = tensors[name].shape
        stored = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
        scales = torch.rand(rows, columns // 16).to(torch.float8_e4m3fn)
        parts = {"": stored, "_scale": scales, "_scale_2": torch.ones(1)}
        plain[name] = weight_of({f"fc.weight{part}": tensor for part, tensor in parts.items()}, MODELOPT)
        tensors |= {name + part: tensor for part, tensor in parts.items()}
    config = json.loads((folders[0] / "config.json").read_text())
    (folders[0] / "config.json").write_text(json.dumps(config | {"quantization_config": MODELOPT}))
    for folder, content in zip(folders, (tensors, plain), strict=True):
        save_file(content, folder / "model.safetensors")
    heads = [load_head(folder, dtype=torch.float32).state_dict() for folder in folders]
    assert all(torch.equal(heads[0][key], tensor) for key, tensor in heads[1].items())


def test_float8_weight_of_modelopt_has_one_scale() -> None:
    """Would catch: layers in float8 of a file whose other layers are in NVFP4."""
    values = torch.randn(3, 8).to(torch.float8_e4m3fn)
    tensors = {"fc.weight": values, "fc.weight_scale": torch.tensor(0.5)}
    assert torch.equal(weight_of(tensors, MODELOPT | {"quant_algo": "MIXED_PRECISION"}), values.float() * 0.5)


@pytest.mark.parametrize("strategy", ["channel", "group", "tensor", "block"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("layout", ["pack-quantized 2", "pack-quantized 4", "pack-quantized 8", "int-quantized 8"])
def test_compressed_integers_are_each_number_times_its_scale(layout: str, symmetric: bool, strategy: str) -> None:
    """Would catch: the order of numbers in a word, zero points along the wrong side, columns that fill up a word."""
    torch.manual_seed(0)
    layout, bits = layout.split()[0], int(layout.split()[1])
    rows, columns = 11, 42
    blocks = {"channel": (1, columns), "group": (1, 6), "tensor": (rows, columns), "block": (4, 8)}
    block = blocks[strategy]
    values = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (rows, columns), dtype=torch.int8)
    scale = torch.rand(ceil(rows / block[0]), ceil(columns / block[1]))
    zero = None if symmetric else torch.randint_like(scale, -(2 ** (bits - 1)), 2 ** (bits - 1)).to(torch.int8)
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy}
    weights |= {"group_size": 6} if strategy == "group" else {"block_structure": [4, 8]}
    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"weights": weights}},
    }
    tensors = {"fc.weight": values, "fc.weight_scale": scale}
    if layout == "pack-quantized":
        tensors = {"fc.weight_packed": packed(values, bits), "fc.weight_scale": scale}
        tensors["fc.weight_shape"] = torch.tensor([rows, columns])
    expected = by_block(values, scale, block, zero)
    stored = [zero]
    if zero is not None and layout == "pack-quantized" and strategy in ("channel", "group"):
        stored = [packed(zero.T, bits).T.contiguous(), zero]  # of this and of earlier versions
    for points in stored:
        added = {} if points is None else {"fc.weight_zero_point": points}
        assert torch.equal(weight_of(tensors | added, config), expected)
    if zero is None:
        half = weight_of(tensors | {"fc.weight_scale": scale.bfloat16()}, config)
        assert torch.equal(half, by_block(values, scale.bfloat16(), block).bfloat16())


VALUES = torch.ones(6, 6).to(torch.float8_e4m3fn)
GOOD: Tensors = {"fc.weight": VALUES, "fc.weight_scale_inv": torch.ones(1, 1)}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8}
PACKED: Tensors = {
    "fc.weight_packed": torch.zeros(6, 2, dtype=torch.int32),
    "fc.weight_scale": torch.ones(6, 2),
    "fc.weight_shape": torch.tensor([6, 16]),
}


MODELOPT = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": 16, "ignore": ["lm_head"]}
FOUR: Tensors = {
    "fc.weight": torch.zeros(6, 8, dtype=torch.uint8),
    "fc.weight_scale": torch.ones(6, 1).to(torch.float8_e4m3fn),
    "fc.weight_scale_2": torch.ones(()),
}


def of_library(weights: Any = INT4, **values: Any) -> dict[str, Any]:
    """A config of compressed-tensors."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, **values}


@pytest.mark.parametrize(
    ("tensors", "config", "words"),
    [
        (GOOD, FP8 | {"rotation": "hadamard"}, "config.json has quantization_config.rotation = 'hadamard'"),
        (GOOD, FP8 | {"expert_dtype": "fp4"}, "expert_dtype = 'fp4', which is not read"),
        (GOOD, FP8 | {"weight_block_size": [4, 4]}, r"shape \(1, 1\) .* needs floating scales of shape \(2, 2\)"),
        (GOOD, FP8 | {"weight_block_size": [0, 4]}, "weight_block_size must be two positive numbers"),
        (GOOD, FP8 | {"weight_block_size": 128}, "weight_block_size must be two positive numbers, got '128'"),
        (GOOD | {"fc.weight_scale_inv": torch.ones(2, 1)}, FP8, r"\(1, 1\) or \(6, 1\)"),
        (GOOD | {"fc.weight_scale_inv": torch.ones(1, 1).int()}, FP8, "needs floating scales"),
        (GOOD | {"fc.weight": torch.ones(6, 6).to(torch.int8)}, FP8, "has dtype torch.int8, but is to be float8"),
        (GOOD | {"fc.weight_global_scale": torch.ones(1)}, FP8, "weight_global_scale is unknown"),
        ({"fc.weight_scale_inv": torch.ones(1, 1)}, FP8, "the tensor fc.weight is missing"),
        (PACKED, of_library(format="mxfp4-pack-quantized"), "format 'mxfp4-pack-quantized' is not read"),
        (FOUR, MODELOPT | {"rotation": "hadamard"}, "quantization_config.rotation = 'hadamard'"),
        (FOUR | {"fc.weight_scale_2": torch.ones(2)}, MODELOPT, "NVFP4 is a matrix of bytes with one factor"),
        (FOUR | {"fc.weight": torch.ones(6, 8)}, MODELOPT, "NVFP4 is a matrix of bytes with one factor"),
        (FOUR | {"fc.weight_scale": torch.ones(6, 2)}, MODELOPT, r"needs floating scales of shape \(6, 1\)"),
        (FOUR | {"fc.bogus": torch.ones(1), "fc.weight_zero": torch.ones(1)}, MODELOPT, "fc.weight_zero is unknown"),
        ({"fc.weight": torch.ones(6, 8), "fc.weight_scale": torch.ones(6)}, MODELOPT, "to be float8_e4m3fn then"),
        (
            PACKED,
            of_library(transform_config={"u": 1}),
            "transform_config = .*, which is not read",
        ),
        (PACKED, of_library(INT4 | {"actorder": "group"}), "actorder = 'group'"),
        (PACKED, of_library(INT4 | {"strategy": "tensor_group"}), "strategy 'tensor_group' is not read"),
        (PACKED, of_library(INT4 | {"num_bits": 3}), "num_bits must be 2, 4 or 8"),
        (PACKED, of_library(INT4 | {"group_size": 4}), "needs floating scales"),
        (PACKED, of_library(INT4 | {"symmetric": False}), "is false, but the tensor fc.weight_zero_point is missing"),
        (PACKED, of_library(INT4 | {"type": "float"}), "type must be 'int' with pack-quantized, got 'float'"),
        (PACKED, of_library(config_groups={"a": {}, "b": {}}), "config_groups must have one group, got 2"),
        (PACKED | {"fc.weight_g_idx": torch.zeros(16)}, of_library(), "fc.weight_g_idx is unknown"),
        (PACKED | {"fc.weight_shape": torch.tensor([6, 2**40])}, of_library(), r"fc.weight is \[6, 1099511627776\]"),
        (PACKED | {"fc.weight_zero_point": torch.zeros(2, 2).int()}, of_library(), r"zero_point has shape \(0, 2\)"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tensors: Tensors, config: Any, words: str) -> None:
    """Would catch: a value that changes the weights and is passed over, scales of other numbers."""
    with pytest.raises(ValueError, match=f"the quantised weights cannot be read .*{words}"):
        dequantised(checkpoint(tensors, config))


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        (GOOD, FP8 | {"ignored_layers": ["a"], "expert_dtype": "fp8", "scale_fmt": "ue8m0"}),
        (PACKED, of_library(INT4 | {"actorder": "weight"}, sparsity_config={}, transform_config={}, ignore=["b"])),
    ],
)
def test_keys_that_do_not_change_the_weights_are_passed_over(tensors: Tensors, config: Any) -> None:
    """Would catch: published files refused because of what they say of activations or of other layers."""
    assert dequantised(checkpoint(tensors, config)).tensors.keys() == {"fc.weight"}


# MTP layers of targets: the same head from quantised matrices as from the product of numbers and scales


def quantised_layers(folder: Path, how: str, is_quantised: Any) -> Tensors:
    """Quantises matrices of the MTP layers in a target's folder; returns what they are when they are read."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    plain: Tensors = {}
    for name in [name for name in tensors if is_quantised(name)]:
        weight = tensors.pop(name).float()
        rows, columns = weight.shape
        block = {"blocks": (24, 16), "channels": (1, columns), "int4": (1, 8)}[how]
        grid = ceil(rows / block[0]), ceil(columns / block[1])
        scale = torch.rand(grid) * 0.1 + 0.05
        if how == "int4":
            values = torch.randint(-8, 8, weight.shape, dtype=torch.int8)
            new = {
                "weight_packed": packed(values, 4),
                "weight_scale": scale,
                "weight_shape": torch.tensor([rows, columns]),
            }
        else:
            values = (weight * 8).to(torch.float8_e4m3fn)
            new = {"weight": values, "weight_scale" + "_inv" * (how == "blocks"): scale}
        plain[name] = by_block(values, scale, block)
        tensors |= {name.removesuffix("weight") + part: tensor for part, tensor in new.items()}
    weights = INT4 if how == "int4" else {"num_bits": 8, "type": "float", "strategy": "channel"}
    layout = "pack-quantized" if how == "int4" else "float-quantized"
    config["quantization_config"] = FP8 | {"weight_block_size": [24, 16]}
    if how != "blocks":
        config["quantization_config"] = of_library(weights, format=layout)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return plain


@pytest.mark.parametrize(
    ("name", "pattern", "how"),  # experts, which are merged, in every layout; each class in one that has scales by name
    [
        *(("mtp_transformers_glm4_moe_2layers", (".experts.",), how) for how in ("blocks", "channels", "int4")),
        ("mtp_transformers_deepseek_v3", ("_proj", "mqa"), "blocks"),
        ("mtp_qwen3_next_native", ("_proj",), "channels"),
        ("mtp_qwen3_5_native_wrapper", ("_proj", "fc"), "int4"),
    ],
)
def test_quantised_mtp_layers_are_those_of_the_product(name: str, pattern: Any, how: str, tmp_path: Path) -> None:
    """Would catch: a layout in which scales are not found, experts that are merged before they are multiplied."""
    fixture, folders = FIXTURES[name], [tmp_path / "quantised", tmp_path / "plain"]
    for folder in folders:
        shutil.copytree(fixture.target_folder, folder)
    original = load_file(folders[1] / "model.safetensors")
    first = fixture.target.config.get_text_config().num_hidden_layers

    def is_quantised(tensor: str) -> bool:
        parts = tensor.split(".")
        is_mtp = parts[0] == "mtp" or (parts[1] == "layers" and int(parts[2]) >= first)
        return is_mtp and original[tensor].dim() == 2 and any(part in tensor for part in pattern)

    plain = quantised_layers(folders[0], how, is_quantised)
    save_file({**original, **plain}, folders[1] / "model.safetensors", {"format": "pt"})
    heads = [load_mtp(fixture.target, str(folder)).state_dict() for folder in folders]
    assert plain and all(torch.equal(heads[0][key], tensor) for key, tensor in heads[1].items())


def test_mtp_layers_of_a_wrapper_class_with_experts_are_those_of_the_file(tmp_path: Path) -> None:
    """Would catch: experts of files whose names Transformers knows in the wrapper class alone, a rounded router."""
    sizes = {"hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
    others = {"vocab_size": 99, "pad_token_id": 0, "eos_token_id": None, "first_k_dense_replace": 1}
    text = {**sizes, **heads, **others, "n_group": 1, "topk_group": 1, "rope_parameters": rope}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config: Any = CONFIG_MAPPING["glm4v_moe"]
    config = config(text_config=text, vision_config=vision | {"patch_size": 2})
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    begin = "model.language_model.layers.1."
    own = {name.removeprefix(begin): torch.randn_like(tensors[name]) for name in tensors if name.startswith(begin)}
    own |= {f"{name}.weight": torch.rand(32) for name in ("enorm", "hnorm", "shared_head.norm")}
    own["eh_proj.weight"] = torch.rand(32, 64)
    layer = {f"model.language_model.layers.2.{name}": tensor for name, tensor in own.items()}
    save_file(tensors | layer, tmp_path / "model.safetensors", {"format": "pt"})
    target = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    candidates: Any = MTPCandidates(k=2)
    target.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=4, candidate_generator=candidates)
    mlp: Any = candidates._on(target).head.layers[0].block.mlp
    for index in range(4):
        expert = [own[f"mlp.experts.{index}.{part}_proj.weight"] for part in ("gate", "up")]
        assert torch.equal(mlp.experts.gate_up_proj[index], torch.cat(expert).bfloat16())
    assert torch.equal(mlp.gate.e_score_correction_bias, own["mlp.gate.e_score_correction_bias"])
    assert torch.equal(mlp.gate.weight, own["mlp.gate.weight"]) and mlp.gate.weight.dtype == torch.float32
