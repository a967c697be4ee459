"""Medusa heads: do they fit the target? Told from their files alone, whatever trainer wrote them."""

from __future__ import annotations

import json
import re
from typing import Any

from safetensors import safe_open
from transformers.utils.hub import cached_file

from hf_specgen.cli.doctor.blueprint import Blueprint
from hf_specgen.cli.doctor.findings import CheckResult, Finding

FILES = ("medusa_lm_head.safetensors", "model.safetensors")
RESIDUAL = re.compile(r"^(?:blocks\.|heads\.)?(\d+)\.(?:layers\.)?\d+\.(?:linear\.)?weight$")
BASE_KEYS = ("base_model_name_or_path", "base_model")


def heads(name: str, target: Blueprint) -> list[Finding]:
    """Number of heads, hidden size and base model.

    Args:
        name: folder or Hub id of the heads.
        target: what they are to be used with.
    """
    try:
        shapes = _shapes(name)
    except OSError as error:
        return [Finding("heads", CheckResult.BAD, f"{name!r} could not be read", str(error))]
    numbers = {int(match[1]) for key in shapes if (match := RESIDUAL.match(key))}
    if not numbers:
        meaning = "expected tensors such as '0.0.linear.weight'"
        return [Finding("heads", CheckResult.BAD, f"no heads among {len(shapes)} tensors of {name!r}", meaning)]
    widths = {shape[-1] for key, shape in shapes.items() if RESIDUAL.match(key)}
    findings = [Finding("heads", CheckResult.GOOD, f"{len(numbers)} heads")]
    if widths != {target.config.hidden_size}:
        found = f"made for states of width {sorted(widths)}, the target's have {target.config.hidden_size}"
        findings.append(Finding("heads' size", CheckResult.BAD, found, "these heads belong to another model"))
    config = _config(name)
    base = next((str(config[key]) for key in BASE_KEYS if config.get(key)), "")
    base = base or str((config.get("base") or {}).get("name_or_path") or "")
    if base and base.rstrip("/").split("/")[-1] != target.name.rstrip("/").split("/")[-1]:
        meaning = "heads guess well only for the very model that they were trained on"
        findings.append(
            Finding("heads' base", CheckResult.WARNING, f"trained on {base!r}, not {target.name!r}", meaning)
        )
    return findings


def _shapes(name: str) -> dict[str, tuple[int, ...]]:
    for file in FILES:
        path = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
        if path is not None:
            with safe_open(path, framework="pt") as tensors:
                return {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
    raise OSError(f"there is neither {' nor '.join(FILES)} in {name!r}")


def _config(name: str) -> dict[str, Any]:
    path = cached_file(name, "config.json", _raise_exceptions_for_missing_entries=False)
    if path is None:
        return {}
    with open(path, encoding="utf-8") as file:
        return json.load(file)
