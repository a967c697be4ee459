"""Best-first search for draft trees, for strategies that need no forward pass to find the children of a node.

The expected number of tokens of a step is one plus the sum of the path probabilities of its nodes, so the best tree of
a given size has the nodes with the highest ones. They form a tree, since no node is more likely than its parent.

Source: Chen et al., "Sequoia" (2024), section 3.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Any, Generic, TypeVar

from hf_specgen.candidates.base import DraftSession, TreeSetting
from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.candidates.tree_size import FastestTreeSizer, tree_sizer
from hf_specgen.depth.latency import NodeLatency
from hf_specgen.tree import DraftTree
from hf_specgen.verification.result import VerificationResult

Tag = TypeVar("Tag")
MIN_PATH_PROBABILITY = 0.05  # of the nodes of an "auto" tree without a latency model


@dataclass
class SearchTree(Generic[Tag]):
    """The nodes of one row, in descending order of the probability of their paths.

    `tags[i]` is the strategy's data of node i, from which it finds the children.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probability: list[float] = field(default_factory=list)
    tags: list[Tag] = field(default_factory=list)


@dataclass(frozen=True)
class SearchLimits:
    """Maximum number of nodes, and the path probability that a node has to exceed; a chain has no siblings.

    With `latency` the search ends where no further node raises the tokens per second.
    """

    nodes: int
    min_probability: float = 0.0
    is_chain: bool = False
    latency: NodeLatency | None = None


@dataclass(slots=True)
class Siblings(Generic[Tag]):
    """The children of one node that the search has not reached yet: token, acceptance and tag of each, in order."""

    remaining: Iterator[tuple[int, float, Tag]]
    parent: int
    parent_probability: float
    level: int


def best_first(
    root: Tag, children: Callable[[Tag, int], Iterable[tuple[int, float, Tag]]], depth: int, limits: SearchLimits
) -> SearchTree[Tag]:
    """The most probable tree of at most `depth` levels.

    `children(tag, level)` yields token, acceptance and tag of each child of a node at depth `level` (the root: 0), most
    likely first.

    Example:
        >>> best_first(0, lambda tag, level: [(tag + 1, 0.6, tag + 1), (9, 0.3, 9)], 2, SearchLimits(3)).tokens
        [1, 2, 9]
    """
    tree: SearchTree[Tag] = SearchTree()
    # Of each node in the tree the next child: negative path probability, age (breaks ties), token, tag, later siblings.
    heap: list[tuple[float, int, int, Tag, Siblings[Tag]]] = []
    age = 0

    def push_next(siblings: Siblings[Tag]) -> None:
        """Push the next one of these siblings; those after it follow when it is added to the tree."""
        nonlocal age
        next_sibling = next(siblings.remaining, None)
        if next_sibling is None:
            return
        token, acceptance, tag = next_sibling
        probability = siblings.parent_probability * acceptance
        if probability > limits.min_probability:
            age += 1
            heappush(heap, (-probability, age, token, tag, siblings))

    if depth > 0:
        push_next(Siblings(iter(children(root, 0)), parent=-1, parent_probability=1.0, level=1))
    latency = limits.latency
    tokens_of_step = 1.0  # expected, with the nodes so far
    best_rate = 0.0  # tokens per second of the best tree so far
    while heap and len(tree.tokens) < limits.nodes:
        if latency is not None:
            best_rate = max(best_rate, tokens_of_step / latency.seconds[len(tree.tokens)])
            # No later node is more probable than the next one.
            next_probability = -heap[0][0]
            if next_probability <= best_rate * latency.least_seconds_per_node[len(tree.tokens)]:
                break
            tokens_of_step += next_probability
        negative_probability, _, token, tag, siblings = heappop(heap)
        node = len(tree.tokens)
        probability = -negative_probability
        tree.tokens.append(token)
        tree.parents.append(siblings.parent)
        tree.probability.append(probability)
        tree.tags.append(tag)
        if not limits.is_chain:
            push_next(siblings)
        if siblings.level < depth:
            push_next(Siblings(iter(children(tag, siblings.level)), node, probability, siblings.level + 1))
    return tree


