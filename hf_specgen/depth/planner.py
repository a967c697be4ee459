"""The draft depths that maximise expected tokens per second, given acceptance and latency."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hf_specgen.depth.cost import Array


class Plan(NamedTuple):
    """Draft depths and their expected speed.

    Args:
        depths: `[rows]`; 0 for a plain step.
        tokens_per_second: of the batch.
        speedup: ratio to the tokens per second of plain steps.
    """

    depths: list[int]
    tokens_per_second: float
    speedup: float


def plan_depths(
    accepted: Array, proposed: Array, seconds: Array, room: Sequence[int], empty_draft: float = 0.0
) -> Plan:
    """The depths that maximise the expected tokens per second of a step. With a depth d_r for each row r,

        tokens_r = 1 + sum over i <= d_r of P(positions 1 to i of row r are accepted)
        time     = C(0) + E + sum over i of P(some row's draft reaches i) (C(i) - C(i - 1))

    where E is the overhead of an empty draft. A batch takes as long as its slowest row, so rows are aggregated by
    their harmonic mean. First the best common depth is found, then each row in turn gets the depth that is best while
    the others keep theirs: a row whose drafts are long but seldom accepted gets a smaller depth.

    Args:
        accepted: `[rows, k]` probability that positions 1 to i are proposed and accepted.
        proposed: `[rows, k]` probability that a draft reaches position i, if it is requested.
        seconds: `[k + 1]` C(i): time of a step whose deepest draft has depth i; C(0) is a plain step.
        room: `[rows]` maximum depth of each row; rows with 0 take no part.
        empty_draft: E, in the unit of `seconds`; added if at least one row drafts.

    Example:
        >>> plan_depths(np.array([[0.8, 0.6, 0.3]]), np.ones((1, 3)), np.array([1, 1.1, 1.2, 1.6]), room=[5]).depths
        [2]
    """
    active = np.flatnonzero(room)
    k = min(accepted.shape[1], max(room, default=0))
    if k == 0 or not len(active):
        return Plan([0] * len(room), len(active) / float(seconds[0]), 1.0)
    allowed = np.arange(1, k + 1) <= np.asarray(room)[active, None]  # [active, k]
    tokens = 1 + np.cumsum(np.hstack([np.zeros((len(active), 1)), accepted[active, :k] * allowed]), axis=1)
    reaches, steps = proposed[active, :k] * allowed, np.diff(seconds[: k + 1])
    time = np.concatenate([[0.0], np.cumsum((1 - (1 - reaches).prod(axis=0)) * steps) + empty_draft]) + seconds[0]
    rates = len(active) ** 2 / (1 / tokens).sum(axis=0) / time  # [k + 1] of each common depth
    best = int(rates.argmax())
    depths, rate = np.minimum(best, np.asarray(room)[active]), float(rates[best])
    if best and len(active) > 1 and reaches[allowed].min() < 1:
        depths, rate = _one_by_one(tokens, reaches, seconds[: k + 1], empty_draft, depths)
    plain = len(active) / float(seconds[0])
    if rate <= plain or not depths.any():
        return Plan([0] * len(room), plain, 1.0)
    result = np.zeros(len(room), dtype=int)
    result[active] = depths
    return Plan(result.tolist(), rate, rate / plain)


def _one_by_one(tokens: Array, reaches: Array, seconds: Array, empty: float, depths: Array) -> tuple[Array, float]:
    """Give each row its best depth while the others keep theirs; changes `depths` in place.

    Args:
        tokens: `[rows, k + 1]` expected tokens of each row by its depth.
        reaches: `[rows, k]` probability that the row's draft reaches each position.
        seconds, empty: as in `plan_depths`.
        depths: `[rows]` to start from.

    Returns:
        `[rows]` depths, and the tokens per second of the batch.
    """
    rows, k = reaches.shape
    options = np.arange(k + 1)
    misses = np.where(options[1:] <= depths[:, None], 1 - reaches, 1.0)  # [rows, k] P(no draft to i in this row)
    rate = 0.0
    for row in range(rows):
        others = np.delete(misses, row, axis=0).prod(axis=0)
        own = np.where(options[1:] <= options[:, None], 1 - reaches[row], 1.0)  # [k + 1, k] by this row's depth
        time = seconds[0] + ((1 - others * own) * np.diff(seconds)).sum(axis=1)
        time = time + empty * ((options > 0) | np.delete(depths, row).any())
        slowness = (1 / np.delete(tokens, row, axis=0))[np.arange(rows - 1), np.delete(depths, row)].sum()
        rates = rows**2 / (slowness + 1 / tokens[row]) / time
        depths[row] = int(rates.argmax())
        misses[row], rate = own[depths[row]], float(rates[depths[row]])
    return depths, rate
