"""Best-first search of draft trees: the nodes with the highest probability that their whole path is accepted.

The expected number of tokens of a step is one plus the sum of the path probabilities of the draft's nodes, so the best
tree of a given size consists of the nodes with the highest ones. No node is more probable than its parent, so a heap of
the next child of every node finds them in descending order.

Source: Chen et al., "Sequoia" (2024), section 3, for the best tree of a given size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Generic, TypeVar

Tag = TypeVar("Tag")


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
