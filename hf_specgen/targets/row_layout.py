"""Which rows of a call are in the cache, and how slots and positions of a row are related."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from hf_specgen.tree import DraftTree

T = TypeVar("T")


class RowLayout:
    """The rows of a call that are in the cache: all at first, later only those that have not been dropped.

    Args:
        batch: rows of the prompt.
        last_position: how far the model's positions go.

    Attributes:
        rows: the numbers of these rows in the call, in the order of the cache.
        prompt_slots: how many slots the prompt of each of them fills.
        offsets: for each of them, position minus slot: negative where the prompt begins with padding.
    """

    def __init__(self, batch: int, last_position: int):
        self.rows = list(range(batch))
        self.prompt_slots: tuple[int, ...] = ()
        self.offsets: tuple[int, ...] = ()
        self._last_position = last_position

    def place_prompt(self, slots: Sequence[int], first_positions: Sequence[int]) -> None:
        """Record how many slots each prompt fills, and the position of the first token after it."""
        self.prompt_slots = tuple(slots)
        self.offsets = tuple(position - length for position, length in zip(first_positions, slots, strict=True))

    def of(self, values: Sequence[T]) -> list[T]:
        """Of one value for each row of the call, those of the rows in the cache."""
        return [values[row] for row in self.rows]

    def select(self, tree: DraftTree, inputs: dict[str, torch.Tensor]) -> tuple[DraftTree, dict[str, torch.Tensor]]:
        """The draft and the inputs of a pass, for the rows in the cache."""
        if len(self.rows) == tree.batch:
            return tree, inputs
        return tree.select(self.rows), {name: tensor[self.rows] for name, tensor in inputs.items()}

    def spread(self, values: torch.Tensor, batch: int) -> torch.Tensor:
        """`[rows in the cache, …]` to `[batch, …]`, with zeros for rows that have been dropped."""
        return spread_rows(values, self.rows, batch)

    def positions(
        self, tree: DraftTree, lengths: Sequence[int], active: Sequence[bool] | None, cached: int
    ) -> list[list[int]]:
        """`[rows][tokens]` positions of the tokens of a pass: the pending token and the nodes of a draft.

        Args:
            tree: the draft of the rows in the cache.
            lengths: slots of each row before the pending token.
            active: of all rows of the call, those that take part; all if None.
            cached: how many of the pending token and the first nodes are in the cache already.
        """
        last, positions = self._last_position, []
        takes_part = [True] * len(lengths) if active is None else self.of(active)
        for place, (length, offset, part) in enumerate(zip(lengths, self.offsets, takes_part, strict=True)):
            depths = tree.depths(place)[cached:]
            base = length + offset
            # An ended row and its nodes may exceed the model's position table, where a model would raise. So may the
            # padding nodes of a draft that grows. The results of all these nodes are ignored.
            if not part or (cached and base <= last):
                positions.append([min(base + depth, last) for depth in depths])
            else:
                positions.append([base + depth for depth in depths])
        return positions

    def to_keep(self, needed: Sequence[bool]) -> list[int] | None:
        """The places in the cache of the rows that are still needed; None while too few can be dropped.

        Enough are a quarter, or half of the last four: in float32 on two cores three rows take longer than four.

        Args:
            needed: of all rows of the call.
        """
        places = [place for place, row in enumerate(self.rows) if needed[row]]
        rows, ended = len(self.rows), len(self.rows) - len(places)
        return places if places and ended >= (rows / 4 if rows > 4 else rows / 2) else None

    def keep(self, places: Sequence[int]) -> None:
        """Drop all rows but those at these places of the cache."""
        self.rows = [self.rows[place] for place in places]
        self.offsets = tuple(self.offsets[place] for place in places)
        self.prompt_slots = tuple(self.prompt_slots[place] for place in places)


def spread_rows(values: torch.Tensor, rows: Sequence[int], batch: int) -> torch.Tensor:
    """The values of some rows of a batch as a tensor for the whole batch.

    Args:
        values: `[rows, …]`.
        rows: their numbers in the batch.
        batch: number of rows of the batch.

    Returns:
        `[batch, …]`, with zeros for the other rows; `values` itself if there are none.

    Example:
        >>> spread_rows(torch.tensor([[1], [3]]), [0, 2], batch=3).tolist()
        [[1], [0], [3]]
    """
    if values.shape[0] == batch:
        return values
    result = values.new_zeros(batch, *values.shape[1:])
    result[list(rows)] = values
    return result
