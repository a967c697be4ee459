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
from functools import cache, cached_property, lru_cache
from math import inf
from operator import index
from typing import NamedTuple

import torch

Parents = tuple[int, ...]


class DraftTree:
    """The draft tokens of one step, for every row of the batch.

    Args:
        tokens: `[batch, nodes]` token ids, on any device, or a list for each row. Row ``b`` has ``len(parents[b])``
            nodes; the rest is padding.
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

    batch: int
    nodes: int
    """The node count of the largest row."""
    q: torch.Tensor | None
    keeps_placeholders: bool = False
    """Whether some nodes can never be accepted; the host reads their token as -1."""

    def __init__(
        self,
        tokens: torch.Tensor | Sequence[Sequence[int]],
        parents: tuple[Parents, ...] | None,
        q: torch.Tensor | None = None,
        probability: tuple[tuple[float, ...], ...] | None = None,
    ):
        if isinstance(tokens, torch.Tensor):
            if tokens.dim() != 2:
                raise ValueError(f"the tokens of a draft tree are [batch, nodes], got the shape {list(tokens.shape)}")
            self.tokens = tokens
            rows, nodes = tokens.shape
            counts = [nodes] * rows
        else:
            counts = list(map(len, tokens))
            rows = len(tokens)
            nodes = max(counts, default=0)
            self._lists = [[*row, *[0] * (nodes - len(row))] for row in tokens]
        if parents is not None:
            parents = tuple(map(tuple, parents))
            _validate(parents, counts)
        self.batch = rows
        self.nodes = nodes
        self.q = q
        self._parents = parents
        self._probability = probability

    @cached_property
    def tokens(self) -> torch.Tensor:
        """`[batch, nodes]` the tokens, padding included."""
        return torch.tensor(self._lists, dtype=torch.long).view(self.batch, self.nodes)

    @cached_property
    def _lists(self) -> list[list[int]]:
        """`[batch][nodes]` the tokens on the host, padding included."""
        lists: list[list[int]] = self.tokens.tolist()
        return lists

    @property
    def parents(self) -> tuple[Parents, ...]:
        """For each row the parent of each of its nodes."""
        assert self._parents is not None, "a subclass reads them from a device"
        return self._parents

    @property
    def probability(self) -> tuple[tuple[float, ...], ...] | None:
        """For each row the estimated path probability of each of its nodes, if there is an estimate."""
        return self._probability

    @property
    def device(self) -> torch.device:
        """Where the tokens are; the CPU as long as they are lists."""
        return self.tokens.device if "tokens" in vars(self) else torch.device("cpu")

    @cached_property
    def is_chain(self) -> bool:
        """Whether every row's draft is a chain."""
        return all(parents == chain_parents(len(parents)) for parents in self.parents)

    def structure(self) -> TreeStructure:
        """The structure as tensors; padding nodes continue the row as a chain."""
        return TreeStructure.of_chains(self.batch, self.nodes) if self.is_chain else self._host_structure

    @cached_property
    def _host_structure(self) -> TreeStructure:
        """The structure of trees that are no chains, computed from the parents on the host."""
        # By index: 0 for the row's last token, whose parent is -1, then 1 + node; padding continues as a chain.
        chain = chain_parents(self.nodes)
        parents = 1 + torch.tensor([(-2, *row, *chain[len(row) :]) for row in self.parents])
        ancestors = ancestors_of(parents[:, :, None] == torch.arange(1 + self.nodes))
        return TreeStructure(ancestors.sum(dim=2) - 1, ancestors)  # a node counts among its ancestors

    def step_tokens(self, pending: Sequence[int], device: torch.device) -> torch.Tensor:
        """`[batch, 1 + nodes]` input tokens of a step: the last token of each row, its draft, and itself as padding."""
        rows = zip(pending, self.token_lists(), map(len, self.parents), strict=True)
        lists = [[last, *row[:nodes], *[last] * (self.nodes - nodes)] for last, row, nodes in rows]
        return torch.tensor(lists).to(device)

    def token_lists(self) -> list[list[int]]:
        """`[batch][nodes]` the tokens, padding included; read once."""
        return self._lists

    def read_with(self, chosen: torch.Tensor) -> list[list[int]]:
        """`[batch][queries]` of tokens chosen by the target, and with them what is still on the device of the tree."""
        lists: list[list[int]] = chosen.tolist()
        return lists

    def depths(self, row: int) -> list[int]:
        """`[1 + nodes]` depths in a row: 0 for its last token, then each node's; 0 for padding nodes."""
        parents = self.parents[row]
        return [0, *depths(parents), *[0] * (self.nodes - len(parents))]

    def checked(self, vocabulary: int) -> DraftTree:
        """The same tree, with 0 as padding, once it is certain that a target with this vocabulary can verify it.

        Raises:
            ValueError: if a token is no id below `vocabulary`, a parent no number, or q no distribution.
        """
        try:
            sizes = list(map(len, self.parents))  # nodes of each row; the tokens after them are padding
            rows = [list(map(index, row[:size])) for row, size in zip(self.token_lists(), sizes, strict=True)]
            parents = tuple(tuple(map(index, row_parents)) for row_parents in self.parents)
        except TypeError as error:
            raise ValueError(f"its tokens and parents must be whole numbers ({error})") from None
        wrong = [token for row in rows for token in row if not 0 <= token < vocabulary]
        if wrong:
            raise ValueError(f"its token {wrong[0]} is outside of the target's vocabulary of {vocabulary}")
        if self.probability is not None and [*map(len, self.probability)] != sizes:
            raise ValueError("its probability must have one value for each node")
        if (q := self.q) is not None:
            shape = list(getattr(q, "shape", ()))
            largest = [self.batch, self.nodes, vocabulary]
            if len(shape) != 3 or shape[0] != self.batch or shape[1] < self.nodes or shape[2] > vocabulary:
                raise ValueError(f"its q must be probabilities of at most the shape {largest}, got the shape {shape}")
            valid = ((q >= 0) & (q < inf)).all(dim=-1).tolist()
            if not all(all(row[:size]) for row, size in zip(valid, sizes, strict=True)):
                raise ValueError("its q has values that are negative or not finite")
        has_other_padding = any(any(row[size:]) for row, size in zip(self.token_lists(), sizes, strict=True))  # than 0
        return DraftTree(rows, parents, self.q, self.probability) if has_other_padding else self

    def select(self, rows: Sequence[int]) -> DraftTree:
        """The drafts of some of the rows, for a forward pass."""
        return DraftTree([self.token_lists()[row] for row in rows], tuple(self.parents[row] for row in rows))

    def first_nodes(self, count: int) -> DraftTree:
        """The first nodes of each row: the most probable ones of a tree whose nodes are in this order."""
        if self.nodes <= count:
            return self
        rows = zip(self.token_lists(), self.parents, strict=True)
        return DraftTree.from_nodes([(tokens[:count], parents[:count]) for tokens, parents in rows])

    def padded(self, nodes: int) -> DraftTree:
        """The drafts with padding up to at least `nodes` nodes of each row, for a forward pass."""
        extra = nodes - self.nodes
        return self if extra <= 0 else DraftTree([[*row, *[0] * extra] for row in self.token_lists()], self.parents)

    def leftmost_chain(self) -> DraftTree:
        """The leftmost path of each row, from every node to its first child, as a chain."""
        paths = [_leftmost_path(parents) for parents in self.parents]
        if paths == [list(range(len(parents))) for parents in self.parents]:
            return self
        width = max(map(len, paths))
        q = self.q
        if q is not None:
            nodes = torch.tensor([path + [0] * (width - len(path)) for path in paths], device=q.device)
            q = q[torch.arange(self.batch, device=q.device)[:, None], nodes]
        tokens = [[row[node] for node in path] for row, path in zip(self.token_lists(), paths, strict=True)]
        probability = self.probability and tuple(
            tuple(row[node] for node in path) for row, path in zip(self.probability, paths, strict=True)
        )
        return DraftTree(tokens, tuple(chain_parents(len(path)) for path in paths), q, probability)

    @classmethod
    def empty(cls, batch: int) -> DraftTree:
        """No draft tokens: the step decodes one token per row, as plain `generate` does."""
        return cls([[]] * batch, ((),) * batch)

    @classmethod
    def chains(cls, rows: Sequence[Sequence[int]]) -> DraftTree:
        """A chain of draft tokens per row: a list of tokens per row; the lists may differ in length."""
        return cls(rows, tuple(chain_parents(len(row)) for row in rows))

    @classmethod
    def from_nodes(
        cls, rows: Sequence[tuple[Sequence[int], Parents]], probability: tuple[tuple[float, ...], ...] | None = None
    ) -> DraftTree:
        """From a pair (tokens, parents) per row; see above for `probability`."""
        return cls([tokens for tokens, _ in rows], tuple([parents for _, parents in rows]), probability=probability)

    @classmethod
    def from_paths(cls, rows: Sequence[Sequence[Sequence[int]]]) -> DraftTree:
        """From a list of token paths per row; paths that begin alike share their nodes."""
        return cls.from_nodes([merge_paths(paths) for paths in rows])


