"""The decoder layers of a checkpoint: their shapes from its tensors, the rest from its config.

Shapes are taken from the tensors, because configs in the wild are wrong about them and some programs ignore fields that
others obey (`head_dim`). Where the config names the same size, it has to agree.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from hf_specgen.heads.base import DraftHead
from hf_specgen.heads.checkpoint import Checkpoint, TensorInfo
from hf_specgen.heads.fields import Fields
from hf_specgen.heads.layers import LayerConfig

MODEL_TYPES: Mapping[str, type[PretrainedConfig]] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
LAYER_NAME = re.compile(r"^layers\.(\d{1,6})\.")
ROPE_NUMBERS = (
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
    "mscale",
    "mscale_all_dim",
)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
Names = dict[str, str]
"""Names of a head's own tensors, each with the name in the file."""


@lru_cache(maxsize=len(MODEL_TYPES))
def _defaults(model_type: str) -> dict[str, Any]:
    return MODEL_TYPES[model_type]().to_dict()


def layer_fields(values: Mapping[str, Any]) -> Fields:
    """A config of Transformers' kind, with the defaults of its model type: files may leave out what equals them.

    Raises:
        ValueError: if its layers are of a type that is not known.
    """
    model_type = values.get("model_type") or "llama"
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise ValueError(
            f"draft layers of model_type {str(model_type)[:60]!r} are not supported, only {', '.join(MODEL_TYPES)}"
        )
    return Fields(values, _defaults(model_type))


def read_layer(fields: Fields, checkpoint: Checkpoint, names: Names, strict_bias: bool = False) -> LayerConfig:
    """The configuration of a checkpoint's decoder layers, from the shapes of its first one.

    Args:
        fields: of `layer_fields`.
        checkpoint: the checkpoint.
        names: its tensors, by the names of our modules.
        strict_bias: whether `attention_bias` means that the output projection has a bias, too.

    Raises:
        ValueError: if tensors are missing, or config and tensors contradict each other.
    """
    query, output = (_matrix(checkpoint, names, f"self_attn.{part}_proj") for part in ("q", "o"))
    keys, gate = _matrix(checkpoint, names, "self_attn.k_proj"), _matrix(checkpoint, names, "mlp.gate_proj")
    heads, said_kv_heads = fields.integer("num_attention_heads"), fields.values.get("num_key_value_heads")
    head_dim = query[0] // heads
    kv_heads = keys[0] // max(head_dim, 1)
    said_head_dim = fields.values.get("head_dim")  # EAGLE ignores it and divides the hidden size
    fits_head_dim = said_head_dim in (None, head_dim) or query[0] == output[0]
    whole = query[0] == heads * head_dim and keys[0] == kv_heads * head_dim and head_dim > 0
    if not whole or not fits_head_dim or said_kv_heads not in (None, kv_heads):
        raise ValueError(
            f"config.json says {heads} attention heads and {str(said_kv_heads)[:40]} key/value heads of size "
            f"{str(said_head_dim)[:40]}, but the projections have {query[0]} and {keys[0]} rows"
        )
    for name, found in (("hidden_size", output[0]), ("intermediate_size", gate[0])):
        if fields.values.get(name) not in (None, found):
            raise ValueError(f"config.json says {name} {str(fields.values[name])[:40]}, but the tensors have {found}")
    bias, qwen3 = fields.flag("attention_bias"), fields.values.get("model_type") == "qwen3"
    return LayerConfig(
        hidden_size=output[0],
        intermediate_size=gate[0],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps"),
        activation=fields.text("hidden_act"),
        qkv_bias=bias or fields.flag("qkv_bias") or "layers.0.self_attn.q_proj.bias" in names,
        output_bias=(bias and strict_bias) or "layers.0.self_attn.o_proj.bias" in names,
        mlp_bias=fields.flag("mlp_bias") or "layers.0.mlp.gate_proj.bias" in names,
        qk_norm=qwen3 or "layers.0.self_attn.q_norm.weight" in names,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rope=read_rope(fields),
    )


def count_layers(fields: Fields, names: Collection[str]) -> int:
    """The number of layers among the tensors, which the config has to confirm.

    Raises:
        ValueError: if there are none, some are missing, or the config says another number.
    """
    found = {int(match[1]) for name in names if (match := LAYER_NAME.match(name))}
    if not found or found != set(range(len(found))):
        raise ValueError(f"the tensors have no complete sequence of layers, only numbers {sorted(found)[:8]}")
    said = fields.optional_integer("num_hidden_layers") if "num_hidden_layers" in fields.values else None
    if said not in (None, len(found)):
        raise ValueError(f"config.json says {said} layers, but the tensors have {len(found)}")
    return len(found)


