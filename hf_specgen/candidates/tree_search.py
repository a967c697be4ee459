"""How large draft trees become, and the sessions that search them without a forward pass.

The path probability of a node is the product of the acceptance probabilities along its path. The expected number of
tokens of a step is one plus the sum of the path probabilities of its nodes, so the best tree of a given size consists
of the nodes with the highest ones. They form a tree, since no node is more likely than its parent.

Source: Chen et al., "Sequoia" (2024), section 3.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate, pairwise, zip_longest
from math import isqrt
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from hf_specgen.candidates.base import DraftCall, DraftSession, Tree
from hf_specgen.candidates.growth import Floats, Growth, Snapshot
from hf_specgen.depth.latency import CostCurve, DraftLatency, StepLatency
from hf_specgen.targets.cache import padded_width
from hf_specgen.tree import DraftTree
from hf_specgen.verification.result import VerificationResult

Integers = NDArray[np.integer[Any]]
Tag = TypeVar("Tag")
MAX_NODES = 63
"""Maximum number of nodes of a row, which with its last token fill a pass of 64: beyond, each further one adds to the
latency even of a memory-bound target."""
MAX_CHILDREN = 8
"""Maximum number of children of a node, and of nodes of a row that are expanded in one pass."""
CHILD_ACCEPTANCE = 0.8
"""Probability that one of a node's children is accepted if the node is, assumed where the next passes are planned."""
MIN_GAIN = 0.001
"""Relative gain in expected tokens per second, and path probability, below which no pass of the drafter is made."""


