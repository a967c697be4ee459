"""Reads untrusted checkpoints of heads and adapters: JSON files, and tensors whose shapes are known before allocating.

Pickled files are read by `torch.load(weights_only=True)`, and no tensor can take more memory than its file has bytes.
Every problem is reported as one `ValueError` or `OSError` that names the file.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from hf_specgen.heads.source import Source, first_line

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED = "pytorch_model.bin"
MASK_EMBEDDING = "mask_embedding.pt"
"""Beside the weights of some block heads: a learnt vector for the mask token."""
MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
"""Files that only Medusa heads have; some come without a config."""
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
"""PEFT puts this before the names of the adapted module's tensors."""
USED_LORA_KEYS = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "init_lora_weights", "base_model_name_or_path", "revision"),
}
"""Keys of adapter_config.json that are read."""
IGNORED_LORA_KEYS = {
    # Which layers are adapted, and what else was trained: the tensors show it.
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save", "bias"),
    # Identities, training, layers that are not linear, and settings of options that are keys of their own.
    *("task_type", "auto_mapping", "peft_version", "inference_mode", "lora_dropout", "fan_in_fan_out"),
    *("runtime_config", "megatron_core", "qalora_group_size"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
}
"""Keys of adapter_config.json that do not change what a plain LoRA computes. All further keys have to be empty or
false."""
PLAIN_INITS = (None, True, False, "gaussian", "orthogonal", "eva", "mica")
"""Values of `init_lora_weights` with which PEFT leaves the weights of the adapted layers as they are."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    size = path.stat().st_size
    if size > 64 * 2**20:  # published configs and index files have at most a few megabytes
        raise ValueError(f"{path} has {size:,} bytes, more than any {path.name}; download it again")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply to be a {path.name}; download it again") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object; download it again")
    return content


class Fields:
    """The values of an untrusted config, with defaults, each checked when it is read."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self.values = values
        self.defaults = defaults or {}

    def get(self, name: str) -> Any:
        """The value or its default, unchecked; None if there is neither."""
        value = self.values.get(name)
        return self.defaults.get(name) if value is None else value

    def optional_integer(self, name: str, low: int = 0) -> int | None:
        """A whole number that is at least `low`, or None."""
        high = 2**31 - 1
        is_valid = lambda value: value is None or (type(value) is int and low <= value <= high)  # noqa: E731
        return self._checked(name, is_valid, f"a whole number between {low} and {high}")

    def integer(self, name: str, low: int = 1) -> int:
        """A whole number that is at least `low`."""
        value = self.optional_integer(name, low)
        if value is None:
            raise ValueError(f"the config has no {name}")
        return value

    def number(self, name: str) -> float:
        """A positive finite number."""
        is_valid = lambda value: type(value) in (int, float) and 0 < value < math.inf  # noqa: E731
        return float(self._checked(name, is_valid, "a positive number"))

    def flag(self, name: str) -> bool:
        """True or false; missing is false."""
        return bool(self._checked(name, lambda value: isinstance(value, bool | None), "true or false"))

    def text(self, name: str) -> str:
        """A string; empty if it is missing."""
        return self._checked(name, lambda value: isinstance(value, str | None), "a string") or ""

    def nested(self, name: str) -> Fields:
        """The object in a field; empty if it is missing."""
        return Fields(self._checked(name, lambda value: isinstance(value, dict | None), "an object") or {})

    def _checked(self, name: str, is_valid: Callable[[Any], bool], description: str) -> Any:
        value = self.get(name)
        if not is_valid(value):
            raise ValueError(f"{name} must be {description}, got {_short(value)}")
        return value


def _short(value: Any) -> str:
    """A value and its type, for a message."""
    return f"{type(value).__name__} {str(value)[:60]!r}"


class TensorInfo(NamedTuple):
    """A tensor that is read when it is needed, and its name in the file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    read: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, file: Path) -> TensorInfo:
        """A tensor that is in memory already."""
        return cls(name, tuple(tensor.shape), tensor.dtype, file, tensor.clone)


def tensor_infos(path: Path) -> dict[str, TensorInfo]:
    """The tensors in a safetensors or pickled file, by name; their memory is bounded by the size of the file."""
    infos: dict[str, TensorInfo] = {}
    try:
        if path.suffix != ".safetensors":
            return {name: TensorInfo.of(name, tensor, path) for name, tensor in _unpickled(path).items()}
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                view = file.get_slice(name)
                if shape := tuple(view.get_shape()):
                    read = lambda view=view: view[:].clone()  # noqa: E731  (a view would keep the whole file mapped)
                    infos[name] = TensorInfo(name, shape, view[:0].dtype, path, read)
                else:
                    infos[name] = TensorInfo.of(name, file.get_tensor(name), path)
    except Exception as error:  # unpickling a damaged file may raise anything
        raise ValueError(f"{path} cannot be read as tensors ({first_line(error)}); download it again") from None
    return infos


def read_linear(path: Path, prefix: str, shape: tuple[int, int]) -> nn.Linear:
    """The linear layer that is all of a file; `ValueError` for other tensors, or a weight of another shape."""
    tensors = {name.removeprefix(prefix): tensor for name, tensor in tensor_infos(path).items()}
    found = {name: tensor.shape for name, tensor in tensors.items()}
    if found not in ({"weight": shape}, {"weight": shape, "bias": shape[:1]}):
        raise ValueError(f"{path} has the tensors {found}, but the draft and this target need a weight of {shape}")
    _check_unquantised(tensors)
    with torch.device("meta"):
        linear = nn.Linear(shape[1], shape[0], bias="bias" in found)
    linear.load_state_dict({name: tensor.read() for name, tensor in tensors.items()}, assign=True)
    return linear


def _check_unquantised(tensors: Mapping[str, TensorInfo]) -> None:
    """Raise a `ValueError` for a tensor whose numbers are integers, or have less than 16 bits."""
    for name, info in tensors.items():
        if not info.dtype.is_floating_point or info.dtype.itemsize < 2:
            raise ValueError(
                f"{info.file} has the tensor {name[:120]!r} of {info.dtype}; load one that is not quantised"
            )


@contextmanager
def named_errors(source: object) -> Iterator[None]:
    """Names a file or checkpoint in each `ValueError` that is raised inside."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def read_mask_embedding(path: Path, hidden_size: int, token: int) -> torch.Tensor:
    """`[hidden_size]` the vector in a file, which stands for the mask token; alone, or in a dictionary with its id."""
    size = path.stat().st_size
    if size > 2**20 + 8 * hidden_size:
        raise ValueError(f"it has {size:,} bytes, more than a vector of {hidden_size} numbers; download it again")
    try:
        content = _loaded(path)
    except Exception as error:  # unpickling a damaged file may raise anything
        raise ValueError(f"it cannot be read as a vector ({first_line(error)}); download it again") from None
    described = content if isinstance(content, dict) else {"embedding": content}
    if described.keys() - {"mask_token_id", "embedding"} or described.get("mask_token_id", token) != token:
        raise ValueError(
            f"it has to hold the embedding of mask_token_id {token} alone, but has {str(list(described.items()))[:80]}"
        )
    vector = described.get("embedding")
    if not isinstance(vector, torch.Tensor) or vector.shape not in ((hidden_size,), (1, hidden_size)):
        raise ValueError(f"the embedding must be a vector of {hidden_size} numbers, got {str(vector)[:60]}")
    if not vector.is_floating_point() or vector.layout != torch.strided or vector.is_meta:
        raise ValueError(f"the embedding must have floating-point numbers, got {vector.dtype}")
    return vector.reshape(hidden_size)


def _loaded(path: Path) -> Any:
    """What a pickled file holds; tensors are views of the memory-mapped file if it is a zip archive."""
    zipped = zipfile.is_zipfile(path)
    if zipped:
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
                raise ValueError("it unpacks to more than its own size")
    return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)


