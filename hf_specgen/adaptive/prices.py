"""What steps cost as far as it was known at one moment, ready for plans. It is looked up seldom: that takes a while."""

from __future__ import annotations

import numpy as np

from hf_specgen.adaptive.chances import Array
from hf_specgen.adaptive.draft_times import DraftTimes
from hf_specgen.adaptive.ranks import from_first_rank
from hf_specgen.adaptive.tables import TargetTimes
from hf_specgen.adaptive.widths import fastest_widths, tile

WIDTHS = np.arange(1.0, 161.0)
LONGEST = 32
"""The deepest draft that is thought about."""
MOST_NODES = 64
WIDENED = 32
"""Wider steps are left as they are: padding would save little."""
LAST = 64
"""Prices hold for so many steps in the end; the first ones for one."""
DOUBTED_AFTER = 256
"""What a step takes as it is, without padding, is looked at again after so many others."""


class Prices:
    """Seconds by width, which widths to make wider, and which to make as they are for once.

    Args:
        target: what its steps took.
        rows: of the batch.
        draft: what drafts took; None where they cost next to nothing.
        shared: whether ranks must agree: then all use what rank 0 has measured.
        before: the prices that these replace.
    """

    def __init__(
        self, target: TargetTimes, rows: int, draft: DraftTimes | None, shared: bool, before: Prices | None = None
    ):
        self._rows = rows
        self.age = 0
        self.last: int = 1 if before is None else min(LAST, 1 + before.last + before.last // 4)
        drafting = np.zeros(LONGEST + 1) if draft is None else draft(np.arange(LONGEST + 1.0))
        measured: tuple[Array, Array, float] = (target.of(rows)(WIDTHS), drafting, draft.reading if draft else 0.0)
        seconds, drafting, reading = from_first_rank(measured) if shared else measured
        self._drafting, self.reading = drafting, reading
        widths = fastest_widths(seconds[:WIDENED].tolist())
        wider = [width for width, made in enumerate(widths, 1) if made > width]
        known = [width for width in wider if target.knows(rows, width)]
        self._doubted = {width for width in known if target.steps_since(rows, width) > DOUBTED_AFTER}
        self._widths = {width: widths[width - 1] for width in known}
        for width, made in self._widths.items():
            seconds[width - 1] = seconds[made - 1]
        self._by_width = np.maximum(seconds, seconds[0])
        wide = tile(rows)
        self._tiles = int(not target.knows(rows, wide) and seconds[wide - 1] < 2 * seconds[0])

    @property
    def asking(self) -> float:
        """Seconds that a draft takes that was asked for in vain."""
        return float(self._drafting[0])

    def width(self, needed: int) -> int:
        """How wide to make a step of so many tokens in a row.

        As wide as is fastest. What a tile takes is found out first, and now and then what the step itself takes.
        """
        if self._tiles and needed < tile(self._rows) and self._rows * needed > 1:
            self._tiles -= 1
            return tile(self._rows)
        if needed in self._doubted:
            self._doubted.remove(needed)
            return needed
        return self._widths.get(needed, needed)

    def by_depth(self, nodes: Array) -> Array:
        """`[k + 1]` seconds of a step by the depth of its draft, which has `nodes` `[k + 1]`; no draft is for free."""
        seconds = interpolated(self._by_width, nodes)
        seconds[1:] += self._drafting[1 : len(nodes)]
        return seconds

    def by_nodes(self) -> Array:
        """`[MOST_NODES + 1]` seconds of a step by the nodes of its draft, which has been made."""
        return self._by_width[: MOST_NODES + 1] + self.asking


def interpolated(by_width: Array, nodes: Array) -> Array:
    """Seconds of steps whose drafts have so many nodes."""
    seconds: Array = np.interp(1 + nodes, WIDTHS, by_width)
    return seconds
