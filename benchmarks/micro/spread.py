"""Median, lowest and highest value of repeated measurements."""

from __future__ import annotations

from statistics import median


def spread(values: list[float], name: str) -> dict[str, float]:
    """The median under `name`, and the lowest and the highest value.

    Example:
        >>> spread([3.0, 1.0, 2.0], "ms")
        {'ms': 2.0, 'lowest': 1.0, 'highest': 3.0}
    """
    return {name: median(values), "lowest": min(values), "highest": max(values)}
