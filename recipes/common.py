"""What every recipe starts with: a YAML file and command-line flags, read into one typed dataclass."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml

Config = TypeVar("Config")


def parse_config(
    config_class: type[Config], documentation: str | None, arguments: Sequence[str] | None = None
) -> Config:
    """The settings of a recipe: `--config FILE` first, then a flag per field, which wins over the file.

    Flags are written `--field-name VALUE`, the value in YAML (`--exit-layers '[2, 4]'`).

    Args:
        config_class: a dataclass; its fields are the known keys.
        documentation: the recipe's docstring, shown by `--help`.
        arguments: the command line; None: this process's own.

    Raises:
        SystemExit: with one sentence, for an unknown key, a value of the wrong type or a key that is missing.
    """
    parser = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, metavar="FILE", help="a file of recipes/configs")
    for field in fields(config_class):  # type: ignore[arg-type]
        parser.add_argument(f"--{field.name.replace('_', '-')}", metavar="VALUE", default=MISSING)
    given = vars(parser.parse_args(arguments))
    path = given.pop("config")
    try:
        values = _read_yaml(path) if path else {}
        values |= {name: yaml.safe_load(text) for name, text in given.items() if text is not MISSING}
        return build_config(config_class, values, str(path or "the command line"))
    except (ValueError, OSError, yaml.YAMLError) as error:
        parser.error(str(error))


def build_config(config_class: type[Config], values: dict[str, Any], source: str) -> Config:
    """The dataclass from a dictionary.

    Raises:
        ValueError: naming the key and `source`.
    """
    known = {field.name: field for field in fields(config_class)}  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}."
            raise ValueError(f"{source}: unknown key {key!r}; {hint}")
    types = get_type_hints(config_class)
    for name, field in known.items():
        if name in values:
            values[name] = _checked(name, values[name], types[name], source)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{source}: the key {name!r} is missing.")
    return config_class(**values)


def _read_yaml(path: Path) -> dict[str, Any]:
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected `key: value` lines.")
    return values


def _checked(name: str, value: Any, expected: Any, source: str) -> Any:
    options = [option for option in get_args(expected) if option is not type(None)]
    optional = len(options) < len(get_args(expected))
    if value is None and optional:
        return None
    kind = options[0] if optional else expected
    kind = get_origin(kind) or kind
    if kind is float and isinstance(value, str):  # YAML 1.1 reads 1e-3 as text
        with suppress(ValueError):
            value = float(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is not Any and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise ValueError(f"{source}: {name!r} must be of type {kind.__name__}, not {value!r}.")
    return value
