"""Reading files of models, heads and adapters that are not trusted, from a folder or a repository of the Hub.

Every problem is reported as one `ValueError` or `OSError` that names the file. JSON is limited in size. Tensors are
read from safetensors, or by `torch.load(weights_only=True)`; their shapes are known before any of them is allocated,
and no tensor can take more memory than its file has bytes.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import constants
from safetensors import SafetensorError, safe_open

from hf_specgen import compat

Shape = tuple[int, ...]
Tensors = dict[str, torch.Tensor]
MAX_JSON_BYTES = 64 * 2**20
"""Published configs and index files have at most a few megabytes."""
REPOSITORY = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""Form of a repository id: "name" or "owner/name"."""


@contextmanager
def source_errors(source: str) -> Iterator[None]:
    """Names the source in what Transformers raises inside while it loads from it.

    Args:
        source: a folder, or a repository of the Hub.

    Raises:
        FileNotFoundError: if `source` is a path, and there is no such folder.
        OSError: if the repository does not exist, or cannot be reached.
        ValueError: if its files are damaged.

    Example:
        >>> with source_errors("/no/such/folder"):
        ...     pass
        Traceback (most recent call last):
        FileNotFoundError: there is no folder '/no/such/folder'
    """
    check_source(source)
    try:
        yield
    except OSError as error:
        reason = first_line(error)
        raise OSError(reason if source in reason else f"cannot load {source!r}: {reason}") from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, SafetensorError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(f"cannot load {source!r}: {reason}") from error


def check_source(source: str) -> None:
    """Raise `FileNotFoundError` if `source` is neither a folder nor of the form of a repository id."""
    if not Path(source).is_dir() and not REPOSITORY.fullmatch(source):
        raise FileNotFoundError(f"there is no folder {source!r}")


def offline_hint(source: str) -> str:
    """The end of a message about a file that was not found."""
    local = Path(source).is_dir() or not constants.HF_HUB_OFFLINE
    return "" if local else "; HF_HUB_OFFLINE is set, so only files in the local cache are found"


def find_file(source: str, name: str, subfolder: str = "") -> Path | None:
    """The local path of a file, downloaded if necessary; None if the folder or repository has no such file.

    Raises:
        OSError: naming `source`, if there is no such folder or repository, or it cannot be reached.
    """
    if Path(source).is_dir():
        path = Path(source) / subfolder / name
        return path if path.is_file() else None
    with source_errors(source):
        found = compat.cached_file_or_none(source, name, **({"subfolder": subfolder} if subfolder else {}))
    return None if found is None else Path(found)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: if it is too large, nested too deeply, not JSON, or not an object.
    """
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes, more than any {path.name}; download it again")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply to be a {path.name}; download it again") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object; download it again")
    return content


def number_field(config: dict[str, Any], name: str, path: str | Path) -> int:
    """A field that must be a positive integer.

    Raises:
        ValueError: naming file, field and value, if it is missing or something else.
    """
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{path}: {name} must be a positive integer, got {value!r:.80}")
    return value


def tensor_shapes(path: Path) -> dict[str, Shape]:
    """The shapes of the tensors in a safetensors or pickled file, by name.

    Raises:
        ValueError: if the file is damaged, or holds something else.
    """
    if path.suffix != ".safetensors":
        return {name: tuple(tensor.shape) for name, tensor in unpickled_tensors(path).items()}
    with _read_errors(path), safe_open(path, framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  (no mapping)


def read_tensors(path: Path) -> Tensors:
    """The tensors in a safetensors or pickled file, by name; their memory is bounded by the size of the file.

    Raises:
        ValueError: if the file is damaged, or holds something else.
    """
    if path.suffix != ".safetensors":
        return {
            name: tensor.clone() for name, tensor in unpickled_tensors(path).items()
        }  # a view would keep the file mapped
    with _read_errors(path), safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def first_line(error: BaseException) -> str:
    """The first line of an error's message (at most 300 characters); the type of an error without a message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


@contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # unpickling a damaged file may raise anything
        raise ValueError(f"{path} cannot be read as tensors ({first_line(error)}); download it again") from None


def unpickled_tensors(path: Path) -> Tensors:
    """The tensors in a pickled file, by name, as views of the memory-mapped file if it is a zip archive.

    Raises:
        ValueError: if the file is damaged, holds something else, or a tensor is larger than the file.
    """
    size, zipped = path.stat().st_size, zipfile.is_zipfile(path)
    with _read_errors(path):
        if zipped:
            with zipfile.ZipFile(path) as archive:
                if sum(entry.file_size for entry in archive.infolist()) > size:
                    raise ValueError("it unpacks to more than its own size")
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
        if not isinstance(tensors, dict) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
            raise ValueError("not a dictionary of tensors")
        for name, tensor in tensors.items():
            if tensor.layout != torch.strided or tensor.is_meta or tensor.numel() * tensor.element_size() > size:
                raise ValueError(f"{str(name)[:80]!r} of shape {tuple(tensor.shape)} does not fit into the file")
    return cast(Tensors, {str(name): tensor for name, tensor in tensors.items()})
