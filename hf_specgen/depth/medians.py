"""Median latencies by size, and the line through them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import median, median_low

MIN_MEASURED = 2
"""Measurements that a size needs for a latency of its own: the lower one of two is seldom an outlier, as other load on
the machine only adds time. Sizes with fewer are taken together with the next ones."""


def medians_by_size(measured: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Median latencies by size; neighbouring sizes are taken together until they have `MIN_MEASURED` measurements.

    Sizes that are taken together get their lower median as size; what is left at the end joins the last ones.

    Args:
        measured: latencies by size.

    Example:
        >>> medians_by_size({4: [1.2, 9.0], 8: [1.5], 12: [9.0]})
        {4: 1.2, 8: 1.5}
    """
    groups: list[list[tuple[int, float]]] = [[]]
    for size, times in sorted(measured.items()):
        groups[-1] += [(size, time) for time in times]
        if len(groups[-1]) >= MIN_MEASURED:
            groups.append([])
    *complete, rest = groups
    if complete:
        complete[-1] += rest
    return {
        median_low(size for size, _ in group): median_low(time for _, time in group)
        for group in complete or [rest]
        if group
    }


def median_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The slope and the offset of a line that rises or is level: medians over pairs, so that no single point decides.

    Args:
        points: two or more.

    Example:
        >>> median_line([(1, 3.0), (2, 5.0), (3, 90.0), (4, 9.0)])
        (2.0, 1.0)

    Source: Sen, "Estimates of the Regression Coefficient Based on Kendall's Tau" (1968).
    """
    slope = max(0.0, median((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2)))
    return slope, median(y - slope * x for x, y in points)
