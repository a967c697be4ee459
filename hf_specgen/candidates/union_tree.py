"""The most probable tree of the proposals of several strategies: every node with the evidence of all of them.

What strategies say about the same token is combined as if they were independent, and the result is calibrated: how
often tokens were accepted is counted by which strategy proposed them and by the combined probability. Strategies that
know the likely successors of any token extend the tree below every node, also below those of other strategies.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from hf_specgen.candidates.tree_builder import MAX_JOINT
from hf_specgen.depth.calibration import EDGES, RANKS
from hf_specgen.tree import DraftTree, Parents

UNKNOWN_ACCEPTANCE = 0.6
"""Assumed of a child, given its parent, where a strategy estimates nothing; calibration corrects it."""
SEVERAL = RANKS - 1
"""The class of tokens that several strategies proposed; those of one strategy have its number, up to this one."""

Successors = Callable[[int], Sequence[tuple[int, float]]]
_Edges = dict[int, list[tuple[int, int, float]]]
"""By parent: token, node and conditional probability of its children."""


class UnionTree:
    """Nodes in descending order of their joint probability; parents come first.

    Attributes:
        tokens, parents, joint: of each node.
        classes, bins: by which strategy each was proposed, and the confidence bin of its combined probability.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.joint: list[float] = []
        self.classes: list[int] = []
        self.bins: list[int] = []

    def first(self, count: int) -> tuple[list[int], Parents]:
        """Tokens and parents of the first `count` nodes."""
        return self.tokens[:count], tuple(self.parents[:count])


def unite(
    drafts: Sequence[DraftTree],
    row: int,
    acceptance: NDArray[Any],
    *,
    last_token: int,
    depth: int,
    nodes: int,
    min_joint: float = 0.0,
    successors: Sequence[tuple[int, Successors]] = (),
    only_chain: bool = False,
) -> UnionTree:
    """Grow the most probable tree of one row.

    Args:
        drafts: of each strategy.
        row: of the batch.
        acceptance: `[RANKS, bins]` as `Calibration.by_bin` returns it, by class and combined probability.
        last_token: of the row.
        depth: maximum depth.
        nodes: maximum number of nodes.
        min_joint: joint probability below which a node is left out.
        successors: strategies by their number, with a function that gives likely successors of a token.
        only_chain: whether only the most likely child of a node is kept.

    Example:
        >>> import numpy as np
        >>> a = DraftTree.from_nodes([([5, 6], (-1, 0))], joint=((0.6, 0.5),))
        >>> b = DraftTree.from_nodes([([5, 7], (-1, -1))], joint=((0.6, 0.2),))
        >>> as_it_is = np.tile(np.linspace(0.02, 0.98, 13), (4, 1))
        >>> unite([a, b], 0, as_it_is, last_token=1, depth=9, nodes=9).first(9)
        ([5, 6, 7], (-1, 0, -1))
    """
    sources = [_edges(draft, row) for draft in drafts]
    estimates, edges = acceptance.tolist(), EDGES.tolist()
    tree = UnionTree()
    heap: list[tuple[float, int, int, int, int, int, int, tuple[int | None, ...]]] = []
    pushed = 0
    node, token, joint, level = -1, last_token, 1.0, 0
    places: tuple[int | None, ...] = (-1,) * len(sources)
    while True:
        if level < depth:
            votes = _votes(sources, places, token, successors, min_joint / joint)
            children = []
            for child, (missed, kind, below) in votes.items():
                place = bisect_left(edges, 1 - missed)
                children.append((min(MAX_JOINT, estimates[kind][place]), kind, place, child, below))
            if only_chain:
                children = [max(children, key=lambda one: one[0])] if children else []
            total = max(1.0, sum(child[0] for child in children))
            for probability, kind, place, child, below in children:
                value = joint * probability / total
                if value > min_joint:
                    pushed += 1
                    entry = (-value, pushed, node, level + 1, child, kind, place)
                    heapq.heappush(heap, (*entry, tuple(below.get(source) for source in range(len(sources)))))
        if not heap or len(tree.tokens) == nodes:
            return tree
        negative, _, parent, level, token, kind, place, places = heapq.heappop(heap)
        node, joint = len(tree.tokens), -negative
        tree.tokens.append(token)
        tree.parents.append(parent)
        tree.joint.append(joint)
        tree.classes.append(kind)
        tree.bins.append(place)


_Vote = tuple[float, int, dict[int, int]]
"""Probability that no strategy is right, class, and the node of each strategy that drafted the token."""


def _votes(
    sources: Sequence[_Edges],
    places: Sequence[int | None],
    token: int,
    successors: Sequence[tuple[int, Successors]],
    least: float,
) -> dict[int, _Vote]:
    """What the strategies propose after a node, by token."""
    votes: dict[int, _Vote] = {}
    for source, (edges, place) in enumerate(zip(sources, places, strict=True)):
        for child, node, probability in edges.get(place, ()) if place is not None else ():
            votes[child] = _added(votes.get(child), source, probability, {source: node})
    for source, find in successors:
        for child, probability in find(token):
            if child in votes or probability > least:
                votes[child] = _added(votes.get(child), source, probability, {})
    return votes


def _added(vote: _Vote | None, source: int, probability: float, place: dict[int, int]) -> _Vote:
    if vote is None:
        return 1 - probability, min(source, SEVERAL - 1), place
    return vote[0] * (1 - probability), SEVERAL, {**vote[2], **place}


def _edges(draft: DraftTree, row: int) -> _Edges:
    tokens, parents = draft.tokens[row].tolist(), draft.parents[row]
    joint = None if draft.joint is None else draft.joint[row]
    edges: _Edges = {}
    for node, parent in enumerate(parents):
        if joint is None:
            probability = UNKNOWN_ACCEPTANCE
        else:
            above = joint[parent] if parent >= 0 else 1.0
            probability = min(MAX_JOINT, joint[node] / above) if above > 0 else 0.0
        edges.setdefault(parent, []).append((tokens[node], node, probability))
    return edges
