"""The depths that bring the most tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hf_specgen.adaptive.chances import Array


class Plan(NamedTuple):
    """What to draft, and what is expected of it.

    Args:
        depths: of each row; 0 for a plain step.
        rate: expected tokens per second, over all rows.
        gain: that rate over the rate of plain steps.
    """

    depths: list[int]
    rate: float
    gain: float


def best_depth(
    gained: Sequence[float], drafted: Sequence[float], seconds: Sequence[float], room: int, asking: float = 0.0
) -> Plan:
    """Maximise expected tokens over expected time of a step of one row. With the depth d,

        tokens(d) = 1 + sum over i <= d of P(i accepted)
        time(d)   = C(0) + A + sum over i <= d of P(the draft reaches i) (C(i) - C(i - 1))

    where A is what asking for a draft costs that does not come, and C(0) in the sum includes it.

    Args:
        gained: `[k]` the chance that position i is drafted and accepted, if it is asked for.
        drafted: `[k]` the chance that a draft reaches position i, if it is asked for.
        seconds: `[k + 1]` C(i), time of a step whose draft has depth i; C(0) is a plain step.
        room: the greatest depth.
        asking: A.

    Example:
        >>> best_depth([0.8, 0.6, 0.3], [1, 1, 1], [1, 1.1, 1.2, 1.6], room=5).depths
        [2]
    """
    tokens, time, best, plain = 1.0, seconds[0], 0, 1 / seconds[0]
    rate = plain
    if drafted:
        time += asking * (1 - drafted[0])
    for depth in range(1, min(room, len(gained)) + 1):
        tokens += gained[depth - 1]
        time += drafted[depth - 1] * (seconds[depth] - seconds[depth - 1])
        if tokens > rate * time:
            best, rate = depth, tokens / time
    return Plan([best], rate, rate / plain)


def best_depths(gained: Array, drafted: Array | None, seconds: Array, room: list[int]) -> Plan:
    """The same for the rows of a batch.

    A step is as wide as its deepest draft, and every row pays for it. So the rows share one limit, as long as each
    deserves it: a row whose drafts are longer than those of others, but seldom right, is held back.

    Args:
        gained, drafted: `[rows, k]`, otherwise as for `best_depth`; `drafted` is None where a draft always is as deep
            as was asked for. Then one limit for all rows is best: a position that one pays for is free to the others.
        seconds: `[k + 1]`, of the whole batch.
        room: of each row; rows with 0 take no part.
    """
    rows = len(room) - room.count(0)
    if rows == 0:
        return Plan([0] * len(room), 0.0, 1.0)
    deepest = min(max(room), gained.shape[1])
    gained, seconds = gained[:, :deepest], seconds[: deepest + 1]
    drafted = None if drafted is None else drafted[:, :deepest]
    if min(room) < deepest:
        active = np.flatnonzero(room)
        possible = np.arange(deepest) < np.array(room)[active, None]
        gained = gained[active] * possible
        drafted = None if drafted is None else drafted[active] * possible
    steps = np.diff(seconds)  # [k] what one more position costs
    plain = rows / float(seconds[0])
    tokens = _together(1 + gained.cumsum(axis=1))  # [k]
    rates = tokens / (seconds[1:] if drafted is None else seconds[0] + (_any(drafted) * steps).cumsum())
    depth = int(rates.argmax()) + 1
    rate = float(rates[depth - 1])
    if rate <= plain:
        depth, rate = 0, plain
    together = [min(depth, free) for free in room]
    if drafted is None:
        return Plan(together, rate, rate / plain)
    return _row_by_row(gained, drafted, seconds, room, Plan(together, rate, rate / plain))


def _row_by_row(gained: Array, drafted: Array, seconds: Array, room: list[int], common: Plan) -> Plan:
    """The best of the limit that all rows have in common and of two ways to give each row its own."""
    active = np.flatnonzero(room)
    together = np.array(common.depths)[active]
    steps, plain = np.diff(seconds), len(active) / float(seconds[0])
    alone = _worthwhile(gained, drafted, steps, plain)
    held_back = np.minimum(together, _worthwhile(gained, _own_share(drafted, together), steps, common.rate))
    rates = [_rate(gained, drafted, steps, float(seconds[0]), depths) for depths in (alone, held_back)]
    if max(rates) <= common.rate:
        return common
    depths = np.zeros(len(room), dtype=int)
    depths[active] = alone if rates[0] > rates[1] else held_back
    return Plan(depths.tolist(), max(rates), max(rates) / plain)


def _rate(gained: Array, drafted: Array, steps: Array, plain_seconds: float, depths: Array) -> float:
    """Tokens per second with a depth for each row."""
    asked = np.arange(gained.shape[1]) < depths[:, None]
    time = plain_seconds + float((_any(drafted * asked) * steps).sum())
    return float(_together(1 + (gained * asked).sum(axis=1, keepdims=True))[0]) / time


def _together(tokens: Array) -> Array:
    """`[n]` tokens of a step from those of each row `[rows, n]`: as if all were as fast as their harmonic mean.

    A batch is done when its last row is. What rows gain that end sooner than others shortens nothing.
    """
    together: Array = len(tokens) ** 2 / (1 / tokens).sum(axis=0)
    return together


def _worthwhile(gained: Array, widens: Array, steps: Array, rate: float) -> Array:
    """`[rows]` how deep each row may go at a price of `rate` tokens per second for the width that it causes."""
    profit = np.cumsum(gained - rate * widens * steps, axis=1)
    best = profit.argmax(axis=1)
    return np.where(profit[np.arange(len(profit)), best] > 0, best + 1, 0)


def _own_share(drafted: Array, depths: Array) -> Array:
    """`[rows, k]` the chance that a row is the only one whose draft reaches position i."""
    missing = 1 - drafted * (np.arange(drafted.shape[1]) < depths[:, None])
    # Leave-one-out products by dividing; where a row surely reaches i, the product of the others is found separately.
    sure = missing < 1e-9
    product = np.where(sure, 1.0, missing).prod(axis=0)
    others_sure = sure.sum(axis=0) - sure
    others = np.where(sure, product, product / np.where(sure, 1.0, missing))
    return drafted * np.where(others_sure > 0, 0.0, others)


def _any(drafted: Array) -> Array:
    """`[k]` the chance that some row's draft reaches position i."""
    return 1 - (1 - drafted).prod(axis=0)
