"""The draft tree: the output of every candidate strategy.

A row's draft is a tree of draft tokens after the row's last token. Node ``i`` holds a token and the index of its
parent; ``-1`` means that it continues the row itself. Parents come before their children. Two alternatives for the
next token, and two for the one after "the"::

    row ─┬─ 0 "the" ─┬─ 2 "cat"          tokens  = [the, a, cat, dog]
         │           └─ 3 "dog"          parents = [-1, -1, 0, 0]
         └─ 1 "a"

A chain is a tree with one path; an empty tree makes the step a plain decoding step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

Parents = tuple[int, ...]
NO_NODE = -1e30
"""In place of the logarithm of the probability of a candidate that is no node."""


@dataclass(frozen=True)
class DraftTree:
    """The draft tokens of one step, for every row of the batch.

    Args:
        tokens: `[batch, nodes]` token ids, on any device. Row ``b`` has ``len(parents[b])`` nodes; the rest is padding.
        parents: for each row, the parent of each of its nodes; ``-1`` continues the row.
        q: `[batch, nodes, vocab]` optional draft probabilities, read by ``verification="rejection"``: ``q[b, i]`` is
            the distribution, after the draft's own processors, that node ``i`` was drawn from, *before* its earlier
            siblings were taken out of it (siblings are drawn one after the other, without replacement). The
            vocabulary may be smaller than the target's (the rest has probability 0), not larger. A node with all
            zeros, and every node where q is ``None``, is a deterministic proposal (a point mass).
        probability: of each row's nodes, the estimated probability that the node and all nodes above it are accepted;
            None if nothing was estimated. Strategies are combined by it.

    Raises:
        ValueError: if a parent does not come before its child, or the shapes do not fit.

    Example:
        >>> tree = DraftTree.from_paths([[[5, 6], [5, 7], [8]]])
        >>> tree.tokens.tolist(), tree.parents
        ([[5, 6, 7, 8]], ((-1, 0, 0, -1),))
    """

    tokens: torch.Tensor
    parents: tuple[Parents, ...]
    q: torch.Tensor | None = None
    probability: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        batch, nodes = self.tokens.shape
        if len(self.parents) != batch:
            raise ValueError(f"a draft tree of {batch} rows needs {batch} lists of parents, got {len(self.parents)}")
        for row, parents in enumerate(self.parents):
            if len(parents) > nodes:
                raise ValueError(f"row {row} has {len(parents)} parents but only {nodes} tokens")
            validate_parents(parents)

    @property
    def batch(self) -> int:
        return len(self.parents)

    @property
    def nodes(self) -> int:
        """The node count of the largest row."""
        return self.tokens.shape[1]

    @property
    def is_chain(self) -> bool:
        """Whether every row's draft is a chain."""
        return all(parents == chain_parents(len(parents)) for parents in self.parents)

    @property
    def drafting_rows(self) -> int:
        """How many rows have a draft."""
        return sum(map(bool, self.parents))

    def structure(self) -> TreeStructure:
        """The structure as tensors; padding nodes continue the row as a chain."""
        padded = [parents + chain_parents(self.nodes)[len(parents) :] for parents in self.parents]
        return TreeStructure(
            torch.tensor(padded, dtype=torch.long).view(self.batch, self.nodes) + 1,
            torch.tensor([self.depths(row) for row in range(self.batch)]),
            torch.stack([ancestor_matrix(parents) for parents in padded]),
        )

    def input_tokens(self, device: torch.device) -> torch.Tensor:
        """`[batch, nodes]` the tokens as a model reads them, padding included."""
        return self.tokens.to(device)

    def token_lists(self) -> list[list[int]]:
        """`[batch][nodes]` the tokens, padding included; read once."""
        if "_lists" not in vars(self):
            vars(self)["_lists"] = self.tokens.tolist()
        lists: list[list[int]] = vars(self)["_lists"]
        return lists

    def read_with(self, chosen: torch.Tensor) -> list[list[int]]:
        """`[batch][slots]` of tokens chosen by the target, and with them what is still on the device of the tree."""
        lists: list[list[int]] = chosen.tolist()
        return lists

    def depths(self, row: int) -> list[int]:
        """`[1 + nodes]` depths in a row: 0 for its last token, then each node's; 0 for padding nodes."""
        parents = self.parents[row]
        return [0, *depths(parents), *[0] * (self.nodes - len(parents))]

    def path(self, row: int, node: int) -> list[int]:
        """The tokens from a row's first draft token to a node.

        Example:
            >>> DraftTree.from_paths([[[5, 6], [5, 7], [8]]]).path(0, 2)
            [5, 7]
        """
        tokens, parents, path = self.token_lists()[row], self.parents[row], list[int]()
        while node >= 0:
            path.append(tokens[node])
            node = parents[node]
        return path[::-1]

    def select(self, rows: Sequence[int]) -> DraftTree:
        """The same drafts for some of the rows."""
        chosen = list(rows)
        q = None if self.q is None else self.q[chosen]
        return DraftTree(self.tokens[chosen], tuple(self.parents[row] for row in chosen), q)

    def first(self, count: int) -> DraftTree:
        """The first `count` nodes of each row."""
        tokens, parents = self.tokens[:, :count], tuple(row[:count] for row in self.parents)
        q = None if self.q is None else self.q[:, :count]
        probability = None if self.probability is None else tuple(row[:count] for row in self.probability)
        return DraftTree(tokens, parents, q, probability)

    def padded(self, nodes: int) -> DraftTree:
        """The same drafts with columns for at least `nodes` nodes; those that are no node are padding."""
        more = nodes - self.nodes
        if more <= 0:
            return self
        q = None if self.q is None else pad(self.q, (0, 0, 0, more))
        return replace(self, tokens=pad(self.tokens, (0, more)), q=q)

    def leftmost_chain(self) -> DraftTree:
        """The leftmost path of each row, from every node to its first child, as a chain."""
        paths = [_leftmost_path(parents) for parents in self.parents]
        if paths == [list(range(len(parents))) for parents in self.parents]:
            return self
        width = max(map(len, paths))
        nodes = torch.tensor([path + [0] * (width - len(path)) for path in paths], device=self.tokens.device)
        rows = torch.arange(self.batch, device=nodes.device)[:, None]
        q = None if self.q is None else self.q[rows, nodes]
        probability = self.probability and tuple(
            tuple(row[node] for node in path) for row, path in zip(self.probability, paths, strict=True)
        )
        return DraftTree(self.tokens[rows, nodes], tuple(chain_parents(len(path)) for path in paths), q, probability)

    @classmethod
    def empty(cls, batch: int) -> DraftTree:
        """No draft tokens: the step decodes one token per row, as plain `generate` does."""
        return cls(torch.empty(batch, 0, dtype=torch.long), ((),) * batch)

    @classmethod
    def chains(cls, rows: Sequence[Sequence[int]]) -> DraftTree:
        """A chain of draft tokens per row: a list of tokens per row; the lists may differ in length."""
        return cls(_pad(rows), tuple(chain_parents(len(row)) for row in rows))

    @classmethod
    def from_nodes(
        cls, rows: Sequence[tuple[Sequence[int], Parents]], probability: tuple[tuple[float, ...], ...] | None = None
    ) -> DraftTree:
        """From a pair (tokens, parents) per row; see above for `probability`."""
        return cls(
            _pad([tokens for tokens, _ in rows]), tuple([parents for _, parents in rows]), probability=probability
        )

    @classmethod
    def from_paths(cls, rows: Sequence[Sequence[Sequence[int]]]) -> DraftTree:
        """From a list of token paths per row; paths that begin alike share their nodes."""
        return cls.from_nodes([merge_paths(paths) for paths in rows])


