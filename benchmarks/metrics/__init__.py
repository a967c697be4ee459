"""Metrics of speculative decoding as modules of `evaluate`, loaded by path or by name.

Example:
    >>> from benchmarks.metrics import load
    >>> load("acceptance_rate").compute(drafted=[3, 3, 2], accepted=[3, 1, 0])["acceptance_rate"]
    0.5
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

FOLDER = Path(__file__).parent
NAMES = ("acceptance_rate", "position_acceptance", "mean_accepted_length", "speedup")


def load(name: str) -> Any:
    """Load one of `NAMES` with `evaluate.load`.

    Raises:
        ValueError: for another name.
        ImportError: without `evaluate`.
    """
    if name not in NAMES:
        raise ValueError(f"there is no metric {name!r}; there are {', '.join(NAMES)}")
    try:
        import evaluate
    except ImportError as error:
        raise ImportError("the metrics need evaluate: pip install 'hf-specgen[bench]'") from error
    return cast(Any, evaluate).load(str(FOLDER / name))
