"""Grows the most probable tree from the proposals of several strategies; each node is rated by all of them.

The estimates of strategies for the same token are combined as if they were independent; where a network has estimated
a node's children, its estimate counts alone, as it has read the text that the others copy from, and what it does not
propose counts less. The result is calibrated: how often tokens were accepted is counted by which strategy proposed them
and by the combined probability. Only the network's own estimates count as they are: it calibrates them itself, by rank.
Strategies that know the likely successors of any token extend the tree below nodes that no network has judged.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from typing import Any

from numpy.typing import NDArray

from hf_specgen.candidates.tree_builder import MAX_JOINT
from hf_specgen.candidates.tree_edges import Edges, edges
from hf_specgen.depth.calibration import BIN_CENTERS, EDGES, RANKS
from hf_specgen.tree import DraftTree, Parents

UNPROPOSED_SHARE = 0.15
"""Share of a token's estimated acceptance that is left if a network that attends to the text does not propose it after
the same path: such tokens of n-grams were accepted 0.03 times as often as estimated beside the embedded draft model,
0.18 times beside its EAGLE-3 head, and 0.69 times beside Medusa heads, which do not attend to the text."""
CENTERS: list[float] = BIN_CENTERS.tolist()
BOUNDS: list[float] = EDGES.tolist()
SEVERAL = RANKS - 1
"""The class of tokens that several strategies proposed; tokens of a single strategy have its index, if below this, as
their class."""

Row = tuple[Sequence[int], Sequence[float]]
"""Likely successors of a token and their probabilities, most likely first."""
_Places = tuple[int | None, ...]
"""The node of each strategy's draft that a node of the tree stands for."""
_Siblings = tuple[Row, int, float, Collection[int]]
"""Successors of a node: these, the rank of the next one, the node's joint probability, tokens that others proposed."""


