"""Checked reading of numbers and options from an untrusted config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MAX_INTEGER = 2**31 - 1
"""Largest accepted integer, far beyond any size of a model: rejects damaged configs before anything is allocated."""


class Fields:
    """The values of a config, with defaults, each checked when it is read.

    Args:
        values: of config.json, or of one of its nested objects.
        defaults: taken for fields that are missing or null.

    Example:
        >>> Fields({"hidden_size": 64}, {"num_hidden_layers": 1}).integer("num_hidden_layers")
        1
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self.values, self.defaults = values, defaults or {}

    def get(self, name: str) -> Any:
        """The value or its default, unchecked; None if there is neither."""
        value = self.values.get(name)
        return self.defaults.get(name) if value is None else value

    def optional_integer(self, name: str, low: int = 0) -> int | None:
        """A whole number that is at least `low`, or None."""
        value = self.get(name)
        if value is not None and (type(value) is not int or not low <= value <= MAX_INTEGER):
            raise ValueError(f"{name} must be a whole number between {low} and {MAX_INTEGER}, got {_short(value)}")
        return value

    def integer(self, name: str, low: int = 1) -> int:
        """A whole number that is at least `low`."""
        value = self.optional_integer(name, low)
        if value is None:
            raise ValueError(f"config.json does not say {name}")
        return value

    def number(self, name: str) -> float:
        """A positive finite number."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive number, got {_short(value)}")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false; missing is false."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {_short(value)}")
        return bool(value)

    def text(self, name: str) -> str:
        """A string."""
        value = self.get(name)
        if not isinstance(value, str):
            raise ValueError(f"{name} must be a string, got {_short(value)}")
        return value

    def nested(self, name: str) -> Fields:
        """The object in a field; empty if it is missing."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{name} must be an object, got {_short(value)}")
        return Fields(value or {})


def _short(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:60]!r}"
