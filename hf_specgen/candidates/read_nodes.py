"""The nodes that a draft model has read in the current draft, in the order in which its cache holds them, and the text
that it reads together with the first of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hf_specgen.candidates.tree_builder import Ints, TreeBuilder
from hf_specgen.tree import DraftTree


class ReadNodes:
    """Nodes of every row, equally many; a node is known by its place among them and by its index in a `TreeBuilder`.

    First-stage nodes are read before the drafter has proposed them; the builder has those that it proposes.

    Args:
        suggested: `[rows, nodes]` the nodes that are read together with the text.

    Example:
        >>> from hf_specgen.candidates.tree_builder import Proposals
        >>> builder = TreeBuilder([4])
        >>> builder.add_root(Proposals(np.array([[[7, 5]]]), np.array([[[0.6, 0.3]]])))
        >>> nodes = ReadNodes(DraftTree.chains([[5, 6]]))
        >>> [found.tolist() for found in nodes.find(builder, 0)]  # its node 1 is the suggested one at place 0
        [[[1]], [[0]], [[True]]]
    """

    def __init__(self, suggested: DraftTree):
        self._tokens = [tokens[: suggested.nodes] for tokens in suggested.tokens.tolist()]
        # Nodes that fill up a row follow its last token; none of them is a suggestion.
        self._parents = [[*parents, *[-1] * (suggested.nodes - len(parents))] for parents in suggested.parents]
        self._real = [[place < len(parents) for place in range(suggested.nodes)] for parents in suggested.parents]
        self._places: list[dict[int, int]] = [{-1: -1} for _ in self._tokens]
        self._children: list[dict[int, dict[int, int]]] = []
        for tokens, parents in zip(self._tokens, suggested.parents, strict=True):
            below: dict[int, dict[int, int]] = {}
            for place, parent in enumerate(parents):
                below.setdefault(parent, {})[tokens[place]] = place
            self._children.append(below)

    def __len__(self) -> int:
        return len(self._tokens[0]) if self._tokens else 0

    def find(self, builder: TreeBuilder, seen: int) -> tuple[Ints, Ints, NDArray[np.bool_]] | None:
        """The first-stage nodes among those that the builder received since it had `seen` nodes.

        Returns:
            `[rows, most]` their indices in the builder and their places, and which of these are real: rows with fewer
            are filled up. None if there are none.
        """
        known: list[list[tuple[int, int]]] = []
        for row, children in enumerate(self._children):
            found = []
            for node in range(seen, builder.tokens.shape[1]) if children else ():
                above = self._places[row].get(int(builder.parents[row, node]))
                place = None if above is None else children.get(above, {}).get(int(builder.tokens[row, node]))
                if place is not None and builder.expandable[row, node]:
                    self._places[row][node] = place
                    found.append((node, place))
            known.append(found)
        width = max(map(len, known), default=0)
        if not width:
            return None
        filled = np.array([[*found, *[(0, 0)] * (width - len(found))] for found in known])  # [rows, most, 2]
        valid = np.arange(width) < np.array([[len(found)] for found in known])
        return filled[..., 0], filled[..., 1], valid

    def add(self, builder: TreeBuilder, nodes: Ints) -> None:
        """Append nodes `[rows, nodes]` of the builder, whose parents were read."""
        tokens, above = (
            np.take_along_axis(values, nodes, axis=1).tolist() for values in (builder.tokens, builder.parents)
        )
        for row, added in enumerate(nodes.tolist()):
            for index, node in enumerate(added):
                # A node that only fills up its row may have a parent that was not read.
                self._parents[row].append(self._places[row].get(above[row][index], -1))
                self._tokens[row].append(tokens[row][index])
                self._real[row].append(bool(builder.expandable[row, node]))
                self._places[row].setdefault(node, len(self._tokens[row]) - 1)

    def add_first_stage(self, rows: Sequence[Sequence[tuple[int, int]]]) -> int:
        """Append first-stage nodes, which `find` finds if they are proposed; rows with fewer are filled up.

        Args:
            rows: of each row: the place of the parent, which may be that of an earlier one, and the token.

        Returns:
            how many nodes each row has received.
        """
        width = max(map(len, rows))
        for row, proposed in enumerate(rows):
            for parent, token in proposed:
                self._children[row].setdefault(parent, {})[token] = len(self._tokens[row])
                self._parents[row].append(parent)
                self._tokens[row].append(token)
            missing = width - len(proposed)
            self._parents[row] += [-1] * missing
            self._tokens[row] += [0] * missing
            self._real[row] += [*[True] * len(proposed), *[False] * missing]
        return width

    def real(self, new: int) -> NDArray[np.bool_]:
        """`[rows, new]` which of the last nodes do not merely fill up a row."""
        return np.array([row[len(row) - new :] for row in self._real], dtype=bool)

    def tree(self) -> DraftTree:
        """All nodes as a tree."""
        return DraftTree(torch.tensor(self._tokens), tuple(map(tuple, self._parents)))

    def places_along(self, row: int, path: Sequence[int]) -> list[int]:
        """The places of the nodes of a path, up to the first that was not read."""
        places = []
        for node in path:
            place = self._places[row].get(node)
            if place is None:
                break
            places.append(place)
        return places


class LeadingText:
    """The unread tokens of each row, which are read as the first nodes of a tree; the first of them is its root.

    Args:
        unread: of each row, at least one token.

    Example:
        >>> text = LeadingText([[3], [4, 5]])
        >>> text.before(DraftTree.chains([[6], [7]])).tokens.tolist()  # a row with fewer unread tokens is filled up
        [[0, 6], [5, 7]]
    """

    def __init__(self, unread: Sequence[Sequence[int]]):
        self.unread = unread
        self._width = max(map(len, unread)) - 1

    def before(self, tree: DraftTree) -> DraftTree:
        """The unread tokens after the root, and then a tree below the last of them."""
        rows = []
        for tokens, unread, parents in zip(tree.tokens.tolist(), self.unread, tree.parents, strict=True):
            chain, last = len(unread) - 1, len(unread) - 2
            text = [*unread[1:], *[0] * (self._width - chain)]
            above = [*range(-1, chain - 1), *[-1] * (self._width - chain)]
            below = [last if parent < 0 else self._width + parent for parent in parents]
            rows.append(([*text, *tokens], (*above, *below, *[last] * (tree.nodes - len(parents)))))
        return DraftTree.from_nodes(rows)

    def results(self, logits: torch.Tensor) -> torch.Tensor:
        """The results of such a tree, after each row's last token and after the nodes of the tree below it.

        Args:
            logits: `[batch, 1 + text + nodes, vocab]`, the first ones after the root.

        Returns:
            `[batch, 1 + nodes, vocab]`.
        """
        last = torch.tensor([len(tokens) - 1 for tokens in self.unread], device=logits.device)
        return torch.cat([logits[torch.arange(len(last)), last][:, None], logits[:, 1 + self._width :]], dim=1)

    def path(self, row: int, places: Sequence[int]) -> list[int]:
        """The nodes of the text and of a path in the tree after it."""
        return [*range(len(self.unread[row]) - 1), *(self._width + place for place in places)]
