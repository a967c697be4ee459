"""Draft trees of drafters with one forward pass per level, as tensors on the drafter's device.

A pass gives for some nodes likely next tokens with acceptance probabilities; the most likely ones are the nodes of the
next pass. Shapes depend on the number of levels, nodes and children alone, and nothing is decided by the host, so that
several levels can run without a read by the host.

Source: Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees" (2024), section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_specgen.grown_tree import NO_NODE, GrownTree
from hf_specgen.tree import TreeStructure

Floats = NDArray[np.floating[Any]]
CLOSED = 1e4
"""Subtracted from the logarithm of the probability of a candidate that cannot be expanded."""
INITIAL_ROOM = 32
"""Expanded nodes that fit in the first tensors of a growth, times two."""


class Growth:
    """Draft trees that grow by one level at a time.

    Candidates come in groups of siblings. Group 0 stands for the row's last token, group 1 are its children, and group
    ``1 + e`` the children of the node that was expanded as number ``e``. `levels` are the passes so far, `expanded` the
    expanded nodes of each row.

    Example:
        >>> growth = Growth([2], children=2, last_tokens=torch.tensor([[4]]))
        >>> features = torch.zeros(1, 1, 2)
        >>> growth.add(torch.tensor([[[5, 6]]]), torch.tensor([[[0.6, 0.3]]]).log(), features)
        >>> growth.expand(1).tokens.tolist()  # the most likely node is expanded first
        [[5]]
        >>> growth.add(torch.tensor([[[7, 8]]]), torch.tensor([[[0.9, 0.1]]]).log(), features)
        >>> tree, _ = growth.best(3)  # of 4 nodes: 5, then 7 below it (0.54), then 6 (0.3)
        >>> tree.token_lists(), tree.parents
        ([[5, 7, 6]], ((-1, 0, -1),))
    """

    _open: Tensor
    _ancestors: Tensor
    _nodes: Tensor

    def __init__(self, depths: Sequence[int], children: int, last_tokens: Tensor):
        self.limits, self.children, self.levels, self.expanded = list(depths), children, 0, 0
        self.rows = sum(depth > 0 for depth in depths)
        self._last_tokens = last_tokens
        # Of each level: its candidates, then those of them that were expanded, by their index in the level.
        self._tokens: list[Tensor] = []
        self._features: list[Tensor] = []
        self._paths: list[Tensor] = []
        self._chosen: list[Tensor] = []
        self._reached: list[Tensor] = []
        self._widths: tuple[int, ...] = ()
        self._make_room(INITIAL_ROOM)
        self._limits: Tensor | None = None
        if len(set(depths)) > 1:
            self._limits = torch.tensor(self.limits, device=last_tokens.device)[:, None]

    @property
    def candidates(self) -> int:
        """How many candidates each row has."""
        return self.children * (1 + self.expanded)

    @property
    def frontier(self) -> int:
        """How many candidates of each row are in the last level."""
        return self._open.shape[1]

    def add(self, tokens: Tensor, log_acceptance: Tensor, features: Tensor, expandable: Tensor | None = None) -> None:
        """Add the children of the nodes that were expanded last, at first of each row's last token.

        All are `[rows, expanded, children]`: tokens, most preferred first; the logarithm of the probability that the
        target chooses each, given that it reached the node; the strategy's features; and whether it may be expanded.
        """
        path = log_acceptance + self._reached[-1][..., None] if self._reached else log_acceptance
        path = path.flatten(1)
        if self._limits is not None:
            path = path.masked_fill(self._limits <= self.levels, NO_NODE)
        self._open = path if expandable is None else torch.where(expandable.flatten(1), path, path - CLOSED)
        self.levels += 1
        self._tokens.append(tokens.flatten(1))
        self._features.append(features.flatten(1))
        self._paths.append(path)

    def expand(self, width: int) -> GrownTree:
        """The tree of all expanded nodes, the new ones last: the most likely candidates of the last level.

        A row with fewer of them is filled up with others, whose children have no probability.
        """
        first, self.expanded = self.expanded, self.expanded + width
        if self.children == 1:
            self._reached.append(self._open)
            return GrownTree(torch.cat(self._tokens, dim=1), level=self.levels, drafting_rows=self.rows)
        self._make_room(self.expanded)
        reached, index = self._open.topk(width, dim=1)
        above = index // self.children
        before = 2 + first - (self._widths[-1] if self._widths else 1)
        inherited = self._ancestors[:, before : 2 + first].gather(1, above[..., None].expand(-1, -1, self._size))
        self._ancestors[:, 2 + first : 2 + self.expanded].logical_or_(inherited)
        torch.gather(self._tokens[-1], 1, index, out=self._nodes[:, first : self.expanded])
        self._widths = (*self._widths, width)
        self._chosen.append(index)
        self._reached.append(reached)
        depths = _constants(self.children, self._widths, index.device).depths.expand(len(index), -1)
        structure = TreeStructure(depths, self._ancestors[:, 1 : 2 + self.expanded, : 1 + self.expanded])
        last: Any = {"level": self.levels, "above": above, "drafting_rows": self.rows}
        return GrownTree(self._nodes[:, : self.expanded], structure, **last)

    @property
    def _size(self) -> int:
        return self._ancestors.shape[2]

    def _make_room(self, nodes: int) -> None:
        """Make room for so many expanded nodes.

        Row ``1 + e`` of `_ancestors` marks the expanded node ``e`` (0: the row's last token) and its ancestors, row 0
        and the last column nothing.
        """
        if self.children == 1 or (hasattr(self, "_nodes") and self._nodes.shape[1] >= nodes):
            return
        rows, device, nodes = len(self.limits), self._last_tokens.device, 2 * nodes
        ancestors = _itself_alone(2 + nodes, device).repeat(rows, 1, 1)
        expanded = torch.empty(rows, nodes, dtype=torch.long, device=device)
        if hasattr(self, "_nodes"):
            ancestors[:, : self._size, : self._size] |= self._ancestors
            expanded[:, : self._nodes.shape[1]] = self._nodes
        self._ancestors, self._nodes = ancestors, expanded

    def read(self) -> Snapshot:
        """Read the probabilities, in one transfer to the host."""
        count = self.candidates
        values = np.exp(torch.cat([*self._paths, self._open, *self._reached], dim=1).cpu().numpy().astype(float))
        limits = np.array(self.limits)[:, None]
        opened = values[:, count : count + self.frontier] * (limits > self.levels)
        reached = np.concatenate([limits > 0, values[:, count + self.frontier :]], axis=1)
        return Snapshot(values[:, :count], opened, reached)

    def best(self, nodes: int, expanded_first: bool = False) -> tuple[GrownTree, Tensor]:
        """The best trees of at most `nodes` nodes, and `[rows, nodes]` 1 + the number of each node's parent.

        Expanded nodes have numbers from 1 on, the row's last token 0, others larger ones; the `node_values` of the tree
        are feature and number. With `expanded_first` expanded nodes come first, whatever their probability.
        """
        nodes, rows = min(nodes, self.candidates), len(self.limits)
        constants = _constants(self.children, self._widths, self._open.device)
        root, features = constants.root_paths.expand(rows, -1), constants.root_features.expand(rows, -1)
        last_tokens = self._last_tokens.expand(-1, self.children)
        if self.children == 1:
            numbers = constants.numbers[: 1 + nodes].expand(rows, -1)
            parts = [last_tokens, *self._tokens[:nodes], features, *self._features[:nodes]]
            values = torch.cat([*parts, numbers, root, *self._paths[:nodes]], dim=1).view(rows, 4, 1 + nodes)
            return GrownTree(values[:, 0, 1:].long(), None, values, drafting_rows=self.rows), numbers[:, 1:]
        ids = torch.cat([constants.no_ids.expand(rows, -1), *self._chosen], dim=1) + constants.offsets
        unknown = _full(self.children + self.candidates, self._size - 1, ids.device).expand(rows, -1)
        numbers = unknown.scatter(1, ids, constants.numbers[: 1 + self.expanded].expand(rows, -1))
        parts = [last_tokens, *self._tokens, features, *self._features, numbers, root, *self._paths]
        values = torch.cat(parts, dim=1).view(rows, 4, -1)
        order = self._order(values[:, 3], ids, nodes, expanded_first)
        values = values.gather(2, order[:, None].expand(-1, 4, -1))
        inputs, numbers = values[:, 0::2].long().unbind(1)
        sources = order // self.children
        of_sources = self._ancestors.gather(1, sources[..., None].expand(-1, -1, self._size))
        ancestors = of_sources.gather(2, numbers[:, None].expand(-1, 1 + nodes, -1))
        structure = TreeStructure(of_sources.sum(dim=2), ancestors | _identity(1 + nodes, ids.device))
        shown: Any = {"drafting_rows": self.rows, "keeps_all": expanded_first}
        return GrownTree(inputs[:, 1:], structure, values, **shown), sources[:, 1:]

    def _order(self, paths: Tensor, ids: Tensor, nodes: int, expanded_first: bool) -> Tensor:
        """`[rows, 1 + nodes]` each row's last token and the candidates of its tree, parents before their children."""
        if not expanded_first:
            return paths.topk(1 + nodes, dim=1).indices
        rest = paths.scatter(1, ids, -inf).topk(nodes - self.expanded, dim=1).indices
        return torch.cat([ids, rest], dim=1)


class _Constants(NamedTuple):
    """What depends on the shape of a growing tree alone."""

    depths: Tensor  # [1 + expanded] of each row's last token and of the expanded nodes
    offsets: Tensor  # [1 + expanded] the candidate that index 0 of each one's level stands for
    numbers: Tensor  # 0, 1, 2, …
    root_paths: Tensor  # [children] logarithms of the path probabilities of group 0
    root_features: Tensor  # [children]
    no_ids: Tensor  # [1] the id of each row's last token


@lru_cache(maxsize=256)
def _constants(children: int, widths: tuple[int, ...], device: torch.device) -> _Constants:
    """The constants of a tree whose levels were expanded by these widths."""
    depths, offsets, expanded = [0], [0], 0
    for level, width in enumerate(widths, start=1):
        group = 1 if level == 1 else 2 + expanded - widths[level - 2]
        depths += [level] * width
        offsets += [group * children] * width
        expanded += width
    numbers = range(1 + max(expanded, 128))
    root = [0.0] + [2 * NO_NODE] * (children - 1)  # never chosen before a candidate
    lists = (depths, offsets, numbers, root, [0] * children, [0])
    return _Constants(*(torch.tensor(list(values), device=device) for values in lists))


@lru_cache(maxsize=64)
def _identity(size: int, device: torch.device) -> Tensor:
    return torch.eye(size, dtype=torch.bool, device=device)


@lru_cache(maxsize=64)
def _full(size: int, value: int, device: torch.device) -> Tensor:
    return torch.full((size,), value, device=device)


@lru_cache(maxsize=16)
def _itself_alone(size: int, device: torch.device) -> Tensor:
    """`[size, size]` bool: row 0 marks nothing, row ``1 + e`` column ``e``."""
    return torch.eye(size, dtype=torch.bool, device=device).roll(1, 0).index_fill(0, torch.tensor(0, device=device), 0)


@dataclass(frozen=True)
class Snapshot:
    """What the host has read of a `Growth`: path probabilities."""

    probability: Floats  # [rows, candidates], 0 for candidates that are no node
    frontier: Floats  # [rows, last level] of candidates that can be expanded, else 0
    reached: Floats  # [rows, 1 + expanded] of the expanded nodes, 1 for the row's last token

    def sorted_probability(self, nodes: int) -> Floats:
        """`[rows, at most nodes]` the highest path probabilities in descending order."""
        return -np.sort(-self.probability, axis=1)[:, :nodes]

    def frontier_probability(self, width: int) -> Floats:
        """`[rows, at most width]` the highest path probabilities among nodes that can be expanded, descending."""
        return -np.sort(-self.frontier, axis=1)[:, :width]

    def may_improve(self, nodes: int) -> bool:
        """Whether expanding the frontier may change the best tree of a row of `nodes` nodes.

        A child of a node that is not among the best `nodes` nodes cannot be among them either.
        """
        best, next_best = self.sorted_probability(nodes), self.frontier_probability(1)[:, 0]
        is_full = best.shape[1] == nodes
        return bool((next_best > (best[:, -1] if is_full else 0.0)).any())

    def children_accepted(self, first: int) -> float | None:
        """P(one of a node's children is accepted | the node is), over the expanded nodes from `first` on."""
        rows, expanded = self.reached.shape
        children = self.probability.reshape(rows, expanded, -1)[:, first:].sum(axis=2)
        reached = (self.reached[:, first:] * (children > 0)).sum()
        return float(children.sum() / reached) if reached > 0 else None