def read_rope(fields: Fields) -> dict[str, Any]:
    """Rotary parameters of a config of Transformers 4 or 5, in the form of 5; without any, base 10,000.

    The target's own base plays no part: EAGLE heads without `rope_theta` were trained with 10,000.

    Raises:
        ValueError: if a number is not one, or only a part of each head is rotated.
    """
    written = Fields(fields.values)
    newer = written.nested("rope_parameters")
    given = {**written.nested("rope_scaling").values, **newer.values}
    if newer.get("rope_theta") is None and written.get("rope_theta") is not None:
        given["rope_theta"] = written.get("rope_theta")
    parameters = Fields(given, {"rope_theta": 10000.0})
    kind = given.get("rope_type") or given.get("type") or "default"
    if not isinstance(kind, str):
        raise ValueError(f"rope_type must be a string, got {str(kind)[:60]!r}")
    rope: dict[str, Any] = {"rope_theta": parameters.number("rope_theta")}
    rope["rope_type"] = "default" if kind == "mrope" else kind  # its axes agree wherever there is only text
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        rope["partial_rotary_factor"] = parameters.number("partial_rotary_factor")
        if kind != "proportional":
            raise ValueError(
                f"partial_rotary_factor {rope['partial_rotary_factor']} with rope_type {kind!r} is unknown"
            )
    for name in ROPE_NUMBERS:
        if given.get(name) is not None:
            rope[name] = given[name] if type(given[name]) is int else parameters.number(name)
    for name in ("short_factor", "long_factor"):
        if given.get(name) is not None:
            rope[name] = _numbers(name, given[name])
    return rope


def fill(head: DraftHead, checkpoint: Checkpoint, names: Names, dtype: torch.dtype | None = None) -> None:
    """Load a checkpoint's tensors into a head that was built on the "meta" device.

    Args:
        head: the head; afterwards on the CPU, frozen, in evaluation mode.
        checkpoint: the checkpoint.
        names: its tensors, by the names of the head's modules.
        dtype: of the head; None takes that of its first matrix in the file.

    Raises:
        ValueError: if a tensor is missing, not part of such a head, or of another shape or kind.
    """
    expected = {name: tensor for name, tensor in head.state_dict().items() if name != "draft_to_target"}
    missing, unknown = sorted(expected.keys() - names.keys()), sorted(names.keys() - expected.keys())
    if missing:
        raise ValueError(f"{len(missing)} tensors are missing, such as {', '.join(missing[:3])}; download it again")
    if unknown:
        raise ValueError(
            f"a head with this config.json has no tensors such as {', '.join(names[name] for name in unknown[:3])} "
            f"({len(unknown)} in all); it is of a variant that is not supported"
        )
    membership = checkpoint.tensors.get("t2d")
    if membership is not None and membership.shape != (head.config.vocab_size,):
        raise ValueError(f"t2d has shape {membership.shape}, but config.json says vocab_size {head.config.vocab_size}")
    for name, wanted in expected.items():
        _check(names[name], checkpoint.tensors[names[name]], wanted)
    dtype = dtype or checkpoint.tensors[names["layers.0.self_attn.q_proj.weight"]].dtype
    tensors, state = checkpoint.read(names.values()), {}
    for name, wanted in expected.items():
        kind = dtype if wanted.is_floating_point() else wanted.dtype
        state[name] = tensors[names[name]].to(kind).reshape(wanted.shape)
    if head.draft_to_target is not None:
        state["draft_to_target"] = _draft_to_target(checkpoint, head)
    head.load_state_dict(state, assign=True)
    head.eval().requires_grad_(False)


def _check(name: str, info: TensorInfo, wanted: torch.Tensor) -> None:
    if _squeezed(info.shape) != _squeezed(tuple(wanted.shape)):
        raise ValueError(f"tensor {name} has shape {info.shape}, but config.json makes it {tuple(wanted.shape)}")
    if wanted.is_floating_point() and info.dtype not in FLOATS:
        raise ValueError(f"tensor {name} has dtype {info.dtype}; quantised heads are not supported")
    if not wanted.is_floating_point() and info.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"tensor {name} has dtype {info.dtype}, but it holds token ids")


def _draft_to_target(checkpoint: Checkpoint, head: DraftHead) -> torch.Tensor:
    size, vocab = head.config.draft_vocab_size, head.config.vocab_size
    info = checkpoint.tensors.get("d2t")
    if info is None or info.shape != (size,) or info.dtype not in (torch.int64, torch.int32):
        found = "none" if info is None else f"one of shape {info.shape} and dtype {info.dtype}"
        raise ValueError(
            f"a draft vocabulary of {size} tokens needs an integer tensor d2t of that length, found {found}"
        )
    ids = checkpoint.read(["d2t"])["d2t"].long() + torch.arange(size)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise ValueError(f"d2t maps draft tokens to ids outside of the target's vocabulary of {vocab}")
    return ids


def _matrix(checkpoint: Checkpoint, names: Names, part: str) -> tuple[int, ...]:
    name = f"layers.0.{part}.weight"
    if name not in names:
        raise ValueError(f"the tensor {name} is missing")
    shape = checkpoint.tensors[names[name]].shape
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"tensor {names[name]} must be a matrix, but has shape {shape}")
    return shape


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _numbers(name: str, value: Any) -> list[float]:
    if not isinstance(value, list) or not all(type(entry) in (int, float) for entry in value):
        raise ValueError(f"{name} must be a list of numbers, got {str(value)[:60]!r}")
    return [float(entry) for entry in value]