class TreeStructure(NamedTuple):
    """The structure of draft trees as tensors, with each row's last token as index 0 and node ``i`` as ``i + 1``.

    Args:
        parents: `[batch, nodes]` the parent of each node, counted like that: 0 for the row's last token.
        depths: `[batch, 1 + nodes]`.
        ancestors: `[batch, 1 + nodes, 1 + nodes]` bool; `[b, i, j]` is True where ``j`` is ``i`` or its ancestor.
    """

    parents: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor


class GrownTree(DraftTree):
    """A draft tree that was grown on the drafter's device, which the host reads at once, and only when it has to.

    Args:
        tokens: `[batch, nodes]`.
        structure: of the trees; None for chains.
        values: `[batch, nodes, values]` of each node: the logarithm of its path probability, very low for padding at
            the end of a row, then what the strategy reads in `node_values`. None if all are nodes.
        keeps_all: whether nodes that can never be accepted are kept; the host reads their token as -1.
        q, drafting_rows: as for `DraftTree`.
    """

    drafting_rows: int = 0
    keeps_all: bool = False
    _structure: TreeStructure | None
    _values: torch.Tensor | None
    _host: _HostTree | None

    def __init__(
        self,
        tokens: torch.Tensor,
        structure: TreeStructure | None = None,
        values: torch.Tensor | None = None,
        *,
        drafting_rows: int,
        q: torch.Tensor | None = None,
        keeps_all: bool = False,
    ):
        vars(self).update(tokens=tokens, q=q, drafting_rows=drafting_rows, keeps_all=keeps_all)
        vars(self).update(_structure=structure, _values=values, _host=None)

    @property
    def is_chain(self) -> bool:
        return self._structure is None

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]

    @property
    def parents(self) -> tuple[Parents, ...]:
        return self._read().parents

    @property
    def probability(self) -> tuple[tuple[float, ...], ...]:
        return self._read().probability

    @property
    def node_values(self) -> list[list[list[float]]]:
        """`[batch][nodes][values]` of the rows' nodes, without the path probability."""
        return self._read().values

    def structure(self) -> TreeStructure:
        if self._structure is not None:
            return self._structure
        return TreeStructure(*(part.expand(self.batch, *part.shape[1:]) for part in _chain_structure(self.nodes)))

    def token_lists(self) -> list[list[int]]:
        return self._read().tokens

    def read_with(self, chosen: torch.Tensor) -> list[list[int]]:
        if self._host is None and chosen.device == self.tokens.device:
            return self._read(chosen).chosen
        return super().read_with(chosen)

    def depths(self, row: int) -> list[int]:
        return list(range(1 + self.nodes)) if self.is_chain else super().depths(row)

    def with_q(self, q: torch.Tensor) -> GrownTree:
        """The same trees with the probabilities `[batch, nodes, vocab]` of their nodes."""
        return self._with(self.tokens, self._structure, self._values, q)

    def select(self, rows: Sequence[int]) -> DraftTree:
        index = torch.tensor(list(rows), device=self.tokens.device)

        def chosen(part: torch.Tensor | None) -> Any:
            return None if part is None else part[index]

        structure = None if self._structure is None else TreeStructure(*map(chosen, self._structure))
        return self._with(self.tokens[index], structure, chosen(self._values), chosen(self.q))

    def padded(self, nodes: int) -> DraftTree:
        more = nodes - self.nodes
        if more <= 0:
            return self
        structure, values = self._structure, self._values
        if structure is not None:
            ancestors = pad(structure.ancestors, (0, more, 0, more))
            ancestors[:, -more:, 0] = True  # a query that sees nothing would write NaN into the cache
            structure = TreeStructure(pad(structure.parents, (0, more)), pad(structure.depths, (0, more)), ancestors)
        if values is None:
            values = torch.zeros(*self.tokens.shape, 1, device=self.tokens.device)
        q = None if self.q is None else pad(self.q, (0, 0, 0, more))
        values = pad(values, (0, 0, 0, more), value=NO_NODE)
        return self._with(pad(self.tokens, (0, more)), structure, values, q)

    def _with(
        self,
        tokens: torch.Tensor,
        structure: TreeStructure | None,
        values: torch.Tensor | None,
        q: torch.Tensor | None,
    ) -> GrownTree:
        """A tree with other tensors."""
        rows, keeps = self.drafting_rows, self.keeps_all
        return GrownTree(tokens, structure, values, drafting_rows=rows, q=q, keeps_all=keeps)

    def _read(self, chosen: torch.Tensor | None = None) -> _HostTree:
        if self._host is None:
            batch, nodes = self.tokens.shape
            parts = [self.tokens.float()]  # token ids below 2**24 are exact
            if self._structure is not None:
                parts.append(self._structure.parents.float())
            if self._values is not None:
                parts.append(self._values.flatten(1))
            if chosen is not None:
                parts.append(chosen.float())
            packed = torch.cat(parts, dim=1).cpu().numpy()
            arrays = np.split(packed, np.cumsum([part.shape[1] for part in parts[:-1]]), axis=1)
            rest = iter(arrays[1:])
            parents = None if self._structure is None else next(rest)
            values = None if self._values is None else next(rest).reshape(batch, nodes, self._values.shape[-1])
            read = packed[:, :0] if chosen is None else next(rest)
            vars(self)["_host"] = _HostTree.of(arrays[0], parents, values, read, self.keeps_all)
        host = self._host
        assert host is not None
        return host


