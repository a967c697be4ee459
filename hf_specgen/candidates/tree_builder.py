"""Builds draft trees best-first: the nodes with the highest joint probability of being accepted, for every row at once.

A drafter gives for some nodes their most likely next tokens with confidences. A confidence becomes an acceptance
probability by calibration; the joint probability of a node is the product along its path. The expected number of tokens
of a step is one plus the sum of the joint probabilities of its nodes, so the best tree of a given size consists of the
nodes with the highest ones. They form a tree, since no node is more likely than its parent.

`frontier` selects the nodes that drafters with one forward pass per level (draft models, EAGLE heads) expand next.

Source: Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees" (2024), section 4; Chen et
al., "Sequoia" (2024), section 3, for the best tree of a given size.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_specgen.tree import Parents

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.integer[Any]]
MAX_JOINT = 0.999
"""Upper limit of an acceptance probability: keeps every node strictly less likely than its parent."""


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
        tokens, joint, parents, depth, rank: `[rows, nodes]` of every node that was added: its token, its joint
            probability of being accepted, its parent (-1 for the row's last token), its depth from 1 on, and its place
            among its parent's children.
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
        self.joint: Floats = np.zeros((rows, 0))
        self.parents: Ints = np.zeros((rows, 0), dtype=np.int64)
        self.depth: Ints = np.zeros((rows, 0), dtype=np.int64)
        self.rank: Ints = np.zeros((rows, 0), dtype=np.int64)
        self.expandable: NDArray[np.bool_] = np.zeros((rows, 0), dtype=bool)
        self._expanded: NDArray[np.bool_] = np.zeros((rows, 0), dtype=bool)

    @classmethod
    def from_marginals(cls, depths: Sequence[int], tokens: Ints, acceptance: Floats, count: int) -> TreeBuilder:
        """The best trees where tokens at a depth do not depend on the path: heads that draft all depths at once.

        Args:
            depths: `[rows]` maximum depths.
            tokens: `[rows, depth, ranks]` of each depth, most preferred first.
            acceptance: `[rows, depth, ranks]` probability of each, given that the path before it was accepted.
            count: nodes of a row at most.

        Example:
            >>> tokens = np.array([[[5, 6], [7, 8]]])
            >>> builder = TreeBuilder.from_marginals([2], tokens, np.array([[[0.6, 0.25], [0.5, 0.1]]]), count=4)
            >>> builder.tokens.tolist(), builder.parents.tolist()  # 5 (0.6), 5-7 (0.3), 6 (0.25), 6-7 (0.125)
            ([[5, 7, 6, 7]], [[-1, 0, -1, 2]])
        """
        builder = cls(depths)
        limited = np.minimum(acceptance, MAX_JOINT).tolist()
        rows = [_most_likely_paths(limited[row][:depth], count) for row, depth in enumerate(depths)]
        width = max(map(len, rows))
        shape = (len(rows), width)
        builder.tokens, builder.joint = np.zeros(shape, dtype=np.int64), np.zeros(shape)
        builder.parents, builder.depth = np.full(shape, -1), np.zeros(shape, dtype=np.int64)
        builder.rank = np.zeros(shape, dtype=np.int64)
        for row, nodes in enumerate(rows):
            for index, (joint, parent, depth, rank) in enumerate(nodes):
                builder.joint[row, index], builder.parents[row, index] = joint, parent
                builder.depth[row, index], builder.rank[row, index] = depth, rank
                builder.tokens[row, index] = tokens[row, depth - 1, rank]
        return builder

    def add_root(self, proposals: Proposals) -> None:
        """Add the children of each row's last token; `nodes` of the proposals is 1."""
        root = np.full((len(self.limits), 1), -1)
        self._add(root, np.ones(root.shape, dtype=bool), proposals)

    def add(self, nodes: Ints, proposals: Proposals, real: NDArray[np.bool_] | None = None) -> None:
        """Add the children of nodes.

        Args:
            nodes: `[rows, nodes]`, as `frontier` returned them.
            proposals: their children.
            real: `[rows, nodes]` the nodes that do not merely fill up a row; all if left out.
        """
        valid = np.take_along_axis(self.expandable, nodes, axis=1)
        if real is None:
            np.put_along_axis(self._expanded, nodes, True, axis=1)
        else:
            valid &= real
            self._expanded[np.nonzero(real)[0], nodes[real]] = True
        self.expandable[np.nonzero(valid)[0], nodes[valid]] = False
        self._add(nodes, valid, proposals)

    def _add(self, nodes: Ints, valid: NDArray[np.bool_], proposals: Proposals) -> None:
        rows, count, children = proposals.tokens.shape
        is_root = nodes < 0
        row = np.arange(rows)[:, None]
        above = np.where(is_root, 1.0, self.joint[row, nodes] if self.joint.shape[1] else 1.0)
        depth = np.where(is_root, 0, self.depth[row, nodes] if self.depth.shape[1] else 0) + 1
        joint = above[..., None] * np.minimum(proposals.acceptance, MAX_JOINT)
        joint = np.where((valid & (depth <= self.limits[:, None]))[..., None], joint, 0.0)
        expandable = (joint > 0) & (depth < self.limits[:, None])[..., None]
        if proposals.expandable is not None:
            expandable &= proposals.expandable
        shape = (rows, count * children)
        self.tokens = np.concatenate([self.tokens, proposals.tokens.reshape(shape)], axis=1)
        self.joint = np.concatenate([self.joint, joint.reshape(shape)], axis=1)
        self.parents = np.concatenate([self.parents, np.repeat(nodes, children, axis=1)], axis=1)
        self.depth = np.concatenate([self.depth, np.repeat(depth, children, axis=1)], axis=1)
        rank = np.broadcast_to(np.arange(children), proposals.tokens.shape).reshape(shape)
        self.rank = np.concatenate([self.rank, rank], axis=1)
        self.expandable = np.concatenate([self.expandable, expandable.reshape(shape)], axis=1)
        self._expanded = np.concatenate([self._expanded, np.zeros(shape, dtype=bool)], axis=1)

    def path(self, row: int, node: int) -> list[int]:
        """The tokens from the row's first draft token to a node."""
        tokens = []
        while node >= 0:
            tokens.append(int(self.tokens[row, node]))
            node = int(self.parents[row, node])
        return tokens[::-1]

    def frontier(self, width: int) -> Ints:
        """`[rows, at most width]` the most likely nodes that can be expanded and have not been.

        A row with fewer of them is filled up with nodes that cannot be expanded (their children have probability 0):
        leaves first, so that the nodes of a chain come first and in their order.
        """
        leaves = (self.joint > 0) & ~self._expanded
        scores = np.where(self.expandable, self.joint, np.where(leaves, self.joint - 1.0, -1.0))
        width = min(width, int(self.expandable.sum(axis=1).max(initial=0)))
        return np.argsort(-scores, axis=1, kind="stable")[:, :width]

    def frontier_joint(self, width: int) -> Floats:
        """`[rows, width]` joint probabilities of `frontier(width)`, 0 where a row has fewer."""
        scores = np.where(self.expandable, self.joint, 0.0)
        return -np.sort(-scores, axis=1)[:, :width]

    def sorted_joint(self, count: int) -> Floats:
        """`[rows, at most count]` the highest joint probabilities in descending order."""
        return -np.sort(-self.joint, axis=1)[:, :count]

    def best(self, count: int, first: Ints | None = None) -> tuple[list[tuple[list[int], Parents]], list[list[int]]]:
        """The best tree of at most `count` nodes for each row.

        Args:
            count: maximum number of nodes of a row.
            first: `[rows, nodes]` nodes that come first, in this order, whatever their probability; they count too.

        Returns:
            tokens and parents of each row, in the order of `DraftTree` (parents first), and for each node its index
            among all nodes that were added.
        """
        order = np.argsort(-self.joint, axis=1, kind="stable")[:, :count]
        trees, indices = [], []
        for row, nodes in enumerate(order.tolist()):
            kept = [] if first is None else first[row].tolist()
            known = set(kept)
            kept += [node for node in nodes if self.joint[row, node] > 0 and node not in known][: count - len(kept)]
            place: dict[int, int] = {-1: -1}
            for index, node in enumerate(kept):
                place.setdefault(node, index)
            parents = tuple(place.get(parent, -1) for parent in self.parents[row, kept].tolist())
            trees.append((self.tokens[row, kept].tolist(), parents))
            indices.append(kept)
        return trees, indices


def _most_likely_paths(acceptance: Sequence[Sequence[float]], count: int) -> list[tuple[float, int, int, int]]:
    """(joint probability, parent, depth, rank) of the most likely nodes, in descending order.

    The next best node is a first child of a known node or the next sibling of one, so a heap of those is enough.
    """
    nodes: list[tuple[float, int, int, int]] = []
    heap = [(-acceptance[0][0], -1, 1, 0)] if acceptance else []
    while heap and len(nodes) < count:
        negative, parent, depth, rank = heapq.heappop(heap)
        if negative >= 0:
            break
        index = len(nodes)
        nodes.append((-negative, parent, depth, rank))
        if rank + 1 < len(acceptance[depth - 1]):
            above = nodes[parent][0] if parent >= 0 else 1.0
            heapq.heappush(heap, (-above * acceptance[depth - 1][rank + 1], parent, depth, rank + 1))
        if depth < len(acceptance):
            heapq.heappush(heap, (negative * acceptance[depth][0], index, depth + 1, 0))
    return nodes
