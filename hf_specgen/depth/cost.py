"""T(q): seconds of one forward pass over q tokens per row, measured at some q and interpolated between them."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]


def interpolate(sizes: Array | float, known: Sequence[float], seconds: Sequence[float]) -> Array:
    """Piecewise linear through the known points; extrapolated along the last piece, with a slope of at least 0."""
    values = np.asarray(np.interp(sizes, known, seconds))
    if len(known) > 1:
        slope = max(0.0, (seconds[-1] - seconds[-2]) / (known[-1] - known[-2]))
        values = values + slope * np.maximum(0.0, np.asarray(sizes, dtype=float) - known[-1])
    return values


def interpolate_one(size: float, known: Sequence[float], seconds: Sequence[float]) -> float:
    """`interpolate` for one number, without numpy: 1 instead of 20 microseconds, several times a step.

    Example:
        >>> interpolate_one(3, (1, 5), (0.25, 0.75)), interpolate_one(9, (1, 5), (0.25, 0.75))
        (0.5, 1.25)
    """
    place = min(bisect_right(known, size), len(known) - 1)
    if size <= known[0] or place == 0:
        return seconds[0]
    slope = (seconds[place] - seconds[place - 1]) / (known[place] - known[place - 1])
    if size >= known[-1]:
        return seconds[-1] + max(0.0, slope) * (size - known[-1])
    return seconds[place - 1] + slope * (size - known[place - 1])


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a forward pass over q tokens per row.

    Args:
        queries: increasing numbers of tokens per row, from 1.
        seconds: of a pass over that many tokens in each row.
        context: cached tokens in each row.
        batch: rows.

    Raises:
        ValueError: if the lists differ in length, `queries` does not increase from 1, or a number is not positive.

    Example:
        >>> curve = CostCurve((1, 4), (0.010, 0.016), context=256, batch=1)
        >>> round(curve(2), 4), round(curve(6), 4), round(curve.relative(4), 2)
        (0.012, 0.02, 1.6)
    """

    queries: tuple[int, ...]
    seconds: tuple[float, ...]
    context: int
    batch: int

    def __post_init__(self) -> None:
        if len(self.queries) != len(self.seconds):
            raise ValueError(f"{len(self.queries)} queries need as many seconds, got {len(self.seconds)}")
        check_queries(self.queries)
        for name, values in (("seconds", self.seconds), ("context", [self.context]), ("batch", [self.batch])):
            for value in values:
                if not 0 < value < inf:
                    raise ValueError(f"{name} must be positive and finite, got {value}")

    def __call__(self, queries: float) -> float:
        """Seconds of a pass over `queries` tokens per row."""
        return interpolate_one(queries, self.queries, self.seconds)

    def by_tokens(self, tokens: Array | float) -> Array:
        """Seconds by the tokens in all rows together, for any number of rows."""
        return interpolate(np.asarray(tokens) / self.batch, self.queries, self.seconds)

    def seconds_of(self, tokens: float) -> float:
        """`by_tokens` for one number of tokens."""
        return interpolate_one(tokens / self.batch, self.queries, self.seconds)

    def relative(self, queries: float) -> float:
        """T(q) / T(1)."""
        return self(queries) / self.seconds[0]

    def to_json(self) -> str:
        """A JSON text for `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CostCurve:
        """Read what `to_json` wrote; raises a `ValueError` for any other text."""
        try:
            return cls.from_dict(json.loads(text))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"not a saved cost curve ({error!r}); measure one with measure_cost_curve") from None

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> CostCurve:
        """From the fields by name."""
        return cls(tuple(fields["queries"]), tuple(fields["seconds"]), fields["context"], fields["batch"])

    @classmethod
    def load(cls, path: str | Path) -> CostCurve:
        """Read a file that holds what `to_json` wrote."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))


def check_queries(queries: Sequence[int]) -> None:
    """Raise a `ValueError` unless `queries` increases from 1."""
    if not queries or queries[0] != 1 or any(b <= a for a, b in pairwise(queries)):
        raise ValueError(f"queries must increase from 1, got {list(queries)}")
