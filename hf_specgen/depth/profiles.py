"""Profile files: latency models kept in the user's cache directory, one file for each target, strategy and machine."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub import constants

from hf_specgen import compat
from hf_specgen.depth.latency import LatencyModel
from hf_specgen.version import __version__

logger = logging.getLogger("hf_specgen")
MAX_BYTES = 1 << 20
"""A profile has about 1 kB a slice: larger files are not read."""


class ProfileFile(NamedTuple):
    """A profile in the cache directory.

    Args:
        key: names it, for `load`, `delete` and `export`.
        description: what its times depend on: the target, the machine, the strategy, versions.
        latency: the model.
    """

    key: str
    description: dict[str, Any]
    latency: LatencyModel


def directory() -> Path:
    """Where profiles are kept: `$HF_SPECGEN_CACHE/profiles`, or else under the assets of the Hugging Face cache."""
    own = os.environ.get("HF_SPECGEN_CACHE")
    return Path(own or Path(constants.HF_ASSETS_CACHE) / "hf_specgen").expanduser() / "profiles"


def describe(model: Any, strategy: tuple[Any, ...], samples: bool) -> dict[str, Any]:
    """All that the latencies of a call depend on, as plain values.

    Args:
        model: the target.
        strategy: the `profile_key` of the strategy.
        samples: whether the call samples: then verification draws tokens.
    """
    parameters = list(model.parameters()) if hasattr(model, "parameters") else []
    config = getattr(model, "config", None)
    devices = sorted({str(parameter.device) for parameter in parameters})
    return {
        "target": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "bytes": sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        "layers": getattr(config, "num_hidden_layers", None),
        "hidden_size": getattr(config, "hidden_size", None),
        "vocab_size": getattr(config, "vocab_size", None),
        "dtype": str(getattr(model, "dtype", None)),
        "attention": None if config is None else compat.attention_implementation(config),
        "ranks": getattr(model, "tp_size", None) or 1,
        "devices": [f"{name} {_device_name(name)}" for name in devices],
        "threads": torch.get_num_threads(),
        "strategy": [value if isinstance(value, str | int | float | bool | None) else str(value) for value in strategy],
        "samples": samples,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "hf_specgen": __version__},
    }


def key_of(description: Mapping[str, Any]) -> str:
    """The key of what a description describes: the kind of drafter, the target, and a hash.

    Example:
        >>> key_of({"strategy": ["draft_model", 5], "target": "LlamaForCausalLM"})
        'draft_model-LlamaForCausalLM-7f3c1e0a2b4d'
    """
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:12]
    names = f"{description['strategy'][0]}-{description['target']}"
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in names) + f"-{digest}"


def list_profiles() -> list[ProfileFile]:
    """All readable profiles of the cache directory, by key."""
    found = (load(path.stem) for path in sorted(directory().glob("*.json")))
    return [profile for profile in found if profile is not None]


def load(key: str) -> ProfileFile | None:
    """Read a profile; None if there is none, or it cannot be read."""
    path = _path(key)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        data = json.loads(path.read_text(encoding="utf-8"))
        latency = LatencyModel.from_dict(data)
        description = dict(data["description"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logger.debug("latency profile %s is ignored: %s", path, error)
        return None
    return ProfileFile(key, description, latency)


def save(description: Mapping[str, Any], latency: LatencyModel) -> str:
    """Write a profile, replacing the whole file at once; if that is not possible, nothing happens.

    Returns:
        Its key.
    """
    key = key_of(description)
    text = json.dumps({"description": dict(description), **latency.to_dict()}, indent=1)
    try:
        _replace(_path(key), text)
    except OSError as error:
        logger.debug("latency profile %s could not be written: %s", key, error)
    return key


def delete(key: str) -> bool:
    """Remove a profile; calls that started before keep it. True if there was one.

    Raises:
        OSError: if it cannot be removed.
    """
    path = _path(key)
    existed = path.exists()
    path.unlink(missing_ok=True)
    return existed


def export(key: str, path: str | Path) -> None:
    """Copy a profile to a file that can be given to a strategy or a call.

    Raises:
        ValueError: if there is no such profile.
    """
    profile = load(key)
    if profile is None:
        known = [one.key for one in list_profiles()]
        raise ValueError(f"there is no readable latency profile {key!r} in {directory()}; it has {known}")
    text = json.dumps({"description": profile.description, **profile.latency.to_dict()}, indent=1)
    _replace(Path(path), text)


def _path(key: str) -> Path:
    if Path(key).name != key or not key:
        raise ValueError(f"a profile's key is a file name without a folder, got {key!r}")
    return directory() / f"{key}.json"


def _replace(path: Path, text: str) -> None:
    """Write a file so that readers see the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _device_name(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