def _unpickled(path: Path) -> dict[str, torch.Tensor]:
    """The tensors in a pickled file, by name, as views of the memory-mapped file if it is a zip archive."""
    size = path.stat().st_size
    tensors = _loaded(path)
    if not isinstance(tensors, dict) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise ValueError("not a dictionary of tensors")
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_meta or tensor.numel() * tensor.element_size() > size:
            raise ValueError(f"{str(name)[:80]!r} of shape {tuple(tensor.shape)} does not fit into the file")
    return cast("dict[str, torch.Tensor]", {str(name): tensor for name, tensor in tensors.items()})


class Checkpoint(NamedTuple):
    """A config and the tensors beside it."""

    source: Source
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]


def open_checkpoint(source: Source, wanted: Callable[[str], bool] = lambda name: True) -> Checkpoint:
    """Read a checkpoint's config and the headers of those tensor files that hold any of the wanted tensors."""
    files = ((name, source.file(name)) for name in (*MEDUSA_FILES, INDEX, SINGLE, PICKLED))
    file, index = next((pair for pair in files if pair[1] is not None), (None, None))
    remedy = ", so it is not a checkpoint; name a folder or Hub id that holds one"
    path = source.file(CONFIG) if file in MEDUSA_FILES else source.required_file(CONFIG, remedy)
    config = {} if path is None else read_json(path)
    if not isinstance(config.get("model_type"), str | None):
        raise ValueError(f"{path}: model_type must be a string, got {_short(config['model_type'])}; download it again")
    names = [] if file is None else [file]
    if index is not None and file == INDEX:
        weight_map = Fields(read_json(index)).nested("weight_map").values
        names = sorted({str(file) for name, file in weight_map.items() if wanted(name)})
    infos: dict[str, TensorInfo] = {}
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{source}: {INDEX} names a file outside of the checkpoint, {name[:120]!r}")
        path = source.file(name)
        if path is None:
            raise ValueError(f"{source}: the file {name[:120]} is missing; download it again")
        infos |= tensor_infos(path)
    return Checkpoint(source, config, {name: info for name, info in infos.items() if wanted(name)})


