"""Weights that a library has quantised, as ordinary matrices: fp8, mxfp8, NVFP4, compressed-tensors, torchao.

A quantised matrix is multiplied by scales, one for each block; the last block of a row or column may be cut:

    weight 576 x 7168 in blocks of 128 x 128  ->  scales 5 x 56, of which row 4 is that of the last 64 rows

NVFP4 has two numbers of four bits in a byte, scales for 16 columns and a factor for all; scales of mxfp8 are exponents.
Activations are not quantised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any, cast

import torch
from safetensors import safe_open

from hf_specgen.heads.checkpoint import Checkpoint, Fields, TensorInfo
from hf_specgen.heads.source import first_line

OF_ACTIVATIONS = re.compile(r"(\.|_)((input|output|activation)_(scale|zero_point|global_scale)|[kvq]_scale)$")
"""Tensors by which activations and caches are quantised."""
DEFAULT_BLOCK = (128, 128)
"""The block of fp8 files that do not name it."""
READ_KEYS = {
    part: frozenset(names.split())
    for part, names in {
        "fp8": "quant_method fmt weight_block_size scale_fmt modules_to_convert modules_to_not_convert ignored_layers "
        "ignore dequantize activation_scheme kv_cache_scheme",
        "compressed-tensors": "quant_method format config_groups ignore kv_cache_scheme quantization_status version "
        "global_compression_ratio",
        "group": "targets weights format input_activations output_activations",
        "weights": "num_bits type symmetric strategy group_size block_structure dynamic observer observer_kwargs "
        "scale_dtype zp_dtype",
        "modelopt": "quant_method quant_algo group_size config_groups ignore exclude_modules producer quantization "
        "kv_cache_quant_algo kv_cache_scheme quantized_layers",
    }.items()
}
"""The keys of `quantization_config` and of its parts that are read, or do not concern the weights."""
HARMLESS_VALUES: Mapping[str, Sequence[Any]] = {
    "expert_dtype": ["fp8"],
    "actorder": ["weight", "static"],  # an order of columns that was used while quantising
    "sparsity_config": [{"format": "dense"}],
}
"""Values of further keys that change nothing, beside empty ones."""
FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What three bits of an fp4 number (e2m1) stand for; the fourth one is the sign."""


