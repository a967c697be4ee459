"""Reading untrusted checkpoints: config.json, and tensors whose shapes are known before anything is allocated.

Safetensors files state their shapes in a header that is checked against the size of the file; pickled files are read by
`hf_specgen.heads.files`. So the memory that a checkpoint can take is bounded by its size on disk, whatever its
config.json says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError, safe_open

from hf_specgen.heads.files import first_line, read_json, unpickled_tensors

CONFIG, INDEX, SINGLE, PICKLED = (
    "config.json",
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin",
)


class TensorInfo(NamedTuple):
    """What is known of a tensor without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path


@dataclass(frozen=True)
class Source:
    """Where a checkpoint lies, in the terms of `from_pretrained`.

    Args:
        path_or_id: a folder, or a repository of the Hub.
        revision, token, subfolder, cache_dir: as for `from_pretrained`.
    """

    path_or_id: str
    revision: str | None = None
    token: str | bool | None = None
    subfolder: str | None = None
    cache_dir: str | Path | None = None

    def file(self, name: str) -> Path | None:
        """The local path of a file, downloaded if necessary; None if the checkpoint has no such file.

        Raises:
            FileNotFoundError: if there is neither a folder nor a repository of that name.
            GatedRepoError: if access to the repository has to be requested first.
        """
        folder = Path(self.path_or_id)
        if folder.is_dir():
            path = folder / (self.subfolder or "") / name
            return path if path.is_file() else None
        try:
            return Path(
                hf_hub_download(
                    self.path_or_id,
                    name,
                    subfolder=self.subfolder,
                    revision=self.revision,
                    token=self.token,
                    cache_dir=self.cache_dir,
                )
            )
        except GatedRepoError:
            raise
        except (HFValidationError, RepositoryNotFoundError):
            raise FileNotFoundError(f"{self.path_or_id} is neither a folder nor a repository of the Hub") from None
        except EntryNotFoundError as error:
            if name == CONFIG and isinstance(error, LocalEntryNotFoundError):
                raise FileNotFoundError(
                    f"{self.path_or_id} is not a folder, and as a repository it is neither cached nor within reach"
                ) from None
            return None  # offline, a file that is not in the cache counts as missing


@dataclass(frozen=True)
class Checkpoint:
    """A config and the tensors beside it.

    Args:
        source: its name in messages.
        config: config.json.
        tensors: shape and dtype of each tensor; empty if there is no file of tensors.
    """

    source: str
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read some of the tensors into memory.

        Raises:
            ValueError: if a file is damaged.
        """
        files: dict[Path, list[str]] = {}
        for name in names:
            files.setdefault(self.tensors[name].file, []).append(name)
        result: dict[str, torch.Tensor] = {}
        with ExitStack() as opened:
            for path, wanted in files.items():
                tensors: Any = unpickled_tensors(path) if path.suffix == ".bin" else opened.enter_context(_header(path))
                read = tensors.__getitem__ if path.suffix == ".bin" else tensors.get_tensor
                # A clone, since a view into the file would keep the whole of it mapped.
                result.update({name: read(name).clone() for name in wanted})
        return result


def open_checkpoint(source: Source, wanted: Callable[[str], bool] = lambda name: True) -> Checkpoint:
    """Read a checkpoint's config and the headers of its tensor files.

    Args:
        source: where it is.
        wanted: which tensors are of interest; files without any are neither downloaded nor opened.

    Raises:
        FileNotFoundError: if there is no such folder or repository.
        ValueError: if it is not a checkpoint, or damaged.
    """
    where = source.path_or_id + (f"/{source.subfolder}" if source.subfolder else "")
    path = source.file(CONFIG)
    if path is None:
        raise ValueError(f"{where} has no {CONFIG}, so it is not a checkpoint")
    infos = _tensor_infos(source, where, wanted)
    return Checkpoint(where, read_json(path), {name: info for name, info in infos.items() if wanted(name)})


def _tensor_infos(source: Source, where: str, wanted: Callable[[str], bool]) -> dict[str, TensorInfo]:
    if (index := source.file(INDEX)) is not None:
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ValueError(f"{where}: {INDEX} has no weight_map of file names")
        return _merged(source, where, sorted({file for name, file in names.items() if wanted(name)}))
    for name in (SINGLE, PICKLED):
        if source.file(name) is not None:
            return _merged(source, where, [name])
    return {}


def _merged(source: Source, where: str, names: list[str]) -> dict[str, TensorInfo]:
    infos: dict[str, TensorInfo] = {}
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{where}: {INDEX} names a file outside of the checkpoint, {name!r}")
        path = source.file(name)
        if path is None:
            raise ValueError(f"{where}: the file {name} is missing; download it again")
        infos |= _pickled_infos(path) if path.suffix == ".bin" else _safetensors_infos(path)
    return infos


DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def _header(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as safetensors ({first_line(error)}); download it again") from None


def _safetensors_infos(path: Path) -> dict[str, TensorInfo]:
    infos = {}
    with _header(path) as file:
        for name in file.keys():  # noqa: SIM118  (not a mapping)
            view = file.get_slice(name)
            if view.get_dtype() not in DTYPES:
                raise ValueError(f"{path}: tensor {name} has the unknown dtype {view.get_dtype()}")
            infos[name] = TensorInfo(tuple(view.get_shape()), DTYPES[view.get_dtype()], path)
    return infos


def _pickled_infos(path: Path) -> dict[str, TensorInfo]:
    return {
        name: TensorInfo(tuple(tensor.shape), tensor.dtype, path) for name, tensor in unpickled_tensors(path).items()
    }
