"""Profile files: latency models in the user's cache directory, one file for each target, strategy and machine."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import constants

from hf_specgen import compat
from hf_specgen.call import Compile
from hf_specgen.depth.latency import LatencyModel
from hf_specgen.version import __version__

logger = logging.getLogger("hf_specgen")
MAX_BYTES = 1 << 20
"""Larger files are not read: a profile has less than 1 kB per slice."""


def directory() -> Path:
    """The directory of profiles: `$HF_SPECGEN_CACHE/profiles`, by default in the assets of the Hugging Face cache."""
    own = os.environ.get("HF_SPECGEN_CACHE")
    return Path(own or Path(constants.HF_ASSETS_CACHE) / "hf_specgen").expanduser() / "profiles"


def describe(
    model: Any, strategy: tuple[Any, ...], samples: bool, compiled: Compile = False, packed: bool = False
) -> dict[str, Any]:
    """Everything that the latencies of a call depend on, as plain values.

    Args:
        model: the target.
        strategy: the `profile_key` of the strategy.
        samples: whether the call samples, which makes verification slower.
        compiled: whether the target's passes are compiled, or captured as graphs.
        packed: whether linear layers run with packed weights.
    """
    parameters = list(model.parameters()) if hasattr(model, "parameters") else []
    config = getattr(model, "config", None)
    shape = {name: getattr(config, name, None) for name in ("num_hidden_layers", "hidden_size", "vocab_size")}
    return {
        "target": type(model).__name__,
        **shape,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "bytes": sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        "dtype": str(getattr(model, "dtype", None)),
        "attention": None if config is None else compat.attention_implementation(config),
        "ranks": getattr(model, "tp_size", None) or 1,
        "devices": [f"{one}: {_device_name(one)}" for one in sorted({str(one.device) for one in parameters})],
        "threads": torch.get_num_threads(),
        "strategy": [str(value) for value in strategy],
        "samples": samples,
        **({"compiled": compiled} if compiled else {}),
        **({"packed": True} if packed else {}),
        "versions": [torch.__version__, transformers.__version__, __version__],
    }


def key_of(description: Mapping[str, Any]) -> str:
    """The key of a description: the kind of drafter, the target's class, and a hash.

    Example:
        >>> key_of({"strategy": ["draft_model", "5"], "target": "LlamaForCausalLM"})
        'draft_model-LlamaForCausalLM-30b60234fc28'
    """
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:12]
    names = f"{description['strategy'][0]}-{description['target']}"
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in names) + f"-{digest}"


def list_profiles() -> dict[str, LatencyModel]:
    """All readable profiles of the cache directory by key; what they depend on is in their `description`."""
    found = {path.stem: load(path.stem) for path in sorted(directory().glob("*.json"))}
    return {key: latency for key, latency in found.items() if latency is not None}


def load(key: str) -> LatencyModel | None:
    """Read a profile; None if it does not exist or cannot be read."""
    path = _path(key)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes")
        return LatencyModel.load(path)
    except (OSError, ValueError) as error:
        logger.debug("latency profile %s is not used: %s", path, error)
        return None


def save(description: Mapping[str, Any], latency: LatencyModel) -> str:
    """Write a profile, replacing an older one atomically; a failure is only logged.

    Returns:
        The key of the profile.
    """
    key = key_of(description)
    try:
        _replace(_path(key), replace(latency, description=description))
    except OSError as error:
        logger.debug("latency profile %s could not be written: %s", key, error)
    return key


def delete(key: str) -> bool:
    """Remove a profile; processes that have read it keep it. False if there was none.

    Raises:
        OSError: if it cannot be removed.
    """
    path = _path(key)
    existed = path.exists()
    path.unlink(missing_ok=True)
    return existed


def export(key: str, path: str | Path) -> None:
    """Copy a profile to a file that `AdaptiveDepth(latency=...)` accepts.

    Raises:
        ValueError: if there is no such profile.
    """
    latency = load(key)
    if latency is None:
        raise ValueError(f"there is no readable profile {key!r} in {directory()}; it has {sorted(list_profiles())}")
    _replace(Path(path), latency)


def _path(key: str) -> Path:
    if not key or Path(key).name != key:
        raise ValueError(f"a profile key must be a file name without a folder, got {key!r}")
    return directory() / f"{key}.json"


def _replace(path: Path, latency: LatencyModel) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(latency.to_dict(), file, indent=1)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _device_name(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())