def dequantised(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> Checkpoint:
    """A checkpoint whose quantised weights are replaced by ordinary ones, which are computed when they are read.

    They get the dtype; without one float32 for fp8, else what the library returns. A checkpoint without weights that a
    method of `QUANTISED` has quantised is returned as it is. Raises a `ValueError` if the method's library is missing,
    or fails to read a weight.
    """
    config = quantisation(checkpoint)
    fp8 = any(name.endswith("_scale_inv") for name in checkpoint.tensors)
    modelopt = any(name.endswith("weight_scale_2") for name in checkpoint.tensors)
    method = config.text("quant_method") or ("modelopt" if modelopt else "fp8" if fp8 else "")
    pattern, reader = QUANTISED.get(method, (None, None))
    tensors = {name: info for name, info in checkpoint.tensors.items() if not OF_ACTIVATIONS.search(name)}
    stems = [match[1] for name in tensors if pattern and (match := pattern.match(name))]
    if reader is None or not stems:
        return checkpoint
    try:
        for stem in stems:
            names = [name for name in tensors if name == stem or name.startswith(f"{stem}_")]
            parts = {name.removeprefix(stem): tensors.pop(name) for name in names if name != f"{stem}_bias"}
            weight = reader(config, stem, parts)
            if dtype is not None:
                weight = _cast(weight, dtype)
            tensors[weight.name] = weight
    except ImportError:
        raise ValueError(f"the weights are quantised; install {method} to read them") from None
    except Exception as error:  # whatever the library raises for what it cannot work with
        raise ValueError(f"the quantised weights cannot be read ({first_line(error)})") from None
    return checkpoint._replace(tensors=tensors)


def quantisation(checkpoint: Checkpoint) -> Fields:
    """How the weights are quantised: an object in the config, or in that of the text model; else empty."""
    config = Fields(checkpoint.config)
    outer = config.nested("quantization_config")
    return outer if outer.values else config.nested("text_config").nested("quantization_config")


def _cast(info: TensorInfo, dtype: torch.dtype) -> TensorInfo:
    return info._replace(dtype=dtype, read=lambda: info.read().to(dtype))


def _fp8(config: Fields, name: str, parts: Mapping[str, TensorInfo]) -> TensorInfo:
    """A float8 weight with a scale for each block, channel, or for all of it."""
    _check_keys(config, "fp8")
    weight, scale = _parts(name, parts, "", "_scale" if "_scale" in parts else "_scale_inv")
    if weight.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise ValueError(f"{name} has dtype {weight.dtype}, but is to be float8")
    if scale.dtype == torch.uint8:  # mxfp8: exponents
        exponents = scale.read
        scale = scale._replace(dtype=torch.float32, read=lambda: torch.exp2(exponents().float() - 127))
    blocks = [tuple(weight.shape[-2:]), (1, weight.shape[-1]), DEFAULT_BLOCK]
    if config.get("weight_block_size") is not None:
        blocks = [_block(config, "weight_block_size")]
    return _scaled(weight, scale, blocks, torch.float32)


def _modelopt(config: Fields, name: str, parts: Mapping[str, TensorInfo]) -> TensorInfo:
    """A weight that ModelOpt has quantised: NVFP4, or float8 with a scale for all of it."""
    _check_keys(config, "modelopt")
    if "_scale_2" in parts:
        return _nvfp4(_parts(name, parts, "", "_scale", "_scale_2"))
    weight, scale = _parts(name, parts, "", "_scale")
    if weight.dtype != torch.float8_e4m3fn:
        raise ValueError(f"{name} has dtype {weight.dtype} and no {name}_scale_2, but is to be float8_e4m3fn then")
    return _scaled(weight, scale, [tuple(weight.shape[-2:]), (1, weight.shape[-1])], torch.float32)


def _nvfp4(parts: Sequence[TensorInfo], divides: bool = False) -> TensorInfo:
    """A weight of fp4 numbers, the first one of a byte in its lower bits, by its parts: numbers, scales, a factor.

    The factor multiplies or divides all of it.
    """
    packed, scale, factor = parts
    if packed.dtype != torch.uint8 or len(packed.shape) < 2 or factor.shape not in ((), (1,)):
        raise ValueError(
            f"{packed.name} has shape {packed.shape} and dtype {packed.dtype}, and {factor.name} {factor.shape}, but "
            "NVFP4 is a matrix of bytes with one factor"
        )

    def numbers() -> torch.Tensor:
        codes = packed.read()
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()
        return torch.tensor((*FOUR_BITS, *(-number for number in FOUR_BITS)), device=codes.device)[codes]

    def scales() -> torch.Tensor:
        whole = factor.read().float().reshape(())
        return scale.read().float() * (1 / whole if divides else whole)

    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    weight = packed._replace(name=packed.name.removesuffix("_packed"), shape=shape, dtype=torch.float32, read=numbers)
    return _scaled(weight, scale._replace(read=scales), [(1, 16)], torch.float32)


def _compressed_tensors(config: Fields, name: str, parts: Mapping[str, TensorInfo]) -> TensorInfo:
    """A weight of compressed-tensors: float8, int8, or integers that are packed into int32."""
    groups = config.nested("config_groups")
    if len(groups.values) != 1:
        raise ValueError(f"quantization_config.config_groups must have one group, got {len(groups.values)}")
    (label,) = groups.values
    group = groups.nested(label)
    settings = Fields(group.nested("weights").values, {"symmetric": True, "type": "int"})
    for fields, part in ((config, "compressed-tensors"), (group, "group"), (settings, "weights")):
        _check_keys(fields, part)
    layout = group.text("format") or config.text("format")
    bits = settings.integer("num_bits")
    zero = parts.get("_zero_point")
    if layout == "nvfp4-pack-quantized":
        return _nvfp4(_parts(name, parts, "_packed", "_scale", "_global_scale"), divides=True)
    if zero is None and not settings.flag("symmetric"):
        raise ValueError(f"quantization_config.symmetric is false, but the tensor {name}_zero_point is missing")
    if layout == "pack-quantized":
        if (kind := settings.text("type")) != "int":
            raise ValueError(f"quantization_config.type must be 'int' with {layout}, got {kind[:40]!r}")
        if bits not in (2, 4, 8):
            raise ValueError(f"quantization_config.num_bits must be 2, 4 or 8 with {layout}, got {bits}")
        packed, scale, shape = _parts(name, parts, "_packed", "_scale", "_shape", optional=("_zero_point",))
        weight = _unpacked_weight(packed, shape, bits)
        if zero is not None and zero.dtype == torch.int32:
            zero = _unpacked_zero_points(zero, weight.shape[0], bits)
    elif layout in ("float-quantized", "int-quantized", "naive-quantized"):
        weight, scale = _parts(name, parts, "", "_scale", optional=("_zero_point",))
        if weight.dtype not in (torch.int8, torch.float8_e4m3fn):
            raise ValueError(f"{name} has dtype {weight.dtype}, but is to be int8 or float8_e4m3fn with {layout}")
    else:
        raise ValueError(f"quantization_config.format {layout[:40]!r} is not read")
    return _scaled(weight, scale, [_compressed_block(settings, weight.shape)], scale.dtype, zero)


def _compressed_block(settings: Fields, shape: Sequence[int]) -> tuple[int, int]:
    """The rows and columns for which there is one scale."""
    size = settings.get("group_size")
    strategy = settings.text("strategy") or {None: "tensor", -1: "channel"}.get(size, "group")
    if strategy == "group":
        return 1, settings.integer("group_size")
    if strategy == "block":
        return _block(settings, "block_structure")
    if strategy not in ("tensor", "channel"):
        raise ValueError(f"quantization_config.strategy {strategy[:40]!r} is not read")
    return (shape[0] if strategy == "tensor" else 1), shape[1]


def _torchao(config: Fields, name: str, parts: Mapping[str, TensorInfo]) -> TensorInfo:
    """A weight that torchao has quantised, by what the file's metadata say of it."""
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    file = parts["_qdata"].file
    name = name.removesuffix("_weight") + "weight"
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata() or {}
    if name not in metadata:
        raise ValueError(f"the file's metadata do not describe {name}")
    for info in parts.values():
        if len(info.shape) == 1:  # it would be broadcast to more numbers than the file has
            raise ValueError(f"{info.name} has {info.shape[0]} elements, but should be a matrix")
    state = {info.name: info.read() for info in parts.values()}
    described = {name: metadata[name], "tensor_names": json.dumps([name])}
    weight = cast(torch.Tensor, unflatten_tensor_state_dict(state, described)[0][name].dequantize())
    return TensorInfo.of(name, weight, file)


def _check_keys(fields: Fields, part: str) -> None:
    """Raise for a key that may change how the weights are computed and is not read."""
    for key, value in fields.values.items():
        if key not in READ_KEYS[part] and value and value not in HARMLESS_VALUES.get(key, ()):
            raise ValueError(f"config.json has quantization_config.{key} = {str(value)[:60]!r}, which is not read")


def _parts(
    name: str, parts: Mapping[str, TensorInfo], *endings: str, optional: Sequence[str] = ()
) -> tuple[TensorInfo, ...]:
    """The tensors of a weight by the endings of their names; raises if there are fewer or more."""
    different = sorted(parts.keys() ^ {*endings, *(parts.keys() & set(optional))})
    if different:
        state = "unknown" if different[0] in parts else "missing"
        raise ValueError(f"the tensor {name}{different[0]} is {state}")
    return tuple(parts[ending] for ending in endings)


def _block(fields: Fields, name: str) -> tuple[int, int]:
    """The rows and columns of a block."""
    value = fields.get(name)
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        raise ValueError(f"quantization_config.{name} must be two positive numbers, got {str(value)[:60]!r}")
    return value[0], value[1]


def _scaled(
    weight: TensorInfo,
    scale: TensorInfo,
    blocks: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    zero: TensorInfo | None = None,
) -> TensorInfo:
    """The product of a weight and its scales, of which each is that of a block of the first size that fits."""
    *outer, rows, columns = weight.shape if len(weight.shape) > 1 else (*weight.shape, 0, 0)
    shape = scale.shape if len(scale.shape) > 1 else (*(scale.shape or (1,)), 1)
    grids = {block: (*outer, ceil(rows / block[0]), ceil(columns / block[1])) for block in blocks}
    block = next((block for block, grid in grids.items() if grid == shape), None)
    if block is None or not scale.dtype.is_floating_point:
        expected = " or ".join(map(str, grids.values()))
        raise ValueError(
            f"{scale.name} has shape {scale.shape} and dtype {scale.dtype}, but {weight.name} of shape {weight.shape} "
            f"needs floating scales of shape {expected}; check the size of its blocks in quantization_config"
        )
    if zero is not None and zero.shape != scale.shape:
        raise ValueError(f"{zero.name} has shape {zero.shape}, but {scale.name} has {scale.shape}")

    def read() -> torch.Tensor:
        of_row = torch.arange(rows) // block[0]
        of_column = torch.arange(columns) // block[1]
        spread = lambda info: info.read().float().reshape(shape)[..., of_row, :][..., of_column]  # noqa: E731
        values = weight.read().float()
        return ((values if zero is None else values - spread(zero)) * spread(scale)).to(dtype)

    return TensorInfo(weight.name, weight.shape, dtype, weight.file, read)


def _unpacked_weight(packed: TensorInfo, shape: TensorInfo, bits: int) -> TensorInfo:
    """Integers around 0 of which each int32 of the file holds several, the first one in the lowest bits."""
    sizes = shape.read()
    numbers = [*packed.shape[:-1], packed.shape[-1] * (32 // bits)] if sizes.is_meta else sizes.flatten().tolist()
    name = packed.name.removesuffix("_packed")
    if packed.dtype != torch.int32 or [*numbers[:-1], ceil(numbers[-1] * bits / 32)] != list(packed.shape):
        raise ValueError(f"{packed.name} has shape {packed.shape} and dtype {packed.dtype}, but {name} is {numbers}")
    read = lambda: _integers(packed.read(), numbers[-1], bits)  # noqa: E731
    return TensorInfo(name, tuple(numbers), torch.int8, packed.file, read)


def _unpacked_zero_points(packed: TensorInfo, rows: int, bits: int) -> TensorInfo:
    """Zero points, which are packed along columns."""
    read = lambda: _integers(packed.read().T, rows, bits).T  # noqa: E731
    shape = (rows if packed.shape[0] == ceil(rows * bits / 32) else 0, *packed.shape[1:])
    return packed._replace(shape=shape, dtype=torch.int8, read=read)


def _integers(packed: torch.Tensor, count: int, bits: int) -> torch.Tensor:
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(-2)[..., :count] - 2 ** (bits - 1)


WeightReader = Callable[[Fields, str, Mapping[str, TensorInfo]], TensorInfo]
"""From the config of the quantisation, the beginning of a weight's names and its tensors by their endings."""
FP8_NAME = re.compile(r"^(.+(?=_scale_inv$)|.+\.weight(?=_scale$))")
QUANTISED: Mapping[str, tuple[re.Pattern[str], WeightReader]] = {
    "fp8": (FP8_NAME, _fp8),
    "mxfp8": (FP8_NAME, _fp8),
    "modelopt": (re.compile(r"^(.+\.weight)_scale$"), _modelopt),
    "compressed-tensors": (re.compile(r"^(.+\.weight)_scale$"), _compressed_tensors),
    "torchao": (re.compile(r"^(.+\._weight)_qdata$"), _torchao),
}
"""By `quant_method` the name of a tensor that every quantised weight has, and what reads the weight."""