class UnionTree:
    """Nodes in descending order of their joint probability; parents come first.

    Attributes:
        tokens, parents, joint: of each node.
        classes, bins: by which strategy each was proposed, and the confidence bin of its combined probability.
        weights: the combined probability, relative to the centre of its bin.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.joint: list[float] = []
        self.classes: list[int] = []
        self.bins: list[int] = []
        self.weights: list[float] = []

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
    successors: tuple[int, Callable[[int], Row]] | None = None,
    only_chain: bool = False,
    network: int | None = None,
    attends_to_text: bool = False,
) -> UnionTree:
    """Grow the most probable tree of one row.

    Args:
        drafts: of each strategy.
        row: of the batch.
        acceptance: `[RANKS, bins]` as `Calibration.by_bin` returns it, by class and combined probability: that at the
            centres of the bins.
        last_token: of the row.
        depth: maximum depth.
        nodes: maximum number of nodes.
        min_joint: joint probability below which a node is left out.
        successors: the number of a strategy, and its function that gives likely successors of a token.
        only_chain: whether only the most likely child of a node is kept.
        network: the number of the strategy that runs a network, if there is one.
        attends_to_text: whether this network attends to the whole text.

    Example:
        >>> import numpy as np
        >>> a = DraftTree.from_nodes([([5, 6], (-1, 0))], joint=((0.6, 0.5),))
        >>> b = DraftTree.from_nodes([([5, 7], (-1, -1))], joint=((0.6, 0.2),))
        >>> as_it_is = np.tile(np.linspace(0.02, 0.98, 13), (4, 1))
        >>> unite([a, b], 0, as_it_is, last_token=1, depth=9, nodes=9).first(9)
        ([5, 6, 7], (-1, 0, -1))
    """
    sources = [edges(draft, row) for draft in drafts]
    unproposed = UNPROPOSED_SHARE if attends_to_text else 1.0
    estimating = network if network is not None and drafts[network].joint is not None else None
    union = _Union(sources, acceptance.tolist(), min_joint, successors, only_chain, network, estimating, unproposed)
    union.run(last_token, depth, nodes)
    return union.tree


class _Union:
    """A tree under construction, and a heap of the nodes that may be added next: see `unite`.

    Args:
        sources: the edges of each strategy's draft.
        acceptance, min_joint, successors, only_chain, network: see `unite`.
        estimating: the network, if its draft has probabilities.
        unproposed: factor of the probability of tokens that the network did not propose.
    """

    def __init__(
        self,
        sources: Sequence[Edges],
        acceptance: list[list[float]],
        min_joint: float,
        successors: tuple[int, Callable[[int], Row]] | None,
        only_chain: bool,
        network: int | None,
        estimating: int | None,
        unproposed: float,
    ):
        self.tree = UnionTree()
        self._sources, self._acceptance, self._min_joint = sources, acceptance, min_joint
        source, self._find = (0, _no_successors) if successors is None else successors
        self._kind = min(source, SEVERAL - 1)
        self._estimates: dict[float, tuple[float, int, float]] = {}
        self._only_chain, self._unproposed = only_chain, unproposed
        self._network, self._estimating = network, estimating
        self._order = sorted(range(len(sources)), key=lambda source: source == network)
        # Joint probability (negative, so that the highest comes first), age, parent, depth, token, class, bin, weight,
        # the drafts' nodes, and for successors of a token their siblings.
        self._heap: list[tuple[float, int, int, int, int, int, int, float, _Places, _Siblings | None]] = []
        self._age = 0

    def run(self, last_token: int, depth: int, nodes: int) -> None:
        """Add the most probable nodes, as many as the limits allow."""
        tree, heap = self.tree, self._heap
        if depth > 0:
            self._expand(-1, 0, last_token, 1.0, (-1,) * len(self._sources))
        while heap and len(tree.tokens) < nodes:
            negative, _, parent, level, token, kind, place, weight, places, siblings = heapq.heappop(heap)
            node = len(tree.tokens)
            tree.tokens.append(token)
            tree.parents.append(parent)
            tree.joint.append(-negative)
            tree.classes.append(kind)
            tree.bins.append(place)
            tree.weights.append(weight)
            if siblings is not None and not self._only_chain:
                self._push_successor(parent, level, siblings)
            if level < depth:
                self._expand(node, level, token, -negative, places)

    def _expand(self, node: int, level: int, token: int, joint: float, places: _Places) -> None:
        """Push the children of a node that drafts propose, and the most likely successor of its token."""
        judged = self._network is not None and bool(places) and places[self._network] in self._sources[self._network]
        row: Row = ((), ()) if judged else self._find(token)
        children = self._votes(places, row, judged) if places else []
        if len(children) > 1:
            children.sort(reverse=True)
        if self._only_chain and children:
            children, row = children[:1], ((), ())
        share = _share([child[0] for child in children])
        for probability, child, kind, place, weight, below in children:
            value = joint * share(probability)
            if value > self._min_joint:
                self._age += 1  # breaks ties
                entry = (-value, self._age, node, level + 1, child, kind, place, weight, below, None)
                heapq.heappush(self._heap, entry)
        self._push_successor(node, level + 1, (row, 0, joint, [child[1] for child in children]))

    def _votes(self, places: _Places, row: Row, judged: bool) -> list[tuple[float, int, int, int, float, _Places]]:
        """What the drafts propose after a node: probability, token, class, bin, weight, places.

        Args:
            places: the node in each draft.
            row: likely successors of its token.
            judged: whether the network, which comes last in the order, has estimated the children of this node.
        """
        votes: dict[int, tuple[float, int, dict[int, int]]] = {}
        for source in self._order:
            above = places[source]
            for child, node, probability in self._sources[source].get(above, ()) if above is not None else ():
                missed, kind, known = votes.get(child, (1.0, min(source, SEVERAL - 1), {}))
                missed = 1 - probability if judged and source == self._network else missed * (1 - probability)
                votes[child] = missed, SEVERAL if known else kind, {**known, source: node}
        children: list[tuple[float, int, int, int, float, _Places]] = []
        for child, (missed, kind, known) in votes.items():
            if judged and self._network not in known:
                missed = 1 - self._unproposed * (1 - missed)
            if child in row[0]:
                missed, kind = missed * (1 - row[1][row[0].index(child)]), SEVERAL
            below = tuple([known.get(source) for source in range(len(self._sources))])
            value, place, weight = self._calibrated(kind, 1 - missed)
            if kind != SEVERAL and self._estimating in known:
                value = 1 - missed
            children.append((value, child, kind, place, weight, below))
        return children

    def _push_successor(self, parent: int, level: int, siblings: _Siblings) -> None:
        """Push the most likely successor that no draft proposed; the next one is pushed when it is added."""
        row, rank, joint, proposed = siblings
        tokens, probabilities = row
        while rank < len(tokens) and tokens[rank] in proposed:
            rank += 1
        if rank == len(tokens):
            return
        estimate = self._estimates.get(probabilities[rank])
        if estimate is None:
            estimate = self._estimates[probabilities[rank]] = self._calibrated(self._kind, probabilities[rank])
        value = joint * estimate[0]
        if value > self._min_joint:
            self._age += 1
            later = row, rank + 1, joint, proposed
            entry = (-value, self._age, parent, level, tokens[rank], self._kind, estimate[1], estimate[2], (), later)
            heapq.heappush(self._heap, entry)

    def _calibrated(self, kind: int, probability: float) -> tuple[float, int, float]:
        """The acceptance of a token of this class and combined probability, and the bin and weight of the latter."""
        place = bisect_left(BOUNDS, probability)
        weight = probability / CENTERS[place]
        return min(MAX_JOINT, self._acceptance[kind][place] * weight), place, weight


def _share(probabilities: Sequence[float]) -> Callable[[float], float]:
    """Scales the estimates of siblings, which come from several strategies, to a sum of at most 1.

    Where they add up to more, they share the probability 1 in proportion to their odds.
    """
    if sum(probabilities) <= 1:
        return float
    total = sum(p / (1 - p) for p in probabilities)
    return lambda p: p / (1 - p) / total


def _no_successors(token: int) -> Row:
    return (), ()
