"""Attention masks of chain drafts, cut from a template instead of being computed in every step.

In a chain, query i of a row with `length` cached slots sees the slots 0 to `length + i`, or the last `window` of them.
So the masks of all rows and steps are the same diagonal band, shifted. The template holds it once, with the columns
numbered relative to the cached length; the mask of a row is a slice that starts `length` columns before column 0::

    column    -4 -3 -2 -1  0  1  2  3
    query 0    1  1  1  1  1  0  0  0        length 2, 3 queries:   1 1 1 0 0
    query 1    1  1  1  1  1  1  0  0                               1 1 1 1 0
    query 2    1  1  1  1  1  1  1  0                               1 1 1 1 1
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

MIN_CAPACITY = 16
"""Smallest number of queries and columns of a template: drafts of ordinary lengths then never make it grow."""


class ChainMasks:
    """Cuts the masks of one kind of layer from a template that grows by doubling.

    The masks may be views of the template: they must not be changed in place.

    Args:
        device: of the masks.
        window: number of slots that a query sees, its own included (sliding-window attention); None for all of them.

    Example:
        >>> ChainMasks(torch.device("cpu")).cut([2], queries=3).int()[0, 0]
        tensor([[1, 1, 1, 0, 0],
                [1, 1, 1, 1, 0],
                [1, 1, 1, 1, 1]], dtype=torch.int32)
    """

    def __init__(self, device: torch.device, window: int | None = None):
        self._device, self._window = device, window
        self._before, self._after, self._queries = 0, 0, 0  # columns before and from column 0 on, and queries
        self._template = torch.empty(0, 0, dtype=torch.bool, device=device)

    def cut(self, lengths: Sequence[int], queries: int, visible: torch.Tensor | None = None) -> torch.Tensor:
        """The mask of a step over `queries` tokens of each row.

        Args:
            lengths: cached slots of each row.
            queries: the pending token and the draft tokens.
            visible: `[batch, slots]` bool, False for padding among the cached slots; None if there is none.

        Returns:
            `[batch, 1, queries, max(lengths) + queries]` bool, True where the query attends to the key; one mask for
            all rows, `[1, 1, …]`, if they are equally long and have no padding.
        """
        width = max(lengths) + queries
        self._reserve(max(lengths), width - min(lengths), queries)
        if visible is None and len(set(lengths)) == 1:
            return self._slice(lengths[0], queries, width)
        masks = torch.cat([self._slice(length, queries, width) for length in lengths])
        if visible is not None:
            masks[..., : visible.shape[1]] &= visible[:, None, None]
        return masks

    def is_all_seen(self, lengths: Sequence[int], queries: int) -> bool:
        """Whether the mask of rows without padding is True everywhere, so that none is needed."""
        longest = max(lengths)
        fits = self._window is None or longest < self._window
        return queries == 1 and min(lengths) == longest and fits

    def _slice(self, length: int, queries: int, width: int) -> torch.Tensor:
        first = self._before - length
        # As `self._template[:queries, first : first + width][None, None]`, in a single call of torch.
        columns = self._before + self._after
        return self._template.as_strided((1, 1, queries, width), (0, 0, columns, 1), first)

    def _reserve(self, before: int, after: int, queries: int) -> None:
        """Make the template large enough; each dimension that is too small at least doubles."""
        if before <= self._before and after <= self._after and queries <= self._queries:
            return
        self._before = _grown(self._before, before)
        self._after = _grown(self._after, after)
        self._queries = _grown(self._queries, queries)
        columns = self._before + self._after
        template = torch.ones(self._queries, columns, dtype=torch.bool, device=self._device).tril_(self._before)
        self._template = template if self._window is None else template.triu_(self._before - self._window + 1)


def _grown(capacity: int, needed: int) -> int:
    return capacity if needed <= capacity else max(2 * capacity, needed, MIN_CAPACITY)
