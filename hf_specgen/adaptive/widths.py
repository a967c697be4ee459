"""How wide a step to make: reading a few tokens more than needed may be faster.

Matrix libraries are good at some sizes and bad at others. With float32 on many processors two to four tokens take
longer than five to eight: then padding makes the step faster, and the tokens stay what they are.
"""

from __future__ import annotations

import numpy as np

from hf_specgen.adaptive.chances import Array

REACH = 8
SAVES = 0.03
TILE = 8


def fastest_widths(seconds: Array) -> list[int]:
    """For each width from 1 on the one, up to 8 wider, that takes least; itself where that saves less than 3%.

    Args:
        seconds: `[n]` of a step of width 1 to n.

    Example:
        >>> fastest_widths(np.array([10, 14, 15, 13, 11.5, 11.6]))
        [1, 5, 5, 5, 5, 6]
    """
    ahead = np.append(seconds, np.full(REACH, np.inf))
    windows = np.lib.stride_tricks.sliding_window_view(ahead, REACH + 1)  # [n, REACH + 1]
    saves = windows.min(axis=1) < (1 - SAVES) * seconds
    widths: list[int] = (1 + np.arange(len(seconds)) + saves * windows.argmin(axis=1)).tolist()
    return widths


def tile(rows: int) -> int:
    """The width of a step that reads about as many tokens, over all rows, as matrix libraries like best.

    Example:
        >>> tile(1), tile(3), tile(16)
        (8, 3, 1)
    """
    return -(-TILE // rows)


def exploring(widths: list[int], rows: int) -> list[int]:
    """The same, but steps of a few tokens are made as wide as a tile, to learn what that takes.

    A single token is left alone: reading it is a product with a vector, which is always fast.
    """
    wide = tile(rows)
    return [
        max(width, wide) if rows * needed > 1 and needed < wide else width for needed, width in enumerate(widths, 1)
    ]