@lru_cache(maxsize=256)
def _chain_structure(nodes: int) -> TreeStructure:
    """The structure of one row that is a chain."""
    index = torch.arange(1 + nodes)
    ancestors = torch.ones(1 + nodes, 1 + nodes, dtype=torch.bool).tril()
    return TreeStructure(index[None, :-1], index[None], ancestors[None])


@dataclass(frozen=True)
class _HostTree:
    """What the host has read of a `GrownTree`."""

    tokens: list[list[int]]
    parents: tuple[Parents, ...]
    probability: tuple[tuple[float, ...], ...]
    values: list[list[list[float]]]
    chosen: list[list[int]]

    @classmethod
    def of(cls, tokens: Any, parents: Any, values: Any, chosen: Any, keeps_all: bool) -> _HostTree:
        """From `[batch, nodes]` tokens, parents (None for chains), values `[batch, nodes, …]` and choices."""
        is_node = np.ones(tokens.shape, dtype=bool)
        probability: list[Any] = [()] * len(tokens)
        if values is not None:
            probabilities = np.exp(values[:, :, 0].astype(float))
            is_node = probabilities > 0
            tokens = np.where(is_node, tokens, -1)
            probability = list(probabilities)
        counted = is_node | (is_node.any(axis=1, keepdims=True) & keeps_all)
        sizes = counted.sum(axis=1).tolist()
        return cls(
            tokens.astype(int).tolist(),
            tuple(
                chain_parents(size) if parents is None else tuple((parents[row, :size].astype(int) - 1).tolist())
                for row, size in enumerate(sizes)
            ),
            tuple(tuple(float(p) for p in probability[row][:size]) for row, size in enumerate(sizes)),
            [[] if values is None else values[row, :size, 1:].tolist() for row, size in enumerate(sizes)],
            chosen.astype(int).tolist(),
        )


