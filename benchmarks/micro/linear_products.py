"""Milliseconds of a pass by its tokens, with the fastest product of each linear layer, and with PyTorch's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from hf_specgen.depth.calibrate import prefilled_target, time_pass
from hf_specgen.evaluation.published import PUBLISHED, published
from hf_specgen.evaluation.workloads import load

TOKENS = (1, 2, 4, 8, 16, 24, 32, 64)
CONTEXT = 128  # tokens in the cache
WARM_UP = 12  # passes of each size before those that are timed, in which the products are chosen


def linear_products(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """Medians of passes in turns, of the bundled model and of a published one if it can be had."""
    models: list[tuple[str, Any]] = [("16M", "")]
    if not quick and (source := published(print)) is not None:
        models.append((PUBLISHED.rpartition("/")[2], source))
    rows = []
    for name, source in models:
        model, _ = load(source)
        target = prefilled_target(model, torch.ones(1, CONTEXT, dtype=torch.long))
        first = 0.0
        for tokens in TOKENS[:2] if quick else TOKENS:
            ordinary, fastest = _milliseconds(target, tokens, 1 if quick else 4 * repeats)
            first = first or ordinary
            times = {"linear, ms": ordinary, "fastest product, ms": fastest, "ratio": fastest / ordinary}
            rows.append({"target": name, "tokens": tokens, **times, "over one token by linear": fastest / first})
    return rows


@torch.no_grad()
def _milliseconds(target: Any, tokens: int, repeats: int) -> tuple[float, float]:
    """Of a pass with PyTorch's own products, and with the fastest ones."""
    for _ in range(WARM_UP):
        time_pass(target, [1], tokens)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        with ordinary_products():
            times[0].append(time_pass(target, [1], tokens))
        times[1].append(time_pass(target, [1], tokens))
    return 1000 * median(times[0]), 1000 * median(times[1])


@contextmanager
def ordinary_products() -> Iterator[None]:
    """A context in which linear layers use PyTorch's own product, as with any deterministic algorithm."""
    was_enabled = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_enabled)