def draft_rows(
    batch: DraftBatch,
    tree: TreeSetting,
    depths: Sequence[int],
    search: Callable[[int, SearchLimits], SearchTree[Tag]],
    tokens_per_pass: Sequence[int] | None = None,
    scales: Sequence[float] | None = None,
) -> tuple[DraftTree, list[SearchTree[Tag]]]:
    """Search a tree for every row and cut it to the size to verify.

    `tokens_per_pass` are the passes of a drafter so far. The search ignores `scales`, for each row a factor of the path
    probabilities, which only affect how many nodes are kept. The draft has the scaled probabilities, the search trees
    those before. With scales the search trees are complete, for sessions that learn from all of their nodes.
    """
    if not any(depths):
        return DraftTree.empty(len(depths)), [SearchTree() for _ in depths]
    sizer = tree_sizer(tree, batch, depths)
    is_chain = tree is None or batch.verifies_chains_only
    draft_seconds = 0.0 if tokens_per_pass is None else sizer.drafting_seconds(tokens_per_pass)
    if isinstance(sizer, FastestTreeSizer):
        # The nodes of several rows are cut together: a row's own tree does not show where.
        may_end = scales is None and len(depths) == 1
        latency = sizer.node_latency(draft_seconds) if may_end else None
        limits = SearchLimits(sizer.max_nodes, sizer.min_probability, is_chain, latency)
    elif isinstance(tree, int):
        limits = SearchLimits(tree, is_chain=is_chain)
    elif tree is None:
        limits = SearchLimits(max(depths), is_chain=True)
    else:  # without a latency model, "auto" drafts what is not improbable
        limits = SearchLimits(max(depths), MIN_PATH_PROBABILITY, is_chain)
    trees = [search(row, limits) for row in range(len(depths))]
    scaled = [
        replace(row_tree, probability=[scale * value for value in row_tree.probability])
        for row_tree, scale in zip(trees, scales or [1.0] * len(trees), strict=True)
    ]
    nodes = limits.nodes
    if isinstance(sizer, FastestTreeSizer):
        nodes = sizer.num_verified_by_probability([row_tree.probability for row_tree in scaled], draft_seconds)
    return draft_of(scaled, nodes), trees


class SearchSession(DraftSession, Generic[Tag]):
    """Base class of sessions that search the tree of each row, without a forward pass.

    The path probabilities of `search` are unbiased over all texts, and too high for texts that repeat little. So those
    of a draft are multiplied by the ratio of accepted to expected tokens of the row's earlier drafts, at most 1. Trees
    are sized with the product, and so are several drafts that are cut to a common size. Accepted tokens beyond the
    expected ones are not counted, so that they do not raise the ratio of later drafts.
    """

    tokens_per_pass = ()

    def __init__(self, batch: DraftBatch, k: int, tree: TreeSetting):
        super().__init__(batch)
        self._k = k
        self._tree_setting = tree
        self._trees: list[SearchTree[Tag]] = []
        self._probability: Sequence[Sequence[float]] = ()  # before scaling, of the last draft, until its outcome
        # Of each row the expected and accepted tokens of its drafts, from a prior of 2 each.
        self._expected = [2.0] * batch.state.batch
        self._accepted = [2.0] * batch.state.batch

    def observe(self, result: VerificationResult) -> None:
        """Count how many draft tokens were expected to be accepted, of those that were verified, and how many were."""
        for row, probability in enumerate(self._probability):
            self._expected[row] += sum(probability[: result.num_in_pass[row]] if result.num_in_pass else probability)
        self._probability = ()
        for row, accepted in enumerate(result.accepted):
            self._accepted[row] = min(self._expected[row], self._accepted[row] + accepted)

    @abstractmethod
    def search(self, row: int, depth: int, limits: SearchLimits) -> SearchTree[Tag]:
        """The most probable tree of a row."""

    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        depths = [min(self._k, depth) for depth in max_depths]

        def search(row: int, limits: SearchLimits) -> SearchTree[Tag]:
            return self.search(row, depths[row], limits) if depths[row] else SearchTree()

        scales = [accepted / expected for accepted, expected in zip(self._accepted, self._expected, strict=True)]
        draft, self._trees = draft_rows(self.batch, self._tree_setting, depths, search, scales=scales)
        self._probability = [tree.probability[: draft.nodes] for tree in self._trees]
        return draft


def draft_of(trees: Sequence[SearchTree[Any]], nodes: int) -> DraftTree:
    """The first `nodes` nodes of each row's tree as a draft."""
    probability = tuple(tuple(tree.probability[:nodes]) for tree in trees)
    return DraftTree.from_nodes([(tree.tokens[:nodes], tuple(tree.parents[:nodes])) for tree in trees], probability)
