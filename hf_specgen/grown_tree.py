"""A draft tree that was grown by tensor functions, on the device of the drafter."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from hf_specgen.tree import DraftTree, Parents, TreeStructure, chain_parents

NO_NODE = -1e30
"""In place of the logarithm of the probability of a candidate that is no node."""


class GrownTree(DraftTree):
    """A draft tree on the drafter's device, which the host reads at once, and only when it has to.

    `values` `[batch, 4, 1 + nodes]` are of each row's last token, then of each node: token, feature, number, and the
    logarithm of the path probability, very low for padding at the end of a row; feature and number are the strategy's.
    A tree that still grows has none; its last nodes, those of the drafter's next pass, are at depth `level`, and their
    parents are `above` `[batch, new]`, by their index among the nodes of the pass before.
    """

    drafting_rows: int = 0
    is_chain: bool
    _host: _HostTree | None = None

    def __init__(
        self,
        tokens: torch.Tensor,
        structure: TreeStructure | None = None,
        values: torch.Tensor | None = None,
        *,
        level: int = 0,
        above: torch.Tensor | None = None,
        drafting_rows: int = 0,
        q: torch.Tensor | None = None,
        keeps_all: bool = False,
    ):
        vars(self).update(drafting_rows=drafting_rows, is_chain=structure is None)
        self.tokens, (self.batch, self.nodes), self._structure, self._values = tokens, tokens.shape, structure, values
        self.level, self.above, self.q, self.keeps_all = level, above, q, keeps_all

    @property
    def parents(self) -> tuple[Parents, ...]:
        return self._read().parents

    @property
    def probability(self) -> tuple[tuple[float, ...], ...] | None:
        return self._read().probability

    @property
    def node_values(self) -> list[Any]:
        """For each row `[nodes, 2]` integers: feature and number of each node."""
        return self._read().values

    def structure(self) -> TreeStructure:
        return self._structure or TreeStructure.of_chains(self.batch, self.nodes)

    def step_tokens(self, pending: Sequence[int], device: torch.device) -> torch.Tensor:
        if self._values is None:
            return super().step_tokens(pending, device)
        return self._values[:, 0].to(device, torch.long)

    def token_lists(self) -> list[list[int]]:
        return self._read().tokens

    def read_with(self, chosen: torch.Tensor) -> list[list[int]]:
        if self._host is None and chosen.device == self.tokens.device:
            return self._read(chosen).chosen
        return super().read_with(chosen)

    def of_parents(self, values: torch.Tensor) -> torch.Tensor:
        """`[batch, nodes of the pass before, …]` values to `[batch, new, …]`: that of the parent of each last node."""
        if self.above is None:
            return values
        index = self.above.to(values.device).view(*self.above.shape, *[1] * (values.dim() - 2))
        return values.gather(1, index.expand(*self.above.shape, *values.shape[2:]))

    def depths(self, row: int) -> list[int]:
        return list(range(1 + self.nodes)) if self.is_chain else super().depths(row)

    def replace(self, **tensors: torch.Tensor) -> GrownTree:
        """The same trees with other `tokens` or `q`."""
        tree = copy.copy(self)
        vars(tree).update(tensors)
        return tree

    def select(self, rows: Sequence[int]) -> GrownTree:
        index = torch.tensor(list(rows), device=self.tokens.device)
        structure = self._structure and TreeStructure(*(part[index] for part in self._structure))
        parts = {"_values": self._values, "above": self.above, "q": self.q}
        selected = {name: part[index] for name, part in parts.items() if part is not None}
        tree = self.replace(tokens=self.tokens[index], **selected)
        tree.batch, tree._structure, tree._host = len(index), structure, None
        return tree

    def padded(self, nodes: int) -> DraftTree:
        more, structure = nodes - self.nodes, self._structure
        if more <= 0:
            return self
        if structure is not None:
            ancestors = pad(structure.ancestors, (0, more, 0, more))
            ancestors[:, -more:, 0] = True  # a query that sees nothing would write NaN into the cache
            structure = TreeStructure(pad(structure.depths, (0, more)), ancestors)
        tree = self.replace(tokens=pad(self.tokens, (0, more)))
        tree.nodes, tree._structure, tree._host = nodes, structure, None
        if self._values is not None:
            tree._values = pad(self._values, (0, more), value=NO_NODE)
            tree._values[:, 0, -more:] = 0  # the target reads a token there too
        tree.q = None if self.q is None else pad(self.q, (0, 0, 0, more))
        return tree

    def _read(self, chosen: torch.Tensor | None = None) -> _HostTree:
        """Read the tree, and tokens chosen by the target, in one transfer; token ids below 2**24 are exact."""
        if self._host is None:
            parts = [self.tokens if self._values is None else self._values.flatten(1)]
            parts += [] if self._structure is None else [self._structure.ancestors.flatten(1)]
            parts += [] if chosen is None else [chosen]
            packed = torch.cat(parts, dim=1).cpu().numpy()
            arrays = np.split(packed, np.cumsum([part.shape[1] for part in parts[:-1]]), axis=1)
            size = 1 + self.nodes
            values = None if self._values is None else arrays[0].reshape(self.batch, 4, size)
            ancestors = None if self._structure is None else arrays[1].reshape(self.batch, size, size)
            tokens = arrays[0] if values is None else values[:, 0, 1:]
            read = [] if chosen is None else arrays[-1].astype(int).tolist()
            self._host = _HostTree.of(tokens, values, ancestors, read, self.keeps_all)
        return self._host


class _HostTree(NamedTuple):
    """What the host has read of a `GrownTree`."""

    tokens: list[list[int]]
    parents: tuple[Parents, ...]
    probability: tuple[tuple[float, ...], ...] | None
    values: list[Any]
    chosen: list[list[int]]

    @classmethod
    def of(cls, tokens: Any, values: Any, ancestors: Any, chosen: list[list[int]], keeps_all: bool) -> _HostTree:
        """From `[batch, nodes]` tokens, and arrays of the shapes above; without values all are nodes."""
        batch, nodes = tokens.shape
        probability = np.ones((batch, nodes)) if values is None else np.exp(values[:, 3, 1:].astype(float))
        is_node = probability > 0
        counted = is_node | (is_node.any(axis=1, keepdims=True) & keeps_all)
        sizes = counted.sum(axis=1).tolist()
        if ancestors is None:
            parents = tuple(chain_parents(size) for size in sizes)
        else:  # the nearest ancestor of a node is the last one before it
            before = np.tril(ancestors, -1) > 0
            nearest = np.where(before, np.arange(1 + nodes), 0).max(axis=2)[:, 1:] - 1
            parents = tuple(tuple(row[:size]) for row, size in zip(nearest.tolist(), sizes, strict=True))
        rows = zip(probability.tolist(), sizes, strict=True)
        shown = [] if values is None else values[:, 1:3, 1:].transpose(0, 2, 1)
        return cls(
            np.where(is_node, tokens, -1).astype(int).tolist(),
            parents,
            None if values is None else tuple(tuple(row[:size]) for row, size in rows),
            [row[:size].astype(int) for row, size in zip(shown, sizes, strict=False)],
            chosen,
        )