class TreeStructure(NamedTuple):
    """The structure of draft trees as tensors, with each row's last token as index 0 and node ``i`` as ``i + 1``."""

    depths: torch.Tensor  # [batch, 1 + nodes]
    ancestors: torch.Tensor  # [batch, 1 + nodes, 1 + nodes] bool: whether [b, i, j] ``j`` is ``i`` or its ancestor

    @classmethod
    def of_chains(cls, batch: int, nodes: int, device: torch.device | None = None) -> TreeStructure:
        """The structure of chains of equal length."""
        depths, ancestors = _chain_structure(1 + nodes, device)
        return cls(depths.expand(batch, -1), ancestors.expand(batch, -1, -1))

    @classmethod
    def of_captured_chains(cls, batch: int, nodes: int, device: torch.device) -> TreeStructure:
        """As `of_chains`, in a captured function, which must not read tensors that can be freed."""
        depths, ancestors = _chain_structure.__wrapped__(1 + nodes, device)
        return cls(depths.expand(batch, -1), ancestors.expand(batch, -1, -1))


@lru_cache(maxsize=16)
def _chain_structure(tokens: int, device: torch.device | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Depths `[tokens]` and ancestors `[tokens, tokens]` of a chain."""
    ancestors = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
    return torch.arange(tokens, device=device), ancestors


def ancestors_of(is_parent: torch.Tensor) -> torch.Tensor:
    """`[batch, 1 + nodes, 1 + nodes]` bool: whether [b, i, j] ``j`` is ``i`` or its ancestor.

    `is_parent` is of the same shape: whether ``j`` is the parent of ``i``; parents have lower indices. With this matrix
    P, that of ancestors is I + P + P² + … = (I - P)⁻¹.
    """
    unit = identity(is_parent.shape[2], torch.float32, is_parent.device)
    return torch.linalg.solve_triangular(unit.masked_fill(is_parent, -1), unit, upper=False, unitriangular=True).bool()


@cache  # captured functions read it
def identity(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An identity matrix, which must not be written to."""
    return torch.eye(size, dtype=dtype, device=device)


def _leftmost_path(parents: Parents) -> list[int]:
    """The first child of the row's last token, its first child, and so on."""
    path: list[int] = []
    for node, parent in enumerate(parents):
        if parent == (path[-1] if path else -1):
            path.append(node)
    return path


def _validate(parents: tuple[Parents, ...], counts: Sequence[int]) -> None:
    """Raise `ValueError` unless these are the parents of rows with `counts` tokens."""
    if len(parents) != len(counts):
        raise ValueError(f"a draft tree of {len(counts)} rows needs {len(counts)} lists of parents, got {len(parents)}")
    for row, (row_parents, count) in enumerate(zip(parents, counts, strict=True)):
        if len(row_parents) > count:
            raise ValueError(f"row {row} has {len(row_parents)} parents but only {count} tokens")
        validate_parents(row_parents)


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
        parent = -1
        for token in path:
            if (parent, token) not in node_of:
                node_of[parent, token] = len(tokens)
                tokens.append(token)
                parents.append(parent)
            parent = node_of[parent, token]
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
