"""The rows of a call that are in the cache, and the positions of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from hf_specgen.device_tree import DeviceTree, Frontier, PassTree

UNLIMITED = 2**31
"""A position that no text reaches."""

T = TypeVar("T")


class RowLayout:
    """The rows of a call that are in the cache: all at first, later only those that have not been dropped.

    `offsets` are, for each of them, position minus slot: negative where the prompt begins with padding.
    """

    def __init__(self, batch: int, last_position: int):
        self.rows = list(range(batch))
        self.prompt_slots: tuple[int, ...] = ()
        self.offsets: tuple[int, ...] = ()
        self._last_position = last_position

    def copy(self) -> RowLayout:
        """A layout that begins with the same rows."""
        copied = RowLayout(0, self._last_position)
        copied.append_rows(self)
        return copied

    def place_prompt(self, slots: Sequence[int], first_positions: Sequence[int]) -> None:
        """Record how many slots each prompt fills, and the position of the first token after it."""
        self.prompt_slots = tuple(slots)
        self.offsets = tuple(position - length for position, length in zip(first_positions, slots, strict=True))

    def gather(self, values: Sequence[T]) -> list[T]:
        """Of one value for each row of the call, those of the rows in the cache."""
        return [values[row] for row in self.rows]

    def gather_inputs(
        self, tree: PassTree, inputs: dict[str, torch.Tensor]
    ) -> tuple[PassTree, dict[str, torch.Tensor]]:
        """The draft and the inputs of a pass, for the rows in the cache."""
        if len(self.rows) == tree.batch:
            return tree, inputs
        return tree.select(self.rows), {name: tensor[self.rows] for name, tensor in inputs.items()}

    def positions(
        self, tree: PassTree, lengths: Sequence[int], active: Sequence[bool] | None, cached: int
    ) -> torch.Tensor:
        """`[rows, tokens]` positions of the pending token and the nodes of a draft, but the first `cached` of them."""
        depths = torch.arange(1 + tree.nodes, device=tree.device)[None] if tree.is_chain else tree.structure().depths
        depths = depths[:, cached:]
        bases = [length + offset for length, offset in zip(lengths, self.offsets, strict=True)]
        first = bases[0] if len(set(bases)) == 1 else torch.tensor(bases, device=depths.device)[:, None]
        limits = self.limits(tree, bases, active, cached)
        if limits is None:
            return depths + first
        return (depths + first).minimum(torch.tensor(limits, device=depths.device)[:, None])

    def offsets_and_limits(self, tree: PassTree, lengths: Sequence[int], active: Sequence[bool] | None) -> torch.Tensor:
        """`[rows, 2]` position minus slot, and the highest position."""
        bases = [length + offset for length, offset in zip(lengths, self.offsets, strict=True)]
        highest = self.limits(tree, bases, active) or [UNLIMITED] * len(bases)
        return torch.tensor(list(zip(self.offsets, highest, strict=True)))

    def limits(
        self, tree: PassTree, bases: Sequence[int], active: Sequence[bool] | None, cached: int = 0
    ) -> list[int] | None:
        """The highest position of each row, whose last token is at `bases`; None if no node can exceed it.

        An ended row and its nodes may exceed the model's position table, where a model would raise. So may padding
        nodes. The results of all these are ignored. The other rows exceed it as in plain decoding.
        """
        last = self._last_position
        if max(bases) + tree.nodes <= last:
            return None
        takes_part = [True] * len(bases) if active is None else self.gather(active)
        limits = []
        for index, (base, part) in enumerate(zip(bases, takes_part, strict=True)):
            # Clamp to the last position: rows that do not take part; and rows whose nodes may be padding, as in a
            # growing tree or in a tree on the device, whose depths would cost a synchronization.
            is_clamped = not part or (base <= last and (cached > 0 or isinstance(tree, DeviceTree | Frontier)))
            limits.append(last if is_clamped else max(last, base + max(tree.depths(index))))
        return limits

    def rows_to_keep(self, needed: Sequence[bool]) -> list[int] | None:
        """The cache indices of needed rows; None unless a quarter has ended, or half if at most four are left."""
        indices = [index for index, row in enumerate(self.rows) if needed[row]]
        rows = len(self.rows)
        ended = len(self.rows) - len(indices)
        return indices if indices and ended >= (rows / 4 if rows > 4 else rows / 2) else None

    def keep_rows(self, indices: Sequence[int]) -> None:
        """Drop all rows but those at these indices of the cache."""
        self.rows = [self.rows[index] for index in indices]
        self.offsets = tuple(self.offsets[index] for index in indices)
        self.prompt_slots = tuple(self.prompt_slots[index] for index in indices)

    def append_rows(self, other: RowLayout) -> None:
        """Add the rows of another layout after those of this one."""
        self.offsets += other.offsets
        self.prompt_slots += other.prompt_slots
        self.rows = list(range(len(self.offsets)))


def scatter_rows(values: torch.Tensor, rows: Sequence[int], batch: int) -> torch.Tensor:
    """`[rows, …]` values of some rows of a batch as `[batch, …]`, with zeros for the other rows."""
    if values.shape[0] == batch:
        return values
    result = values.new_zeros(batch, *values.shape[1:])
    result[list(rows)] = values
    return result
