"""How wide a step to make: reading a few tokens more than needed may be faster.

Matrix libraries are good at some sizes and bad at others. On the processor of the benchmark two to four tokens take
longer than five to eight in float32: then padding makes the step faster, and the tokens stay what they are.
"""

from __future__ import annotations

from collections.abc import Sequence

REACH = 8
SAVES = 0.03
TILE = 8


def fastest_widths(seconds: Sequence[float]) -> list[int]:
    """For each width from 1 on the one, up to 8 wider, that takes least; itself where that saves less than 3%.

    Args:
        seconds: `[n]` of a step of width 1 to n.

    Example:
        >>> fastest_widths([10, 14, 15, 13, 11.5, 11.6])
        [1, 5, 5, 5, 5, 6]
    """
    widths = []
    for place, own in enumerate(seconds):
        least = min(seconds[place : place + REACH + 1])
        widths.append(1 + (seconds.index(least, place) if least < (1 - SAVES) * own else place))
    return widths


def tile(rows: int) -> int:
    """The width of a step that reads about as many tokens, over all rows, as matrix libraries like best.

    Example:
        >>> tile(1), tile(3), tile(16)
        (8, 3, 1)
    """
    return -(-TILE // rows)
