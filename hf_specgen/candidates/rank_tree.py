"""Fixed trees of ranks: the shape of a Medusa draft before its tokens are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from hf_specgen.tree import Parents, children, merge_paths


@dataclass(frozen=True)
class RankTree:
    """A tree whose node at depth d is a token of head d - 1, given by its rank.

    Args:
        ranks: of each node.
        parents: of each node, -1 for those that continue the row.

    Example:
        >>> tree = RankTree.from_paths([[0, 1], [0], [1]])
        >>> tree.ranks, tree.parents, tree.heads
        ((0, 1, 1), (-1, -1, 0), (0, 0, 1))
    """

    ranks: tuple[int, ...]
    parents: Parents

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[int]]) -> RankTree:
        """From lists of ranks in any order; every path's beginning has to be a path too.

        Raises:
            ValueError: for an empty tree, an empty path, a negative rank or a missing beginning.
        """
        if not isinstance(paths, Sequence) or not all(isinstance(path, Sequence) for path in paths):
            raise ValueError(f"a tree is a list of paths such as [[0], [0, 0]], got {paths!r}")
        known = {tuple(path) for path in paths}
        if not known:
            raise ValueError("the tree has no paths; give at least [[0]]")
        for path in known:
            if not path or not all(isinstance(rank, int) and rank >= 0 for rank in path):
                raise ValueError(f"the path {list(path)} is not a list of ranks, which begin at 0")
            if len(path) > 1 and path[:-1] not in known:
                raise ValueError(f"the tree has the path {list(path)} but not its beginning {list(path[:-1])}; add it")
        ranks, parents = merge_paths(sorted(known, key=lambda path: (len(path), path)))
        return cls(tuple(ranks), parents)

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """The head of each node."""
        heads: list[int] = []
        for parent in self.parents:
            heads.append(0 if parent < 0 else heads[parent] + 1)
        return tuple(heads)

    @property
    def depth(self) -> int:
        return max(self.heads) + 1 if self.ranks else 0

    @property
    def width(self) -> int:
        """How many ranks of a head it uses."""
        return max(self.ranks) + 1 if self.ranks else 0

    def cut(self, depth: int) -> RankTree:
        """The tree without what lies deeper than `depth`."""
        return self if depth >= self.depth else _cut(self, depth)

    @cached_property
    def drawn_in_order(self) -> RankTree:
        """The same shape, in which the children of a node are its head's first ranks, without gaps.

        Rejection sampling verifies siblings in the order in which they were drawn; none may be left out.
        """
        ranks = list(self.ranks)
        for siblings in children(self.parents):
            for rank, node in enumerate(siblings):
                ranks[node] = rank
        return RankTree(tuple(ranks), self.parents)


@lru_cache(maxsize=4096)
def _cut(tree: RankTree, depth: int) -> RankTree:
    kept = [node for node, head in enumerate(tree.heads) if head < depth]
    place = {node: index for index, node in enumerate(kept)} | {-1: -1}
    return RankTree(tuple(tree.ranks[node] for node in kept), tuple(place[tree.parents[node]] for node in kept))
