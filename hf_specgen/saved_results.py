"""Passed self-checks and measured latencies that outlive the process, in the folder of `HF_SPECGEN_CACHE`.

Without that environment variable nothing is read or written. A result is found again by everything that it depends on:
the key that its owner gives, the versions of libraries, the files of this package, and the processor. A file that
cannot be read, or has other contents than expected, counts as absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import threading
import warnings
import weakref
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

FOLDER = "HF_SPECGEN_CACHE"
LIBRARIES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "torchao", "kernels", "flash-attn")
"""Distributions whose versions may change what a model computes, or how fast."""
NAMED_BY_VERSION = frozenset(("builtins", "torch", "transformers", "peft", "accelerate", "hf_specgen", "torchao"))
"""Packages whose classes and functions are what they were, as long as the version is the same."""
PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device)


def load(kind: str, key: object) -> Any:
    """The value that was saved for a key; None if there is none."""
    path = _path(kind, key)
    if path is None:
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def save(kind: str, key: object, value: Any) -> None:
    """Keep a value of JSON's types for later processes, if the folder is named and the key has a text."""
    path = _path(kind, key)
    if path is None:
        return
    # Another process never sees half of a file.
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            unfinished.write_text(json.dumps(value), encoding="utf-8")
            unfinished.replace(path)
        finally:  # as on a full disk
            unfinished.unlink(missing_ok=True)
    except (OSError, RecursionError) as error:  # the latter of a path with a thousand folders
        reason = getattr(error, "strerror", error)
        _warn(f"{FOLDER}={os.environ[FOLDER]!s:.120} cannot be written ({reason}); name another folder, or unset it")


def stable_text(value: object) -> str | None:
    """A text that is equal in all processes for equal values, and differs for others; None if there is none."""
    if isinstance(value, weakref.ref):
        value = value() or object()  # what is gone has no text
    if isinstance(value, PLAIN):
        return repr(value)
    # Another process may have a function or class of a user with the same name that does something else.
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        name = f"{value.__module__}.{value.__qualname__}"
        return name if name.partition(".")[0] in NAMED_BY_VERSION and "<" not in name else None
    if not isinstance(value, tuple | frozenset):
        return None
    texts = [stable_text(item) for item in value]
    if None in texts:
        return None
    items = [str(text) for text in texts]
    if isinstance(value, frozenset):  # whose order differs between processes
        items.sort()
    return f"{type(value).__name__}({', '.join(items)})"


def _path(kind: str, key: object) -> Path | None:
    """The file of a key; None without a folder, or if the key has no text."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return None
    text = stable_text(key)
    surroundings = _surroundings()
    if text is None or surroundings is None:
        return None
    digest = hashlib.sha256(f"{text}\n{surroundings}".encode()).hexdigest()
    try:
        return Path(folder).expanduser() / f"{kind}-{digest[:40]}.json"
    except RuntimeError as error:  # there is no such home directory
        _warn(f"{FOLDER}={folder} cannot be used ({error}); name another folder, or unset it")
        return None


@cache
def _surroundings() -> str | None:
    """What results depend on beside the model: versions, the files of this package, the processor and accelerators.

    None with a development version of a library, under which its code may change.
    """
    versions: dict[str, str] = {}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    if any("dev" in number for number in versions.values()):
        return None
    package = Path(__file__).parent
    files = [(str(path.relative_to(package)), path.stat()) for path in sorted(package.rglob("*.py"))]
    code = [(name, status.st_size, status.st_mtime_ns) for name, status in files]
    processor = (platform.machine(), platform.processor(), torch.backends.cpu.get_cpu_capability(), os.cpu_count())
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return repr((versions, code, processor, devices))


@cache
def _warn(message: str) -> None:
    """Warn once of the same problem."""
    warnings.warn(message, stacklevel=4)
