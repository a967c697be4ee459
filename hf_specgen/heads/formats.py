"""Reading Medusa heads in every format that is found on the Hub.

| format | file | tensors |
|---|---|---|
| our own | model.safetensors | as in `MedusaHeads` |
| Medusa v1, TGI | medusa_lm_head.pt, .safetensors | `{head}.{layer}.linear.weight`, `.bias`; `{head}.{layers}.weight` |
| Medusa v2, TGI | medusa_lm_head.safetensors | `{head}.{layer}.linear.weight`, `.bias` |
| vLLM | model.safetensors | `blocks.{head}.layers.{layer}.weight`, `.bias`; `lm_heads.{head}.weight` |

In all but our own format the numbers of heads and layers are counted in the tensors: some published configs are wrong
about them. Files are not trusted: no module is built before the tensors' names and shapes have been checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from hf_specgen.heads.compatibility import check_heads
from hf_specgen.heads.files import (
    Shape,
    Tensors,
    find_file,
    first_line,
    offline_hint,
    read_json,
    read_tensors,
    tensor_shapes,
)
from hf_specgen.heads.medusa import MedusaConfig, MedusaHeads
from hf_specgen.targets.model_parts import output_matrix

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors")
LAYER = re.compile(r"^(?:medusa_heads?\.)?(\d+)\.(\d+)\.linear\.(weight|bias)$")
OUTPUT = re.compile(r"^(?:medusa_heads?\.)?(\d+)\.(\d+)\.weight$")
VLLM_LAYER = re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")
VLLM_OUTPUT = re.compile(r"^lm_heads\.(\d+)\.weight$")


class MedusaCheckpoint(NamedTuple):
    """A set of heads on disk, checked but not loaded.

    Args:
        source: folder or Hub id.
        config: sizes and options of the heads.
        files: those that hold the tensors.
        names: for each tensor that is used, its name in `MedusaHeads`.
    """

    source: str
    config: MedusaConfig
    files: tuple[Path, ...]
    names: dict[str, str]


def load_medusa(path_or_id: str | Path, target: PreTrainedModel | None = None) -> MedusaHeads:
    """Load heads from a folder or a repository of the Hub.

    Args:
        path_or_id: where they are.
        target: the model that they draft for; if given, the heads are checked against it before they are loaded.

    Returns:
        the heads, on the CPU, in the dtype of the file, in evaluation mode.

    Raises:
        FileNotFoundError: if there are no Medusa heads.
        ValueError: if a file is damaged, contradicts itself, or the heads belong to another target.
    """
    checkpoint = inspect_medusa(path_or_id)
    config = checkpoint.config
    if target is not None:
        config.vocab_size = config.vocab_size or output_matrix(target).out_features  # Medusa v2 does not state it
        check_heads(config, target, f"the set of heads {checkpoint.source!r}")
    state: Tensors = {}
    for file in checkpoint.files:
        tensors = read_tensors(file)
        state |= {checkpoint.names[name]: tensor for name, tensor in tensors.items() if name in checkpoint.names}
    dtypes = {tensor.dtype for tensor in state.values()}
    if not all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in dtypes):
        raise ValueError(
            f"{checkpoint.source}: its tensors do not make a whole set of heads: they have the dtypes "
            f"{', '.join(sorted(map(str, dtypes)))}, of which not all are supported"
        )
    with torch.device("meta"):
        heads = MedusaHeads(config)
    for name, tensor in heads.state_dict().items():
        if name not in state:  # `medusa_fc_bias=False` of vLLM
            state[name] = torch.zeros(tensor.shape, dtype=next(iter(dtypes)))
    heads.load_state_dict(state, assign=True)
    return heads.eval()


def inspect_medusa(path_or_id: str | Path) -> MedusaCheckpoint:
    """Read a set of heads' config and the shapes of its tensors, without building or loading anything.

    Raises:
        FileNotFoundError: if there are no Medusa heads.
        ValueError: if a file is damaged, or contradicts itself.
    """
    source = str(path_or_id)
    path = find_file(source, CONFIG)
    fields = {} if path is None else read_json(path)
    own = fields.get("model_type") == MedusaConfig.model_type
    files = _files(source)
    shapes = {name: shape for file in files for name, shape in tensor_shapes(file).items()}
    if "token_map" in shapes:
        raise ValueError(f"{source}: heads with a truncated vocabulary (token_map) are not supported; use whole ones")
    names = {name: name for name in shapes} if own else native_names(shapes)
    if not any(name.startswith("blocks.") for name in names.values()):
        raise ValueError(f"{source}: no Medusa layers among its tensors {sorted(shapes)[:3]}; use another checkpoint")
    state = {names[name]: shape for name, shape in shapes.items() if name in names}
    try:
        config = _own_config(fields) if own else _counted_config(fields, state)
        config.name_or_path = source
        _check_shapes(config, state, biases_required=own)
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{source}: its tensors do not make a whole set of heads: {first_line(error)}") from None
    return MedusaCheckpoint(source, config, files, names)


def native_names(names: Iterable[str]) -> dict[str, str]:
    """The name in `MedusaHeads` of each tensor of another program's format; other tensors are left out.

    Example:
        >>> native_names(["0.0.linear.weight", "0.1.weight", "something"])
        {'0.0.linear.weight': 'blocks.0.layers.0.weight', '0.1.weight': 'lm_heads.0.weight'}
    """
    native: dict[str, str] = {}
    for name in names:
        if found := LAYER.match(name) or VLLM_LAYER.match(name):
            native[name] = f"blocks.{int(found[1])}.layers.{int(found[2])}.{found[3]}"
        elif found := OUTPUT.match(name) or VLLM_OUTPUT.match(name):
            native[name] = f"lm_heads.{int(found[1])}.weight"
    outputs = {name for name, ours in native.items() if ours.startswith("lm_heads.")}
    if outputs == {"lm_heads.0.weight"} and _count(native.values(), 1) > 1:
        del native["lm_heads.0.weight"]  # vLLM's `original_lm_head`: the one matrix is the target's
    return native


def _own_config(fields: dict[str, Any]) -> MedusaConfig:
    """From a config in our format: of its fields only those that describe heads, which `MedusaConfig` checks."""
    return MedusaConfig(**{name: fields[name] for name in MedusaConfig.__annotations__ if name in fields})


def _counted_config(fields: dict[str, Any], state: dict[str, Shape]) -> MedusaConfig:
    """From the shapes of tensors under the names of `MedusaHeads`; a config states at most the vocabulary's size."""
    own = any(name.startswith("lm_heads.") for name in state)
    hidden = state.get("blocks.0.layers.0.weight", ())
    output = state.get("lm_heads.0.weight", ()) if own else (int(fields.get("vocab_size") or 0), 0)
    if len(hidden) != 2 or len(output) != 2:
        raise ValueError("head 0 has no weight matrix")
    base = fields.get("base_model_name_or_path")
    return MedusaConfig(
        hidden_size=hidden[1],
        vocab_size=output[0],
        num_heads=_count(state, 1),
        num_layers=_count(state, 3),
        own_outputs=own,
        base={"name_or_path": base} if isinstance(base, str) else None,
    )