class TreeSize:
    """How large the trees of a step become: chains, a number of nodes, or the most expected tokens per second.

    With a latency model trees leave out all passes of the drafter and all nodes that cost more than they gain; without
    one they have `nodes` nodes, expanded about the square root of that many at a time.
    """

    _snapshot: Snapshot | None = None

    def __init__(
        self,
        nodes: int | None,
        children: int = MAX_CHILDREN,
        latency: StepLatency | None = None,
        rows: int = 1,
        pass_rows: int = 0,
        is_padded: bool = False,
    ):
        """`pass_rows` are the rows of the target's pass, where they are more than those that draft."""
        self.max_nodes, self.children, self._rows = nodes or MAX_NODES, children, rows
        self.min_probability, self.latency, self.is_fastest = 0.0, latency, latency is not None
        if latency is None:
            return
        self._target, self.min_probability = _target_seconds(
            latency.target, max(rows, pass_rows), self.max_nodes, is_padded
        )
        self._pass, self._spent = _drafter_seconds(latency.drafter, rows, MAX_CHILDREN if children > 1 else 1)

    def plan(self, growth: Growth, k: int) -> tuple[int, int]:
        """The next passes of the drafter, 0 to stop, and how many nodes of each row each of them expands.

        No draft is deeper than `k`.
        """
        left = max(growth.limits) - growth.levels
        if left <= 0:
            return 0, 0
        passes, width = (0, 0) if growth.expanded else self.first_plan(growth, k)
        if not self.is_fastest:
            if passes:
                return passes, width
            since_read = growth.levels % growth.levels_per_read
            if not since_read and left > 1 and not growth.read().may_improve(self.max_nodes):
                return 0, 0
            return min(growth.levels_per_read - since_read, left), min(isqrt(self.max_nodes), growth.frontier)
        if not passes:
            self._snapshot = growth.read()
            passes, width = 1, self._fastest_width(self._snapshot, growth)
            if not width:
                return 0, 0
            if growth.levels_per_read > 1:  # few different ones: each is captured
                passes, width = min(growth.levels_per_read, k - growth.levels), min(len(self._pass), growth.children)
        self.count(passes, width)
        return passes, width

    def first_plan(self, growth: Growth, k: int) -> tuple[int, int]:
        """The passes that follow the first level whatever it contains, 0 if it has to be read, and their width.

        Drafts at the end of a text, which are less deep than `k`, make as many passes as others where these are
        captured, so that they share a graph.
        """
        left, most = max(growth.limits) - 1, growth.levels_per_read
        if left <= 0:
            return 0, 0
        left = min(k - 1, -(-left // most) * most)
        if self.is_fastest:
            if most == 1:  # reading is free
                return 0, 0
            width = min(len(self._pass), growth.children)
            passes = self._first_passes(min(left, most), width)
            return min(left, most) if passes > 2 else passes, width  # few different ones: each is captured
        return (left, 1) if self.children == 1 else (min(most - 1, left), min(isqrt(self.max_nodes), growth.children))

    def count(self, passes: int, width: int) -> None:
        """Count the time of passes."""
        if self.is_fastest:
            self._spent += passes * float(self._pass[width - 1])

    def _first_passes(self, limit: int, width: int) -> int:
        """How many passes of this width to make before the first read, by the assumed acceptance."""
        levels = np.arange(1 + limit)
        tokens = self._rows * np.cumsum(CHILD_ACCEPTANCE**levels)
        seconds = self._target[np.minimum(levels, self.max_nodes)] + self._spent + levels * self._pass[width - 1]
        return int(np.argmax(tokens / seconds))

    def _fastest_width(self, snapshot: Snapshot, growth: Growth) -> int:
        """How many nodes to expand for the most expected tokens per second; 0 if a further pass would lower them."""
        widths = max(0, min(len(self._pass), self.max_nodes - growth.expanded))
        reached = snapshot.frontier[:, :widths].sum(axis=0)  # expected rows that reach the j-th node to expand
        widths = int(np.count_nonzero(reached))
        if not widths or not snapshot.may_improve(self.max_nodes):
            return 0
        probability = snapshot.probability[:, : self.max_nodes].sum(axis=0)
        tokens = np.concatenate([[self._rows], probability]).cumsum()
        rates = tokens / (self._target[: len(tokens)] + self._spent)
        best = int(rates.argmax())
        # A first draft token may cost far more than each further one, so several levels are considered at once.
        levels, acceptance, expanded = _levels_ahead(max(1, max(growth.limits) - growth.levels), widths)
        nodes = np.minimum(best + expanded, self.max_nodes)
        seconds = self._target[nodes] + self._spent + levels * self._pass[:widths]
        expected = (tokens[best] + acceptance * reached[:widths].cumsum()) / seconds
        level, place = divmod(int(expected.argmax()), widths)
        return 1 + place if expected[level, place] > rates[best] * (1 + MIN_GAIN) else 0

    def nodes(self, growth: Growth) -> int:
        """How many nodes of each row are verified."""
        if not self.is_fastest:
            return self.max_nodes if self.children > 1 else max(1, *growth.limits)
        if self._snapshot is None or self._snapshot.levels < growth.levels:
            self._snapshot = growth.read()
        return self.best_size(self._snapshot.probability[:, : self.max_nodes].tolist(), self._spent)

    def best_size(self, probability: Sequence[Sequence[float]], drafting: float = 0.0, is_sampled: bool = False) -> int:
        """How many nodes of complete trees are verified.

        With `is_sampled` the first local maximum of the speed, so that no node is left out because of those after it.
        """
        if not self.is_fastest:
            return self.max_nodes
        gains = probability[0] if len(probability) == 1 else map(sum, zip_longest(*probability, fillvalue=0.0))
        tokens = accumulate(gains, initial=float(self._rows))
        rates = [count / (seconds + drafting) for count, seconds in zip(tokens, self._target.tolist(), strict=False)]
        if is_sampled:
            return next(
                (count for count, (one, next_one) in enumerate(pairwise(rates)) if next_one < one), len(rates) - 1
            )
        return rates.index(max(rates))


@lru_cache(maxsize=64)
def _levels_ahead(levels: int, widths: int) -> tuple[Integers, Floats, Integers]:
    """Of the next levels their numbers and accepted nodes, `[levels, 1]`, and `[levels, widths]` the expanded nodes."""
    numbers = np.arange(1, levels + 1)[:, None]
    return numbers, np.cumsum(CHILD_ACCEPTANCE**numbers, axis=0), numbers * np.arange(1, widths + 1)


@lru_cache(maxsize=64)
def _target_seconds(target: CostCurve, rows: int, nodes: int, is_padded: bool) -> tuple[Floats, float]:
    """Seconds of the target's pass by the nodes of each row, from 0 on; and the least useful path probability.

    Each node adds its path probability to the tokens of a step, of which there is at least one for each row. Where
    passes are padded, as captured ones, nodes that fill a pass take no time.
    """
    tokens = [padded_width(1 + count) if is_padded else 1 + count for count in range(nodes + 1)]
    seconds = np.array([target.seconds_of(rows * count) for count in tokens])
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
    only_pass: int = 0,
) -> TreeSize:
    """How large the next trees of a call become, of rows with these maximum depths.

    `only_pass` are the tokens per row of the one pass of a drafter that needs no further pass for deeper levels.
    """
    if isinstance(size, int):
        return TreeSize(size)
    rows = max(1, sum(depth > 0 for depth in depths))
    pass_rows, width = (rows, 2) if call.target is None else call.target.pass_shape(2)
    pass_rows = max(rows, pass_rows)
    step = None if size is None or call.depth is None else call.depth.step_latency(pass_rows, call.context_length)
    if step is None:
        return TreeSize(None, children=1)
    if only_pass:
        step = step._replace(drafter=DraftLatency(overhead=step.drafter.draft([rows * only_pass])))
    return TreeSize(None, MAX_CHILDREN, step, rows, pass_rows, is_padded=width > 2)


@dataclass
class SearchTree(Generic[Tag]):
    """The nodes of one row, in descending order of the probability of their paths.

    A tag is what a strategy knows of a node.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probability: list[float] = field(default_factory=list)
    tags: list[Tag] = field(default_factory=list)


@dataclass(frozen=True)
class SearchLimits:
    """Maximum number of nodes, and the path probability that a node has to exceed; a chain has no siblings."""

    nodes: int
    min_probability: float = 0.0
    is_chain: bool = False


def best_first(
    root: Tag, children: Callable[[Tag, int], Iterable[tuple[int, float, Tag]]], depth: int, limits: SearchLimits
) -> SearchTree[Tag]:
    """The most probable tree.

    Example:
        >>> best_first(0, lambda tag, depth: [(tag + 1, 0.6, tag + 1), (9, 0.3, 9)], 2, SearchLimits(3)).tokens
        [1, 2, 9]
    """
    tree: SearchTree[Tag] = SearchTree()
    # Path probability (negative), age (breaks ties), parent, depth, token, tag, later siblings, probability of parent.
    heap: list[tuple[float, int, int, int, int, Tag, Iterator[tuple[int, float, Tag]], float]] = []
    age = 0

    def push(siblings: Iterator[tuple[int, float, Tag]], parent: int, level: int, above: float) -> None:
        """Push the next child of a node; the one after it is pushed when it is added."""
        nonlocal age
        for token, probability, tag in siblings:
            if above * probability > limits.min_probability:
                age += 1
                heappush(heap, (-above * probability, age, parent, level, token, tag, siblings, above))
            return

    if depth > 0:
        push(iter(children(root, 0)), -1, 1, 1.0)
    while heap and len(tree.tokens) < limits.nodes:
        negative, _, parent, level, token, tag, siblings, above = heappop(heap)
        node = len(tree.tokens)
        tree.tokens.append(token)
        tree.parents.append(parent)
        tree.probability.append(-negative)
        tree.tags.append(tag)
        if not limits.is_chain:
            push(siblings, parent, level, above)
        if level < depth:
            push(iter(children(tag, level)), node, level + 1, -negative)
    return tree


def draft_rows(
    call: DraftCall,
    size: Tree,
    depths: Sequence[int],
    search: Callable[[int, SearchLimits], SearchTree[Tag]],
    passes: Sequence[int] | None = None,
    scale: float = 1.0,
) -> tuple[DraftTree, list[SearchTree[Tag]]]:
    """Search a tree for every row and cut it to the size to verify.

    `passes` of a drafter were made for the trees. `scale` corrects path probabilities where the size is chosen.
    """
    if not any(depths):
        return DraftTree.empty(len(depths)), [SearchTree() for _ in depths]
    limit = tree_size(size, call, depths)
    is_chain = size is None
    if limit.is_fastest or isinstance(size, int):
        limits = SearchLimits(limit.max_nodes, limit.min_probability, is_chain)
    else:  # without a latency model, "auto" drafts what is not improbable
        limits = SearchLimits(max(depths), 0.0 if size is None else 0.05, is_chain)
    trees = [search(row, limits) for row in range(len(depths))]
    drafting = 0.0 if passes is None or limit.latency is None else limit.latency.drafter.draft(passes)
    probability = [[scale * value for value in tree.probability] for tree in trees]
    nodes = limit.best_size(probability, drafting) if limit.is_fastest else limits.nodes
    return draft_of(trees, nodes), trees


class SearchSession(DraftSession, Generic[Tag]):
    """Base class of sessions that search the tree of each row, without a forward pass.

    Trees are sized with path probabilities times the ratio of accepted to expected tokens of the call, at most 1: the
    estimates are right for all texts together, and too high for texts that repeat little.
    """

    passes = ()

    def __init__(self, call: DraftCall, k: int, size: Tree):
        super().__init__(call)
        self._k, self._size = k, size
        self._trees: list[SearchTree[Tag]] = []
        self._expected, self._accepted = 2.0, 2.0  # tokens in all drafts, and two that are assumed

    def observe(self, result: VerificationResult) -> None:
        """Count how many draft tokens were accepted."""
        self._accepted += sum(result.accepted)

    @abstractmethod
    def search(self, row: int, depth: int, limits: SearchLimits) -> SearchTree[Tag]:
        """The most probable tree of a row."""

    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        depths = [min(self._k, depth) for depth in max_depths]

        def search(row: int, limits: SearchLimits) -> SearchTree[Tag]:
            return self.search(row, depths[row], limits) if depths[row] else SearchTree()

        scale = min(1.0, self._accepted / self._expected)
        draft, self._trees = draft_rows(self.call, self._size, depths, search, scale=scale)
        self._expected += sum(map(sum, draft.probability or ()))
        return draft


def draft_of(trees: Sequence[SearchTree[Any]], nodes: int) -> DraftTree:
    """The first `nodes` nodes of each row's tree as a draft."""
    probability = tuple(tuple(tree.probability[:nodes]) for tree in trees)
    return DraftTree.from_nodes([(tree.tokens[:nodes], tuple(tree.parents[:nodes])) for tree in trees], probability)
