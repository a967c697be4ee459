"""Draft trees as arrays, for drafters with one forward pass per level, and how large all kinds of draft trees become.

A drafter gives for some nodes likely next tokens with acceptance probabilities. The path probability of a node is their
product along its path. The expected number of tokens of a step is one plus the sum of the path probabilities of its
nodes, so the best tree of a given size consists of the nodes with the highest ones. They form a tree, since no node is
more likely than its parent.

Source: Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees" (2024), section 4; Chen et
al., "Sequoia" (2024), section 3, for the best tree of a given size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, zip_longest
from math import isqrt
from typing import Any, Generic

import numpy as np
from numpy.typing import NDArray

from hf_specgen.candidates.base import DraftCall, DraftSession, Tree
from hf_specgen.candidates.best_first import SearchLimits, SearchTree, Tag, best_first
from hf_specgen.depth.latency import CostCurve, DraftLatency, StepLatency
from hf_specgen.tree import DraftTree, Parents

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.integer[Any]]
MAX_PROBABILITY = 0.999
"""Upper limit of an acceptance probability: keeps every node strictly less likely than its parent."""
MAX_NODES = 64
"""Maximum number of nodes of a row: beyond, each further one adds to the latency even of a memory-bound target."""
MAX_CHILDREN = 8
"""Maximum number of children of a node, and of nodes of a row that are expanded in one pass."""
MIN_GAIN = 0.001
"""Relative gain in expected tokens per second below which no pass of the drafter is made, even if it costs nothing."""


@dataclass(frozen=True)
class Proposals:
    """What a drafter proposes below some nodes, most preferred first.

    Args:
        tokens: `[rows, nodes, children]`.
        acceptance: `[rows, nodes, children]` probability that the target chooses the token, given that it reached the
            node.
        expandable: `[rows, nodes, children]` whether a child may be expanded further.
    """

    tokens: Ints
    acceptance: Floats
    expandable: NDArray[np.bool_] | None = None


class TreeBuilder:
    """The draft trees of one step.

    Args:
        depths: `[rows]` maximum depth of each row's tree; 0 for a row without a draft.

    Attributes:
        tokens, probability, parents, depth, rank: `[rows, nodes]` of every node that was added: its token, its path
            probability, its parent (-1 for the row's last token), its depth from 1 on, and its place among its
            parent's children.
        expandable: `[rows, nodes]` whether children of a node can be added.

    Example:
        >>> builder = TreeBuilder([2])
        >>> builder.add_root(Proposals(np.array([[[5, 6]]]), np.array([[[0.6, 0.3]]])))
        >>> builder.frontier(1).tolist()  # the most likely node is expanded first
        [[0]]
        >>> builder.add(builder.frontier(1), Proposals(np.array([[[7, 8]]]), np.array([[[0.9, 0.1]]])))
        >>> builder.best(3)  # of 4 nodes: 5, then 7 below it (0.54), then 6 (0.3)
        ([([5, 7, 6], (-1, 0, -1))], [[0, 2, 1]])
    """

    def __init__(self, depths: Sequence[int]):
        self.limits = np.asarray(depths)
        rows = len(depths)
        self.tokens: Ints = np.zeros((rows, 0), dtype=np.int64)
        self.probability: Floats = np.zeros((rows, 0))
        self.parents: Ints = np.zeros((rows, 0), dtype=np.int64)
        self.depth: Ints = np.zeros((rows, 0), dtype=np.int64)
        self.rank: Ints = np.zeros((rows, 0), dtype=np.int64)
        self.expandable: NDArray[np.bool_] = np.zeros((rows, 0), dtype=bool)
        self._expanded: NDArray[np.bool_] = np.zeros((rows, 0), dtype=bool)

    @classmethod
    def of_parallel_heads(cls, depths: Sequence[int], tokens: Ints, acceptance: Floats, nodes: int) -> TreeBuilder:
        """The best trees where tokens at a depth do not depend on the path: heads that draft all depths at once.

        Args:
            depths: `[rows]` maximum depths.
            tokens: `[rows, depth, ranks]` of each depth, most preferred first.
            acceptance: `[rows, depth, ranks]` probability of each, given that the path before it was accepted.
        """
        builder = cls(depths)
        trees = []
        for row, limit in enumerate(depths):
            ranked = [
                [(token, value, (level + 1, rank)) for rank, (token, value) in enumerate(zip(*pair, strict=True))]
                for level, pair in enumerate(zip(tokens[row].tolist(), acceptance[row].tolist(), strict=True))
            ]

            def children(tag: tuple[int, int], depth: int, ranked: Any = ranked) -> list[tuple[int, float, Any]]:
                return ranked[depth]

            trees.append(best_first((0, 0), children, limit, SearchLimits(nodes)))
        shape = len(trees), max(len(tree.tokens) for tree in trees)
        builder.tokens, builder.probability = np.zeros(shape, dtype=np.int64), np.zeros(shape)
        builder.parents, builder.depth = np.full(shape, -1), np.zeros(shape, dtype=np.int64)
        builder.rank = np.zeros(shape, dtype=np.int64)
        for row, tree in enumerate(trees):
            size = slice(len(tree.tokens))
            builder.tokens[row, size], builder.parents[row, size] = tree.tokens, tree.parents
            builder.probability[row, size] = tree.probability
            builder.depth[row, size], builder.rank[row, size] = np.array(tree.tags).reshape(-1, 2).T
        return builder

    def add_root(self, proposals: Proposals) -> None:
        """Add the children of each row's last token; `nodes` of the proposals is 1."""
        root = np.full((len(self.limits), 1), -1)
        self._add(root, np.ones(root.shape, dtype=bool), proposals)

    def add(self, nodes: Ints, proposals: Proposals) -> None:
        """Add the children of nodes, `[rows, nodes]` as `frontier` returned them."""
        valid = np.take_along_axis(self.expandable, nodes, axis=1)
        np.put_along_axis(self._expanded, nodes, True, axis=1)
        self.expandable[np.nonzero(valid)[0], nodes[valid]] = False
        self._add(nodes, valid, proposals)

    def _add(self, nodes: Ints, valid: NDArray[np.bool_], proposals: Proposals) -> None:
        rows, width, children = proposals.tokens.shape
        is_root = nodes < 0
        row = np.arange(rows)[:, None]
        above = np.where(is_root, 1.0, self.probability[row, nodes] if self.probability.shape[1] else 1.0)
        depth = np.where(is_root, 0, self.depth[row, nodes] if self.depth.shape[1] else 0) + 1
        probability = above[..., None] * np.minimum(proposals.acceptance, MAX_PROBABILITY)
        probability = np.where((valid & (depth <= self.limits[:, None]))[..., None], probability, 0.0)
        expandable = (probability > 0) & (depth < self.limits[:, None])[..., None]
        if proposals.expandable is not None:
            expandable &= proposals.expandable
        shape = (rows, width * children)
        self.tokens = np.concatenate([self.tokens, proposals.tokens.reshape(shape)], axis=1)
        self.probability = np.concatenate([self.probability, probability.reshape(shape)], axis=1)
        self.parents = np.concatenate([self.parents, np.repeat(nodes, children, axis=1)], axis=1)
        self.depth = np.concatenate([self.depth, np.repeat(depth, children, axis=1)], axis=1)
        rank = np.broadcast_to(np.arange(children), proposals.tokens.shape).reshape(shape)
        self.rank = np.concatenate([self.rank, rank], axis=1)
        self.expandable = np.concatenate([self.expandable, expandable.reshape(shape)], axis=1)
        self._expanded = np.concatenate([self._expanded, np.zeros(shape, dtype=bool)], axis=1)

    def frontier(self, width: int) -> Ints:
        """`[rows, at most width]` the most likely nodes that can be expanded and have not been.

        A row with fewer of them is filled up with nodes that cannot be expanded (their children have probability 0):
        leaves first, so that the nodes of a chain come first and in their order.
        """
        leaves = (self.probability > 0) & ~self._expanded
        scores = np.where(self.expandable, self.probability, np.where(leaves, self.probability - 1.0, -1.0))
        width = min(width, int(self.expandable.sum(axis=1).max(initial=0)))
        return np.argsort(-scores, axis=1, kind="stable")[:, :width]

    def frontier_probability(self, width: int) -> Floats:
        """`[rows, width]` path probabilities of `frontier(width)`, 0 where a row has fewer."""
        scores = np.where(self.expandable, self.probability, 0.0)
        return -np.sort(-scores, axis=1)[:, :width]

    def sorted_probability(self, nodes: int) -> Floats:
        """`[rows, at most nodes]` the highest path probabilities in descending order."""
        return -np.sort(-self.probability, axis=1)[:, :nodes]

    def best(self, nodes: int, first: Ints | None = None) -> tuple[list[tuple[list[int], Parents]], list[list[int]]]:
        """The best tree of at most `nodes` nodes for each row.

        Args:
            first: `[rows, n]` nodes that come first, in this order, whatever their probability; they count too.
        """
        order = np.argsort(-self.probability, axis=1, kind="stable")[:, :nodes]
        trees, indices = [], []
        for row, candidates in enumerate(order.tolist()):
            kept = [] if first is None else first[row].tolist()
            fixed = set(kept)
            further = [node for node in candidates if self.probability[row, node] > 0 and node not in fixed]
            kept += further[: nodes - len(kept)]
            new_index: dict[int, int] = {-1: -1}
            for index, node in enumerate(kept):
                new_index.setdefault(node, index)
            parents = tuple(new_index.get(parent, -1) for parent in self.parents[row, kept].tolist())
            trees.append((self.tokens[row, kept].tolist(), parents))
            indices.append(kept)
        return trees, indices

    def may_improve(self, nodes: int) -> bool:
        """Whether expanding the frontier may change the best tree of a row of `nodes` nodes.

        A child of a node that is not among the best `nodes` nodes cannot be among them either.
        """
        best = self.sorted_probability(nodes)
        return best.shape[1] < nodes or bool((self.frontier_probability(1)[:, 0] > best[:, -1]).any())


class TreeSize:
    """How large the trees of a step become: chains, a number of nodes, or the most expected tokens per second.

    Args:
        nodes: of each row at most; None for `MAX_NODES`.
        children: of a node at most; 1 for chains.
        latency: of the step; with it trees leave out all passes of the drafter and all nodes that cost more than they
            gain. None for trees of `nodes` nodes, expanded about the square root of that many at a time.
        rows: how many rows draft.
        min_probability: path probability below which a node is left out.
    """

    def __init__(
        self,
        nodes: int | None,
        children: int = MAX_CHILDREN,
        latency: StepLatency | None = None,
        rows: int = 1,
        min_probability: float = 0.0,
    ):
        self.max_nodes, self.children, self._rows = nodes or MAX_NODES, children, rows
        self.min_probability, self.latency, self.is_fastest = min_probability, latency, latency is not None
        if latency is None:
            return
        self._target, least = _target_seconds(latency.target, rows, self.max_nodes)
        self.min_probability = max(min_probability, least)
        self._pass, self._spent = _drafter_seconds(latency.drafter, rows, MAX_CHILDREN if children > 1 else 1)
        self._seen = self._expanded = 0
        self._child = 0.6  # P(one of a node's children is accepted | the node is), before a node was expanded

    def width(self, builder: TreeBuilder) -> int:
        """How many nodes of each row to expand in the next pass of the drafter; 0 to stop."""
        if not self.is_fastest:
            width = isqrt(self.max_nodes) if self.children > 1 else 1
            return width if self.children == 1 or builder.may_improve(self.max_nodes) else 0
        self._measure_children(builder)
        probability = builder.sorted_probability(self.max_nodes).sum(axis=0)
        tokens = self._rows + np.concatenate([[0.0], np.cumsum(probability)])
        rates = tokens / (self._target[: len(tokens)] + self._spent)
        best = int(np.argmax(rates))
        frontier = builder.frontier_probability(max(0, min(len(self._pass), self.max_nodes - self._expanded)))
        reached = frontier.sum(axis=0)
        reached = reached[reached > 0]  # expected rows that reach the j-th node to expand
        if not len(reached) or not builder.may_improve(self.max_nodes):
            return 0
        # A first draft token may cost far more than each further one, so several levels are considered at once.
        levels = np.arange(1, max(2, int(builder.limits.max() - builder.depth.max()) + 1))[:, None]
        gain = np.cumsum(self._child**levels, axis=0) * np.cumsum(reached)
        nodes = np.minimum(best + levels * np.arange(1, len(reached) + 1), self.max_nodes)
        seconds = self._target[nodes] + self._spent + levels * self._pass[: len(reached)]
        expected_rates = ((tokens[best] + gain) / seconds).max(axis=0)  # by width
        width = int(np.argmax(expected_rates)) + 1
        if expected_rates[width - 1] <= rates[best] * (1 + MIN_GAIN):
            return 0
        self._spent += float(self._pass[width - 1])
        self._expanded += width
        return width

    def nodes(self, builder: TreeBuilder) -> int:
        """How many nodes of each row are verified."""
        if self.is_fastest:
            return self.best_size(builder.sorted_probability(self.max_nodes).tolist(), self._spent)
        return self.max_nodes if self.children > 1 else max(1, int(builder.limits.max(initial=1)))

    def best_size(self, probability: Sequence[Sequence[float]], drafting: float = 0.0) -> int:
        """How many nodes of complete trees are verified."""
        if not self.is_fastest:
            return self.max_nodes
        gains = probability[0] if len(probability) == 1 else map(sum, zip_longest(*probability, fillvalue=0.0))
        tokens = accumulate(gains, initial=float(self._rows))
        rates = [count / (seconds + drafting) for count, seconds in zip(tokens, self._target.tolist(), strict=False)]
        return rates.index(max(rates))

    def _measure_children(self, builder: TreeBuilder) -> None:
        """Estimate `_child` from the nodes expanded last."""
        new = slice(self._seen, builder.probability.shape[1])
        parents = builder.parents[:, new]
        row = np.arange(len(parents))[:, None]
        above = np.where(parents < 0, 1.0, builder.probability[row, parents])
        live = builder.probability[:, new] > 0
        if live.any():
            reached = (above * live).sum() / self.children
            self._child = min(1.0, float(builder.probability[:, new].sum() / max(reached, 1e-9)))
        self._seen = builder.probability.shape[1]


@lru_cache(maxsize=64)
def _target_seconds(target: CostCurve, rows: int, nodes: int) -> tuple[Floats, float]:
    """Seconds of the target's pass by the nodes of each row, from 0 on; and the least useful path probability.

    Each node adds its path probability to the tokens of a step, of which there is at least one for each row.
    """
    seconds = np.array([target.seconds_of(rows * (1 + count)) for count in range(nodes + 1)])
    return seconds, max(MIN_GAIN, float((np.diff(seconds) / seconds[1:]).min()))


@lru_cache(maxsize=64)
def _drafter_seconds(drafter: DraftLatency, rows: int, widths: int) -> tuple[Floats, float]:
    """Seconds of the drafter's pass by the nodes of each row, from 1 on; and of the pass over its last token."""
    passes = np.maximum.accumulate([drafter.seconds_of(rows * (1 + width)) for width in range(widths)])
    return passes, drafter.draft([rows])


def tree_size(
    size: str | int | None,
    call: DraftCall,
    depths: Sequence[int],
    children: int = MAX_CHILDREN,
    is_prefill: bool = False,
) -> TreeSize:
    """How large the next trees of a call become.

    Args:
        depths: `[rows]` maximum depths.
    """
    if isinstance(size, int):
        return TreeSize(size, children)
    latency = None if call.depth is None else call.depth.latency
    if size is None or latency is None:
        return TreeSize(None, children=1)
    rows = max(1, sum(depth > 0 for depth in depths))
    return TreeSize(None, children, latency.at(rows, call.context_length), rows, 0.3 if is_prefill else 0.0)


def draft_rows(
    call: DraftCall,
    size: Tree,
    depths: Sequence[int],
    search: Callable[[int, SearchLimits], SearchTree[Tag]],
    is_prefill: bool = False,
) -> tuple[DraftTree, list[SearchTree[Tag]]]:
    """Search a tree for every row and cut it to the size to verify."""
    if not any(depths):
        return DraftTree.empty(len(depths)), [SearchTree() for _ in depths]
    limit = tree_size(size, call, depths, is_prefill=is_prefill)
    is_chain = is_prefill or size is None
    if limit.is_fastest or isinstance(size, int):
        limits = SearchLimits(limit.max_nodes, limit.min_probability, is_chain)
    else:  # without a latency model, "auto" drafts what is not improbable
        limits = SearchLimits(max(depths), 0.0 if size is None else 0.05, is_chain)
    trees = [search(row, limits) for row in range(len(depths))]
    nodes = limit.best_size([tree.probability for tree in trees]) if limit.is_fastest else limits.nodes
    return draft_of(trees, nodes), trees


class SearchSession(DraftSession, Generic[Tag]):
    """Base class of sessions that search the tree of each row, without a forward pass."""

    passes = ()

    def __init__(self, call: DraftCall, k: int, size: Tree):
        super().__init__(call)
        self._k, self._size = k, size
        self._trees: list[SearchTree[Tag]] = []

    @abstractmethod
    def search(self, row: int, depth: int, limits: SearchLimits) -> SearchTree[Tag]:
        """The most probable tree of a row."""

    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        return self._draft(max_depths, is_prefill=False)

    def draft_at_prefill(self, max_depths: Sequence[int]) -> DraftTree:
        return self._draft(max_depths, is_prefill=True)

    def _draft(self, max_depths: Sequence[int], is_prefill: bool) -> DraftTree:
        depths = [min(self._k, depth) for depth in max_depths]

        def search(row: int, limits: SearchLimits) -> SearchTree[Tag]:
            return self.search(row, depths[row], limits) if depths[row] else SearchTree()

        draft, self._trees = draft_rows(self.call, self._size, depths, search, is_prefill)
        return draft


def draft_of(trees: Sequence[SearchTree[Any]], nodes: int) -> DraftTree:
    """The first `nodes` nodes of each row's tree as a draft."""
    probability = tuple(tuple(tree.probability[:nodes]) for tree in trees)
    return DraftTree.from_nodes([(tree.tokens[:nodes], tuple(tree.parents[:nodes])) for tree in trees], probability)