def _check_shapes(config: MedusaConfig, found: dict[str, Shape], biases_required: bool) -> None:
    """Raise a `ValueError` unless the tensors are those of `config`.

    Their numbers and width are compared first, so that a false config cannot make modules without end.
    """
    if config.hidden_size not in (width := found.get("blocks.0.layers.0.weight", ())):
        raise ValueError(f"hidden_size is {config.hidden_size}, but tensor 'blocks.0.layers.0.weight' is {width}")
    for name, place in (("num_heads", 1), ("num_layers", 3)):
        count = _count(found, place)
        if getattr(config, name) != count:
            raise ValueError(f"{name} is {getattr(config, name)}, but there are tensors for {count}")
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in MedusaHeads(config).state_dict().items()}
    has_biases = biases_required or any(name.endswith(".bias") for name in found)
    for name in sorted({*expected, *found}):
        optional = name.endswith(".bias") and not has_biases and name not in found
        if not optional and expected.get(name) != found.get(name):
            raise ValueError(
                f"tensor {name[:120]!r} should be {expected.get(name, 'absent')}, but is {found.get(name, 'absent')}"
            )


def _count(names: Iterable[str], place: int) -> int:
    """How many different heads (place 1) or layers (place 3) the names of the blocks have."""
    return len({name.split(".")[place] for name in names if name.startswith("blocks.")})


def _files(source: str) -> tuple[Path, ...]:
    """The files that hold the tensors: one, or the shards that an index names."""
    for name in FILES:
        if (path := find_file(source, name)) is not None:
            return (path,)
    index = find_file(source, INDEX)
    if index is None:
        raise FileNotFoundError(
            f"{source} has no Medusa heads: none of {', '.join(FILES)} is there{offline_hint(source)}"
        )
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise ValueError(f"{index}: weight_map must name a file for each tensor; download it again")
    found = {name: None if Path(name).name != name else find_file(source, name) for name in set(shards.values())}
    if missing := sorted(name for name, path in found.items() if path is None):
        raise ValueError(f"{index} names {missing[0][:120]!r}, which is not there; download it again")
    return tuple(path for _, path in sorted(found.items()) if path is not None)
