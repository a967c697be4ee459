"""State beside keys and values: convolutions, recurrent states, an indexer; and the queue of tokens to replay.

`LayerStates` keep more columns than a convolution's window, so that they can be cut again where accepted tokens end. A
recurrent state that has read rejected tokens returns to where the pass began, and the accepted tokens stay uncached in
a `ReplayQueue` until the next pass, so that no pass is made for them alone::

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
from typing import Any

import torch

MAX_ROLLBACK = 64
"""Accepted tokens that may be removed again, besides a step's own, where a stopping criterion cuts them off."""
MAX_UNCACHED = 16
"""More tokens that a recurrent state does not include get a pass of their own: they widen every pass until a draft is
fully accepted."""
MAX_ROW_SKEW = 8
"""With a common start, a row further ahead of the slowest one is left out of passes until then. With 8 rows and 85% of
the draft tokens accepted, 80 tokens per row took 31 passes with a skew of 4, and 26 with 8, 16 and 32; the tokens
processed per row were 222, 244, 408 and 459."""


class LayerStates:
    """Convolutions and recurrent states of one layer, by index; `lengths` are the tokens of each row they include."""

    device: torch.device

    def __init__(self) -> None:
        self.lengths: tuple[int, ...] = ()
        self.columns: dict[int, torch.Tensor] = {}  # [batch, channels, window and columns before it]
        self.recurrent: dict[int, torch.Tensor] = {}
        self._windows: dict[int, int] = {}
        self._start: tuple[int, ...] = ()  # lengths before the last pass
        self._before: dict[int, torch.Tensor] = {}  # recurrent states before the last pass

    @classmethod
    def of_layer(cls, layer: Any, length: int) -> LayerStates:
        """The states of a `LinearAttentionLayer` that includes so many tokens of each row."""
        states = cls()
        states.device = layer.device
        states.columns = {index: one for index, one in layer.conv_states.items() if one is not None}
        states.recurrent = {index: one for index, one in layer.recurrent_states.items() if one is not None}
        states._windows = {index: layer.conv_kernel_size[index] for index in states.columns}
        states.lengths = (length,) * len(next(iter(states.columns.values())))
        return states

    def to_layer(self, layer: Any) -> None:
        """Write the states to a `LinearAttentionLayer` without previous ones."""
        for index, columns in self.columns.items():
            window = self._windows[index]
            layer.update_conv_state(columns[..., -window:], index, conv_kernel_size=window)
        for index, state in self.recurrent.items():
            layer.update_recurrent_state(state, index)

    @property
    def is_initialized(self) -> bool:
        return bool(self.lengths)

    def append_columns(self, new: torch.Tensor, index: int, conv_kernel_size: int | None = None) -> torch.Tensor:
        """Append the columns `[batch, channels, new]` of a pass; returns them after the window that precedes them."""
        count = new.shape[-1]
        window = self._windows.setdefault(index, conv_kernel_size or count)
        past = self.columns[index] if index in self.columns else new.new_zeros(*new.shape[:-1], window)
        columns, read = torch.cat([past, new], dim=-1), window + count
        self.columns[index] = columns[..., -(read + MAX_ROLLBACK) :]
        if index == 0:  # once a pass, however many convolutions the layer has
            self.device, self._start = new.device, self.lengths or (0,) * len(new)
            self.lengths = tuple(length + count for length in self._start)
        return columns[..., -read:]

    def for_pass(self, index: int) -> torch.Tensor | None:
        """A copy of a recurrent state, which is kept for a rollback: kernels for one token overwrite it in place."""
        if index not in self.recurrent:
            return None
        self._before[index] = self.recurrent[index]
        self.recurrent[index] = self._before[index].clone()
        return self.recurrent[index]

    def replace(self, state: torch.Tensor, index: int) -> torch.Tensor:
        """Replace a recurrent state, whose dtype is that of the first one."""
        self.recurrent[index] = state.to(self.recurrent.get(index, state).dtype)
        return state

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Return to these lengths; raises if a window or a recurrent state was not kept there."""
        removed = [now - length for now, length in zip(self.lengths, lengths, strict=True)]
        if not any(removed):
            return
        most, rows = max(removed), torch.tensor(removed, device=self.device)
        reachable = [columns.shape[-1] - self._windows[index] for index, columns in self.columns.items()]
        if most > min(reachable):
            raise RuntimeError(
                f"{most} tokens cannot be removed: windows of convolutions were kept for {reachable} tokens"
            )
        for row, length in enumerate(lengths if self.recurrent else ()):
            if removed[row] > 0 and length != self._start[row]:
                raise RuntimeError(
                    f"row {row} cannot return to {length} tokens: its recurrent state was kept at {self._start[row]} "
                    f"and {self.lengths[row]}"
                )
        for index, state in self.recurrent.items():
            before = self._before[index] if index in self._before else torch.zeros_like(state)
            self.recurrent[index] = torch.where((rows > 0).view(-1, *[1] * (state.dim() - 1)), before, state)
        for index, columns in self.columns.items():
            places = torch.arange(columns.shape[-1] - most, device=columns.device) + (most - rows)[:, None]
            self.columns[index] = columns.gather(-1, places[:, None].expand(-1, columns.shape[1], -1))
        self.lengths = tuple(lengths)

    def move(self, rows: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Do nothing: only chains are verified, whose accepted tokens need not be moved."""

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows."""
        for states in (self.columns, self.recurrent, self._before):
            states.update({index: state[indices.to(self.device)] for index, state in states.items()})
        self.lengths = tuple(self.lengths[row] for row in indices.tolist())
        self._start = tuple(self._start[row] for row in indices.tolist())


class ReplayQueue:
    """The tokens of each row after its prompt in `texts`, and how many of them the cache includes in `cached`."""

    def __init__(self, batch: int, common_start: bool = False):
        self.common_start = common_start
        self.texts: list[list[int]] = [[] for _ in range(batch)]
        self.cached = [0] * batch
        self.is_in_pass = False
        """Whether a pass was made whose outcome is not known yet."""
        self._added = [0] * batch  # tokens since the last `commit`
        self._starts, self._replayed = [0] * batch, [0] * batch  # of the last pass: its slot, and tokens read again

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
        members = [row for row, takes in enumerate(takes_part) if takes]
        for row in members:
            self.texts[row] += new[row]
            self._added[row] += len(new[row])
        self._starts = list(self.cached)
        if self.common_start:
            self._starts = [min((self.cached[row] for row in members), default=0)] * len(self.texts)
        width = max((len(self.texts[row]) - self._starts[row] for row in members), default=0)
        width = min(width, most or width)
        reads: list[list[int]] = []
        for row, start in enumerate(self._starts):
            is_read = self.cached[row] >= start if self.common_start else takes_part[row]
            reads.append(self.texts[row][start : start + width] if is_read else [])
            self._replayed[row] = max(0, len(reads[row]) - len(new[row]))
            if is_read:  # a recurrent state includes the padding of a shorter row
                self.cached[row] = start + (len(reads[row]) if self.common_start else width)
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
            self.cut(row, len(self.texts[row]) - self._added[row] + (count or 0))
        self._added = [0] * len(self.texts)
        self.is_in_pass = False

    def cut(self, row: int, length: int) -> None:
        """Keep the first tokens of a row's text; a recurrent state that includes more returns to its last pass."""
        reachable = length if self.common_start else self._starts[row]
        if length < min(self.cached[row], reachable):
            raise RuntimeError(f"row {row} cannot return to {length} tokens: its state is known at {reachable}")
        if length < self.cached[row]:
            self.cached[row] = reachable
        del self.texts[row][length:]
