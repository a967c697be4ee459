"""One forward pass for several one-row targets, whose rows join and leave between the steps.

The keys and values of all rows are in common buffers, and the cache of each target is a view of its row. So one pass
appends to all of them, and each target drafts, commits and rolls back on its own. When the rows change, the buffers are
made anew, unless a row takes the place of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_specgen.targets.cache import MAX_DRAFT_SLOTS, RaggedCache, RaggedLayer
from hf_specgen.targets.target import Target
from hf_specgen.tree import DraftTree

SPARE_SLOTS = 4 * MAX_DRAFT_SLOTS
"""Slots that new buffers have beyond the longest row: each copy of the buffers is for as many tokens of the longest."""


class JoinedTargets:
    """The targets whose rows are in the common buffers.

    Attributes:
        target: a `Target` with all rows, which may run passes as long as the rows do not change and roll back to now.
    """

    target: Target

    def __init__(self) -> None:
        self._rows: list[Target] = []
        self._cache = RaggedCache()
        self._capacity = 0

    def set_rows(self, rows: Sequence[Target]) -> None:
        """Process these targets from now on, all of them `is_joinable` and prefilled."""
        if list(rows) == self._rows:
            return
        slots = max(row.cache.lengths[0] for row in rows)
        places = [place for place, row in enumerate(rows) if row not in self._rows]
        fits = len(rows) == len(self._rows) and slots + MAX_DRAFT_SLOTS < self._capacity
        if fits and all(row is self._rows[place] for place, row in enumerate(rows) if place not in places):
            for place in places:
                self._copy(rows[place], place, self._cache.buffers())
        else:
            self._make_buffers(rows, slots + SPARE_SLOTS)
        self._rows = list(rows)
        self._update()

    def forward(self, trees: Sequence[DraftTree], pending: Sequence[int]) -> list[torch.Tensor]:
        """Run the pending token and the draft of each row; `[1, 1 + nodes, vocab]` logits of each."""
        width = max(tree.nodes for tree in trees)
        slots = max(row.cache.lengths[0] for row in self._rows) + 1 + width
        if slots > self._capacity:
            self._make_buffers(self._rows, slots + SPARE_SLOTS)
        self._update()
        parts = [(tree.token_lists()[0][: len(tree.parents[0])], tree.parents[0]) for tree in trees]
        logits = self.target.forward(DraftTree.from_nodes(parts).padded(width), pending)
        for place, (row, tree) in enumerate(zip(self._rows, trees, strict=True)):
            row.process_joined(self.target, place, 1 + tree.nodes)
        return [logits[place : place + 1, : 1 + tree.nodes] for place, tree in enumerate(trees)]

    def release(self, row: Target) -> None:
        """Give a target a cache of its own again."""
        for layer in row.cache.layers:
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()  # type: ignore[union-attr]

    def _update(self) -> None:
        """Let the common cache and target begin where the rows end."""
        self._cache.set_lengths([row.cache.lengths[0] for row in self._rows])
        self.target = self._rows[0].join(self._rows, self._cache)

    def _make_buffers(self, rows: Sequence[Target], capacity: int) -> None:
        """Copy the rows into new buffers."""
        self._capacity, self._cache = capacity, RaggedCache()
        buffers = []
        for layer in rows[0].cache.layers:
            keys, values = ((x.new_zeros(len(rows), x.shape[1], capacity, x.shape[3])) for x in _states(layer))
            joined = RaggedLayer()
            joined.lazy_initialization(keys, values)
            joined.keys, joined.values = keys, values
            self._cache.layers.append(joined)
            buffers.append((keys, values))
        for place, row in enumerate(rows):
            self._copy(row, place, buffers)

    def _copy(self, row: Target, place: int, buffers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Move the keys and values of a target to a row of the buffers.

        A layer that has dropped slots outside of its sliding window gets them back as zeros, which its mask hides.
        """
        for layer, of_layer in zip(row.cache.layers, buffers, strict=True):
            part: Any = layer
            views = [buffer[place : place + 1] for buffer in of_layer]
            end = part.lengths[0]
            for view, states in zip(views, _states(layer), strict=True):
                view[:, :, part.first : end] = states[:, :, : end - part.first]
            part.keys, part.values = views
            part.window, part.first = None, 0


def _states(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.keys, layer.values
