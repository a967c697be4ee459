"""The queue of accepted tokens that must be processed again, in front of the pending token of a later pass.

A recurrent state that has read rejected tokens returns to where the pass began, and the accepted tokens stay uncached
until the next pass, so that no pass is made for them alone::

    pass 1   state at 10   reads  a │ b c d      a pending, draft (b, c, d), of which b is accepted, then x follows
    pass 2   state at 10   reads  a b x │ e f    a and b are uncached, x pending, draft (e, f), all accepted
    pass 3   state at 15   reads  g │ …

A model that takes no positions numbers the tokens of a pass by how many slots the cache has, for all rows alike, so
that rows of different lengths would get wrong positions. There every pass begins at the slot up to which all rows that
take part are cached, the *common start*::

    pass 1   slot 10   row 0   a │ b c d       pending a, draft (b, c, d), all accepted, then x follows
                       row 1   p │ q r s       q is accepted, then y follows
    pass 2   slot 12   row 0   c d x │ e f     c and d are processed again, x is pending, the draft is (e, f)
                       row 1   y │ z u

Rows are padded on the right; the padding counts as rejected.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

MAX_UNCACHED = 16
"""More tokens that a recurrent state does not include get a pass of their own: they widen every pass until a draft is
fully accepted."""
MAX_ROW_SKEW = 8
"""With a common start, a row further ahead of the slowest one is left out of passes until then. With 8 rows and 85% of
the draft tokens accepted, 80 tokens per row took 31 passes with a skew of 4, and 26 with 8, 16 and 32; the tokens
processed per row were 222, 244, 408 and 459."""


class ReplayQueue:
    """The tokens of each row after its prompt in `texts`, and how many of them the cache includes in `cached`."""

    def __init__(self, batch: int, common_start: bool = False):
        self.common_start = common_start
        self.texts: list[list[int]] = [[] for _ in range(batch)]
        self.cached = [0] * batch
        self.is_in_pass = False
        """Whether a pass was made whose outcome is not known yet."""
        self._added = [0] * batch  # tokens since the last `commit`
        # Of the last pass: where each row began, how many tokens it read again, and the length of the longest row.
        self._starts, self._replayed, self._width = [0] * batch, [0] * batch, 0

    @property
    def uncached(self) -> list[int]:
        """How many tokens of each row are not cached."""
        return [len(text) - cached for text, cached in zip(self.texts, self.cached, strict=True)]

    def next_pass(
        self, new: Sequence[Sequence[int]], takes_part: Sequence[bool], most: int | None = None
    ) -> tuple[list[int], list[list[int]]]:
        """Append tokens to the rows that take part; returns where each row begins, after its prompt, and its tokens.

        At most `most` tokens of a row are read. A row that takes no part reads its own text where it is overwritten.
        """
        for row, tokens in enumerate(new):
            if takes_part[row]:
                self.texts[row] += tokens
                self._added[row] += len(tokens)
        members = [row for row, takes in enumerate(takes_part) if takes]
        self._starts = list(self.cached)
        if self.common_start:
            self._starts = [min((self.cached[row] for row in members), default=0)] * len(self.texts)
        ends = [len(self.texts[row]) - self._starts[row] for row in members]
        self._width = min(max(ends, default=0), most or max(ends, default=0))
        reads: list[list[int]] = []
        for row, (text, start) in enumerate(zip(self.texts, self._starts, strict=True)):
            is_read = self.cached[row] >= start if self.common_start else takes_part[row]
            reads.append(text[start : start + self._width] if is_read else [])
            self._replayed[row] = max(0, len(reads[-1]) - len(new[row]))
            if self.common_start:
                self.cached[row] = min(self.cached[row], start) + len(reads[-1])
        self.is_in_pass = True
        return self._starts, reads

    def align(self, values: torch.Tensor, results: int) -> torch.Tensor:
        """`[batch, tokens of the pass, …]` values to `[batch, results, …]` of the new tokens."""
        places = torch.tensor(self._replayed)[:, None] + torch.arange(results)
        rows = torch.arange(len(values))[:, None]
        return values[rows.to(values.device), places.clamp(max=values.shape[1] - 1).to(values.device)]

    def commit(self, counts: Sequence[int | None]) -> None:
        """Keep so many of the tokens that were appended since the last `commit`; None for a row that took no part."""
        for row, count in enumerate(counts):
            text = self.texts[row]
            del text[len(text) - self._added[row] + (count or 0) :]
            if self.common_start:
                self.cached[row] = min(self.cached[row], len(text))
            elif count is not None and self._replayed[row] + count == self._width:
                self.cached[row] = self._starts[row] + self._width
            else:  # a recurrent state returns to where the pass began
                self.cached[row] = self._starts[row]
        self._added = [0] * len(self.texts)
        self.is_in_pass = False

    def cut(self, row: int, length: int) -> None:
        """Keep the first tokens of a row's text; a recurrent state can return to where the last pass began."""
        reachable = length if self.common_start else self._starts[row]
        if length < min(self.cached[row], reachable):
            raise RuntimeError(f"row {row} cannot return to {length} tokens: its state is known at {reachable}")
        if length < self.cached[row]:
            self.cached[row] = reachable
        del self.texts[row][length:]