def without_numbers(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with tensors on the meta device: whether it is a head that fits is seen by names and shapes."""
    tensors = {
        name: info._replace(read=partial(torch.empty, info.shape, dtype=info.dtype, device="meta"))
        for name, info in checkpoint.tensors.items()
    }
    return checkpoint._replace(tensors=tensors)


def load_adapter(module: nn.Module, source: Source, saved: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """The tensors of a plain LoRA adapter by their names in the module, with `lora_B` scaled.

    It adapts linear layers, and may hold whole new weights of the submodules `saved`.
    """
    path, weights = (
        source.required_file(name, "; copy the whole adapter there") for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
    )
    with named_errors(path):
        rank, scale = _rank_and_scale(Fields(read_json(path)))
    tensors = tensor_infos(weights)
    expected: dict[str, tuple[int, ...]] = {}
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear) and f"{PEFT_PREFIX}{name}.lora_A.weight" in tensors:
            expected[f"{PEFT_PREFIX}{name}.lora_A.weight"] = (rank, part.in_features)
            expected[f"{PEFT_PREFIX}{name}.lora_B.weight"] = (part.out_features, rank)
    if not expected:
        raise ValueError(f"{source} adapts no linear layer of a {type(module).__name__}; load the head it was made for")
    for name in saved:
        if any(key.startswith(f"{PEFT_PREFIX}{name}.") for key in tensors):
            own = module.get_submodule(name).state_dict().items()
            expected |= {f"{PEFT_PREFIX}{name}.{key}": tuple(tensor.shape) for key, tensor in own}
    for name in sorted({*tensors, *expected}):
        found = tensors[name].shape if name in tensors else "absent"
        fitting = expected.get(name, "absent")
        if found != fitting:
            raise ValueError(
                f"{weights} does not fit {path.name} and the target: tensor {name[:120]!r} should be {fitting}, but is "
                f"{found}; load the adapter that belongs to this target"
            )
    _check_unquantised(tensors)
    scales = {name: scale if ".lora_B." in name else 1.0 for name in expected}
    return {name.removeprefix(PEFT_PREFIX): info.read() * scales[name] for name, info in tensors.items()}


def _rank_and_scale(config: Fields) -> tuple[int, float]:
    """The rank of the matrices of a plain LoRA, and the factor of the products of `lora_B` and `lora_A`."""
    check_plain_lora(config.values)
    rank = config.integer("r")
    return rank, config.number("lora_alpha") / (math.sqrt(rank) if config.get("use_rslora") else rank)


def check_plain_lora(config: Mapping[str, Any]) -> None:
    """Raise a `ValueError` for an adapter config of PEFT by which layers compute more than their LoRA matrices say."""
    if config.get("peft_type") != "LORA":
        raise ValueError(f"peft_type must be 'LORA', got {config.get('peft_type')!r:.80}; train a LoRA adapter")
    for name, value in config.items():
        if value and name not in USED_LORA_KEYS | IGNORED_LORA_KEYS:
            raise ValueError(f"{name}={value!r:.80} is not supported; train a plain LoRA adapter")
    if (init := config.get("init_lora_weights")) not in PLAIN_INITS:
        raise ValueError(
            f"init_lora_weights={init!r:.80} is not supported, as it may change the weights of the adapted layers; "
            "train with another one, or convert the adapter (path_initial_model_for_weight_conversion of PEFT)"
        )


def base_of_adapter(source: Source) -> Source | None:
    """The draft head or draft model that the LoRA adapter in a folder or repository belongs to; None without one."""
    if (path := source.file(ADAPTER_CONFIG)) is None:
        return None
    with named_errors(path):
        config = Fields(read_json(path))
        if not (name := config.text("base_model_name_or_path")):
            return None
        base = replace(source, path_or_id=name, revision=config.text("revision") or None, subfolder=None)
        if base.file(ADAPTER_CONFIG) is not None:
            raise ValueError(f"base_model_name_or_path {name[:120]!r} is an adapter itself; merge that adapter first")
        return base


@torch.no_grad()
def merge_adapter(module: nn.Module, source: Source) -> None:
    """Add the LoRA matrices in a folder or repository to the linear layers of a module."""
    tensors = load_adapter(module, source)
    for name, up in tensors.items():
        if name.endswith(".lora_B.weight"):
            layer = name.removesuffix(".lora_B.weight")
            weight = cast(Any, module.get_submodule(layer)).weight
            weight += (up.float() @ tensors[f"{layer}.lora_A.weight"].float()).to(weight)


def write_checkpoint(
    folder: str | Path, config: dict[str, Any], name: str, tensors: Mapping[str, torch.Tensor]
) -> list[Path]:
    """Write config.json and a file of tensors; returns their paths."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    copies = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}
    if name.endswith(".pt"):
        torch.save(copies, path / name)
    else:
        save_file(copies, path / name, metadata={"format": "pt"})
    return [path / "config.json", path / name]
