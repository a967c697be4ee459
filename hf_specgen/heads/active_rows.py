"""The rows of a batch that a draft head still computes: those that have ended are dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from hf_specgen.targets.cache import RaggedCache
from hf_specgen.targets.inputs import spread_rows

T = TypeVar("T")


class ActiveRows:
    """Which rows of the call are in the head's batch.

    Args:
        batch: number of rows of the call.

    Attributes:
        rows: their numbers in the call, ascending.

    Example:
        >>> active = ActiveRows(3)
        >>> active.drop([True, False, True], RaggedCache())
        [0, 2]
        >>> active.select("abc"), active.spread(torch.tensor([[1], [3]])).tolist()
        (['a', 'c'], [[1], [0], [3]])
    """

    def __init__(self, batch: int):
        self.batch, self.rows = batch, list(range(batch))

    def drop(self, needed: Sequence[bool], cache: RaggedCache) -> list[int]:
        """Drop rows that are not needed any more, and their part of the cache.

        Args:
            needed: for each row of the call; at least one has to be.
            cache: of the head.

        Returns:
            the places, among the rows that were there before, of those that stay.
        """
        places = [place for place, row in enumerate(self.rows) if needed[row]]
        if places and len(places) < len(self.rows):
            self.rows = [self.rows[place] for place in places]
            cache.batch_select_indices(torch.tensor(places))
            return places
        return list(range(len(self.rows)))

    def select(self, values: Sequence[T]) -> list[T]:
        """Of values for each row of the call, those of the rows in the head's batch."""
        return [values[row] for row in self.rows]

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """`[active, …]` values to `[batch, …]`, with zeros for rows that were dropped."""
        return spread_rows(values, self.rows, self.batch)
