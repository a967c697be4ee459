"""The queue of tokens that a target processes again, as its cache cannot be cut where the accepted tokens end.

A recurrent state that has processed rejected tokens returns to where the pass began, and the accepted tokens stay
uncached until the next pass, so that no pass is made for them alone::

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
        self.can_be_cut = common_start
        """Whether the cache of a row can be cut after any token, as keys, values and convolutions can, and not only
        where its last pass began, as a recurrent state."""
        self.texts: list[list[int]] = [[] for _ in range(batch)]
        self.cached = [0] * batch
        self.is_in_pass = False
        """Whether a pass was made whose outcome is not known yet."""
        self._added = [0] * batch  # tokens since the last `commit`
        self._starts = [0] * batch  # where the last pass began
        self._replayed = [0] * batch  # tokens that the last pass has processed again

    @property
    def uncached(self) -> list[int]:
        """How many tokens of each row are not cached."""
        return [len(text) - cached for text, cached in zip(self.texts, self.cached, strict=True)]

    def next_pass(
        self, new: Sequence[Sequence[int]], takes_part: Sequence[bool], limit: int | None = None
    ) -> tuple[list[int], list[list[int]]]:
        """Append tokens to the rows that take part, and choose what the next pass processes.

        Returns the index in `texts` at which the pass begins in each row, and the tokens of each row in the pass, at
        most `limit`. With a common start every row is written from there on, so that a row that takes no part has its
        cached tokens processed again.
        """
        members = [row for row, takes in enumerate(takes_part) if takes]
        for row in members:
            self.texts[row] += new[row]
            self._added[row] += len(new[row])
        self._starts = list(self.cached)
        if self.common_start:
            self._starts = [min((self.cached[row] for row in members), default=0)] * len(self.texts)
        width = max((len(self.texts[row]) - self._starts[row] for row in members), default=0)
        width = min(width, limit or width)
        tokens_of_rows: list[list[int]] = []
        for row, start in enumerate(self._starts):
            # A row that takes no part and is cached less far than the common start gets padding alone.
            is_processed = self.cached[row] >= start if self.common_start else takes_part[row]
            tokens = self.texts[row][start : start + width] if is_processed else []
            tokens_of_rows.append(tokens)
            self._replayed[row] = max(0, len(tokens) - len(new[row]))
            if is_processed:  # a recurrent state includes the padding of a shorter row too
                self.cached[row] = start + (len(tokens) if self.common_start else width)
        self.is_in_pass = True
        return self._starts, tokens_of_rows

    def replayed(self, row: int) -> int:
        """How many tokens of a row the last pass has processed before the new ones."""
        return self._replayed[row]

    def align(self, values: torch.Tensor, tokens: int) -> torch.Tensor:
        """`[batch, tokens of the pass, …]` values to `[batch, tokens, …]` of the new tokens alone."""
        positions = torch.tensor(self._replayed)[:, None] + torch.arange(tokens)
        rows = torch.arange(len(values))[:, None]
        return values[rows.to(values.device), positions.clamp(max=values.shape[1] - 1).to(values.device)]

    def commit(self, counts: Sequence[int | None]) -> None:
        """Keep the first `counts` tokens of the rows since the last `commit`; None for a row that took no part."""
        for row, count in enumerate(counts):
            self.cut(row, len(self.texts[row]) - self._added[row] + (count or 0))
        self._added = [0] * len(self.texts)
        self.is_in_pass = False

    def cut(self, row: int, length: int) -> None:
        """Keep the first tokens of a row's text; a recurrent state with more returns to where its last pass began."""
        reachable = length if self.can_be_cut else self._starts[row]
        if length < min(self.cached[row], reachable):
            raise RuntimeError(f"row {row} cannot return to {length} tokens: its state is known at {reachable}")
        if length < self.cached[row]:
            self.cached[row] = reachable
        del self.texts[row][length:]