def _leftmost_path(parents: Parents) -> list[int]:
    path: list[int] = []
    for node, parent in enumerate(parents):
        if parent == (path[-1] if path else -1):
            path.append(node)
    return path


def _pad(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """`[rows, longest]` tokens, zeros after shorter rows; by way of numpy, in a third of the time of torch.tensor."""
    if len(rows) == 1:
        return torch.from_numpy(np.fromiter(rows[0], np.int64, len(rows[0]))[None])
    width = max(map(len, rows), default=0)
    padded = [[*row, *[0] * (width - len(row))] for row in rows]
    return torch.from_numpy(np.array(padded, dtype=np.int64).reshape(len(rows), width))


@lru_cache(maxsize=4096)
def validate_parents(parents: Parents) -> None:
    """Raise `ValueError` unless every parent is ``-1`` or an earlier node."""
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"node {node} has parent {parent}; a parent is -1 or an earlier node")


@lru_cache(maxsize=256)
def chain_parents(length: int) -> Parents:
    """The parents of a chain: `(-1, 0, 1, …)`."""
    return tuple(range(-1, length - 1))


def merge_paths(paths: Sequence[Sequence[int]]) -> tuple[list[int], Parents]:
    """Merge token paths into one tree (a trie); nodes are in order of first appearance."""
    tokens: list[int] = []
    parents: list[int] = []
    node_of: dict[tuple[int, int], int] = {}
    for path in paths:
        parent, shared = -1, 0
        while shared < len(path) and (parent, path[shared]) in node_of:
            parent = node_of[parent, path[shared]]
            shared += 1
        new = range(len(tokens), len(tokens) + len(path) - shared)
        new_parents = [parent, *new][: len(new)]
        node_of.update(zip(zip(new_parents, path[shared:], strict=True), new, strict=True))
        tokens.extend(path[shared:])
        parents.extend(new_parents)
    return tokens, tuple(parents)


@lru_cache(maxsize=4096)
def children(parents: Parents) -> tuple[tuple[int, ...], ...]:
    """The children of the row's last token (index 0), then of each node (index ``i + 1``), in their order."""
    lists: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents):
        lists[parent + 1].append(node)
    return tuple(map(tuple, lists))


@lru_cache(maxsize=4096)
def depths(parents: Parents) -> tuple[int, ...]:
    """The depth of each node: 1 for the children of the row's last token."""
    result: list[int] = []
    for parent in parents:
        result.append(1 if parent < 0 else result[parent] + 1)
    return tuple(result)


@lru_cache(maxsize=4096)
def ancestor_matrix(parents: Parents) -> torch.Tensor:
    """Which node attends to which, with the row's last token as index 0 and node ``i`` as index ``i + 1``.

    Returns:
        `[1 + nodes, 1 + nodes]` bool; entry `[i, j]` is True where ``j`` is ``i`` or one of its ancestors.
    """
    size = len(parents) + 1
    rows = [[True] + [False] * (size - 1)]
    for node, parent in enumerate(parents, start=1):
        row = rows[parent + 1].copy()
        row[node] = True
        rows.append(row)
    return torch.tensor(rows, dtype=torch.bool)
