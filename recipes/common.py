"""Settings of a recipe: a dataclass, read from a YAML file and command-line flags with `HfArgumentParser`."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import yaml
from transformers import HfArgumentParser
from transformers.hf_argparser import HfArg

Config = TypeVar("Config")


def option(**settings: Any) -> Any:
    """A field of a settings dataclass with a default and a help text, typed like the option itself."""
    return HfArg(**settings)


class Options(dict[str, Any]):
    """A mapping; on the command line it is written in YAML.

    Example:
        >>> Options("{r: 16, lora_alpha: 32}")
        {'r': 16, 'lora_alpha': 32}
    """

    def __init__(self, values: str | Mapping[str, Any] | Iterable[tuple[str, Any]] = ()):
        super().__init__(yaml.safe_load(values) if isinstance(values, str) else values)


def parse_config(
    config_class: type[Config], documentation: str | None, arguments: Sequence[str] | None = None
) -> Config:
    """The settings of a recipe: `--config FILE` first, then a flag per field, which overrides the file.

    Args:
        config_class: a dataclass; its fields are the keys of the file and the flags.
        documentation: shown by `--help`.
        arguments: the command line; that of this process if None.

    Raises:
        SystemExit: with a message, for an unknown key or flag, an invalid value or a missing one.
    """
    parser = HfArgumentParser(
        config_class,  # type: ignore[arg-type]
        description=documentation,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file, such as those of recipes/configs")
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        flags = [*_flags_of_file(given, config_class), *_expand_lists(given)]
        found = parser.parse_args_into_dataclasses(flags, return_remaining_strings=True, look_for_args_file=False)
    except (OSError, ValueError, yaml.YAMLError) as error:
        parser.error(str(error))
    if found[-1]:
        parser.error(f"unknown option {found[-1][0]}; --help lists all options")
    return found[0]


def _flags_of_file(arguments: Sequence[str], config_class: type[Any]) -> list[str]:
    """The keys of the config file as command-line flags, so that both are read alike."""
    finder = ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", type=Path)
    path = finder.parse_known_args(arguments)[0].config
    if path is None:
        return []
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"{path} must consist of `key: value` lines")
    known = [field.name for field in fields(config_class)]
    if unknown := [key for key in values if key not in known]:
        raise ValueError(f"{path}: unknown key {unknown[0]!r}; known keys are {', '.join(known)}")
    flags: list[str] = []
    for name, value in values.items():
        if isinstance(value, list):
            flags += [f"--{name}", *map(str, value)]
        elif value is not None:
            flags += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def _expand_lists(arguments: Sequence[str]) -> list[str]:
    """`--exit-layers '[2, 4]'` as `--exit-layers 2 4`."""
    expanded: list[str] = []
    for argument in arguments:
        is_list = argument.startswith("[") and argument.endswith("]")
        expanded += map(str, yaml.safe_load(argument)) if is_list else [argument]
    return expanded
