"""Draft trees of drafters with one forward pass per level, as tensors on the drafter's device.

A pass gives for some nodes likely next tokens with acceptance probabilities; the most likely ones are the nodes of the
next pass. Shapes depend on the number of levels, nodes and children alone, and nothing is decided by the host, so that
several levels can run without a read by the host.

Source: Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees" (2024), section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_specgen.grown_tree import DEPTH, NO_NODE, NUMBER, PARENT, PATH, TOKEN, GrownTree, Selection, probability_of
from hf_specgen.targets.cache import padded_width
from hf_specgen.tree import TreeStructure, ancestors_of, identity

Floats = NDArray[np.floating[Any]]
LEVELS_PER_READ = 4
"""Number of passes after which the host reads the probabilities, and waits for an accelerator. On a CPU, where nothing
has to wait, every level is read."""
CLOSED = 1e4
"""Subtracted from the logarithm of the probability of a candidate that cannot be expanded."""
UNEXPANDED = -2
"""The number of a node that was not expanded."""


class _Level(NamedTuple):
    """The candidates of a level, `[rows, candidates]`: tokens, and logarithms of their path probabilities."""

    tokens: Tensor
    paths: Tensor


class _Expansion(NamedTuple):
    """Nodes that were expanded, `[rows, width]`: logarithms of their path probabilities, and index in their level."""

    reached: Tensor
    chosen: Tensor | None = None


class Grown(NamedTuple):
    """Levels of a growing tree in few tensors: path probabilities of candidates, their tokens, the last ancestors."""

    paths: Tensor
    integers: Tensor
    ancestors: Tensor | None


class Shape(NamedTuple):
    """The shape of a growing tree: rows, children of each node, and by part the nodes that each pass expanded."""

    rows: int
    children: int
    widths: tuple[tuple[int, ...], ...]


def reads_are_free(tokens: Tensor) -> bool:
    """Whether the host waits for nothing when it reads a tensor."""
    return tokens.is_cpu


class Growth:
    """Draft trees that grow by one level at a time.

    Candidates come in groups of siblings. Group 0 stands for the row's last token, which has number 0; group 1 are its
    children, and group ``1 + n`` the children of the node that was expanded as number ``n``. `levels` are the passes so
    far, `expanded` the expanded nodes of each row.

    Example:
        >>> growth = Growth([2], children=2, last_tokens=torch.tensor([[4]]))
        >>> growth.add(torch.tensor([[[5, 6]]]), torch.tensor([[[0.6, 0.3]]]).log())
        >>> growth.expand(1).tokens.tolist()  # the most likely node is expanded first
        [[5]]
        >>> growth.add(torch.tensor([[[7, 8]]]), torch.tensor([[[0.9, 0.1]]]).log())
        >>> tree, _ = growth.best(3)  # of 4 nodes: 5, then 7 below it (0.54), then 6 (0.3)
        >>> tree.token_lists(), tree.parents
        ([[5, 7, 6]], ((-1, 0, -1),))
    """

    _open: Tensor
    _selection: Selection | None = None
    """The best nodes of all levels, if a captured function has selected them."""
    _values: Any = None
    """What the host has read of them."""
    _given: _Constants | None = None

    def __init__(self, depths: Sequence[int], children: int, last_tokens: Tensor, limits: Tensor | None = None):
        """`limits`, `[rows, 1]`, are the depths as a tensor: needed if levels may go beyond them, as captured ones."""
        self.limits, self.children, self.levels, self.expanded = list(depths), children, 0, 0
        self.rows = sum(depth > 0 for depth in depths)
        self.levels_per_read = 1 if reads_are_free(last_tokens) else LEVELS_PER_READ
        self.last_tokens = last_tokens
        self._levels: list[_Level] = []
        self._expansions: list[_Expansion] = []
        self._widths: tuple[int, ...] = ()
        # Of the last nodes, `[rows, last nodes, 1 + expanded]`; and of later ones the parents, not yet included.
        self._ancestors: Tensor | None = None
        self._above: list[Tensor | None] = []
        self._parts: list[Grown] = []  # the first `_in_parts` levels
        self._widths_of_parts: tuple[tuple[int, ...], ...] = ()
        self._in_parts = 0
        self.limits_on_device = limits
        if limits is None and len(set(depths)) > 1:
            self.limits_on_device = torch.tensor(self.limits, device=last_tokens.device)[:, None]

    @property
    def device(self) -> torch.device:
        """Where it grows."""
        return self.last_tokens.device

    @property
    def candidates(self) -> int:
        """How many candidates each row has."""
        return self.children * (1 + self.expanded)

    @property
    def frontier(self) -> int:
        """How many candidates of each row are in the last level."""
        return self.children * (self._widths[-1] if self._widths else 1)

    def add(self, tokens: Tensor, log_acceptance: Tensor, expandable: Tensor | None = None) -> None:
        """Add the children of the nodes that were expanded last, at first of each row's last token.

        All are `[rows, expanded, children]`: tokens, most preferred first; the logarithm of the probability that the
        target chooses each, given that it reached the node; and whether it may be expanded.
        """
        path = log_acceptance + self._expansions[-1].reached[..., None] if self._expansions else log_acceptance
        path = path.flatten(1)
        if self.limits_on_device is not None:
            path = path.masked_fill(self.limits_on_device <= self.levels, NO_NODE)
        self._open = path if expandable is None else torch.where(expandable.flatten(1), path, path - CLOSED)
        self.levels, self._selection = self.levels + 1, None
        self._levels.append(_Level(tokens.flatten(1), path))

    def expand(self, width: int) -> GrownTree:
        """The tree of all expanded nodes, with the tokens of the new ones: the likeliest candidates of the last level.

        A row with fewer of them is filled up with others, whose children have no probability.
        """
        self.expanded, self._widths = self.expanded + width, (*self._widths, width)
        shown: Any = {"nodes": self.expanded, "level": self.levels, "drafting_rows": self.rows}
        tokens, above = self._levels[-1].tokens, None
        if self.children == 1:
            self._expansions.append(_Expansion(self._open))
            tree = GrownTree(tokens, **shown)
        else:
            reached, index = self._open.topk(width, dim=1)
            self._expansions.append(_Expansion(reached, index))
            above = index // self.children if len(self._widths) > 1 else None
            tree = GrownTree(tokens.gather(1, index), self.structure, above=above, **shown)
        self._above.append(above)
        return tree

    def structure(self) -> TreeStructure:
        """Depths of all expanded nodes, and ancestors of the last ones: for drafters that read it in every pass."""
        rows, device = len(self.limits), self.device
        if self._ancestors is None:
            self._ancestors = identity(1, torch.bool, device).expand(rows, -1, -1)
        for above, width in zip(self._above, self._widths[len(self._widths) - len(self._above) :], strict=True):
            inherited = self._ancestors
            index = None if above is None else above[..., None].expand(-1, -1, inherited.shape[2])
            inherited = inherited.expand(-1, width, -1) if index is None else inherited.gather(1, index)
            itself = identity(width, torch.bool, device).expand(rows, -1, -1)
            self._ancestors = torch.cat([inherited, itself], dim=2)
        self._above = []
        return TreeStructure(self.constants.depths[: 1 + self.expanded].expand(rows, -1), self._ancestors)

    @property
    def constants(self) -> _Constants:
        """What depends on the shape of the tree alone."""
        return self._given or self.constants_after(0, 0)

    def constants_after(self, passes: int, width: int) -> _Constants:
        """Those of the tree after so many passes that expand so many nodes."""
        return _constants(self.children, self._widths + (width,) * passes, self.device)

    def parts(self) -> tuple[Grown, ...]:
        """All levels so far, in few tensors; packs the levels that were added since the last time."""
        first = self._in_parts
        if first < len(self._levels):
            begin = max(0, first - 1)  # the first level comes before anything is expanded
            levels, expansions = self._levels[first:], self._expansions[begin:]
            if self._widths:
                self.structure()
            paths = [*(level.paths for level in levels), *(one.reached for one in expansions), self._open]
            integers = [level.tokens for level in levels]
            integers += [one.chosen for one in expansions if one.chosen is not None]
            grown = Grown(torch.cat(paths, dim=1), torch.cat(integers, dim=1), self._ancestors)
            self._add_part(grown, self._widths[begin:])
        return tuple(self._parts)

    def _add_part(self, grown: Grown, widths: tuple[int, ...]) -> None:
        self._parts.append(grown)
        self._widths_of_parts, self._in_parts = (*self._widths_of_parts, widths), len(self._levels)

    @property
    def shape(self) -> Shape:
        """What the shapes of `parts` and of the next passes depend on."""
        return Shape(len(self.limits), self.children, self._widths_of_parts)

    @classmethod
    def of_parts(
        cls, shape: Shape, last_tokens: Tensor, limits: Tensor | None, parts: Sequence[Grown], constants: _Constants
    ) -> Growth:
        """A growing tree that was taken apart, in a captured function; `constants` are those at the end of it."""
        growth = cls([0] * shape.rows, shape.children, last_tokens, limits)
        growth._given = constants
        for grown, widths in zip(parts, shape.widths, strict=True):
            growth.extend(grown, widths)
        return growth

    def extend(self, grown: Grown, widths: tuple[int, ...], selection: Selection | None = None) -> None:
        """Add the levels of passes that expanded so many nodes each, and of one before if there was none yet."""
        sizes = [self.children] * (not self.levels) + [width * self.children for width in widths]
        *paths, rest = grown.paths.split([*sizes, grown.paths.shape[1] - sum(sizes)], dim=1)
        *reached, self._open = rest.split([*widths, sizes[-1]], dim=1)
        parts = grown.integers.split([*sizes, *(widths if self.children > 1 else ())], dim=1)
        self._levels += map(_Level, parts[: len(sizes)], paths)
        self._expansions += map(_Expansion, reached, parts[len(sizes) :] or [None] * len(widths))
        self._ancestors, self._above = grown.ancestors, []
        self.levels, self.expanded = self.levels + len(sizes), self.expanded + sum(widths)
        self._widths += widths
        self._selection, self._values = selection, None
        self._add_part(grown, widths)

    def select(self, nodes: int) -> Selection:
        """The best nodes, at most so many, in the width of a captured pass."""
        tree, _ = self.best(nodes)
        return Selection.of(tree.padded(padded_width(1 + tree.nodes) - 1), self._open)

    def read(self) -> Snapshot:
        """Read the probabilities, in one transfer to the host; after a selection, all values of the selected nodes."""
        if self._selection is not None:
            self._values, opened = self._selection.parts(self._selection.known.cpu().numpy())
            paths = self._values[:, PATH, 1:]
        else:
            levels = [level.paths for level in self._levels]
            values = torch.cat([*levels, self._open], dim=1).cpu().numpy()
            paths, opened = values[:, : self.candidates], values[:, self.candidates :]
        if min(self.limits) <= self.levels:
            opened = np.where(np.array(self.limits)[:, None] > self.levels, opened, NO_NODE)
        return Snapshot(self.levels, _descending(paths), _descending(opened))

    def best(
        self, nodes: int, expanded_first: bool = False, with_expanded: bool = False
    ) -> tuple[GrownTree, Tensor | None]:
        """The best trees of at most `nodes` nodes; `[rows, nodes]` the number of each node's parent, if it is known.

        With `expanded_first` expanded nodes come first, whatever their probability; `with_expanded` they are among the
        nodes, of which there must be as many.
        """
        nodes, rows, constants = min(nodes, self.candidates), len(self.limits), self.constants
        if self._selection is not None and not expanded_first and not with_expanded:
            return self._selection.first(nodes, self._values, self.rows), None
        numbers, ids = constants.numbers[: self.children + self.candidates].expand(rows, -1), self.last_tokens
        if self.children > 1:
            chosen = [one.chosen for one in self._expansions if one.chosen is not None]
            ids = torch.cat([constants.root_ids.expand(rows, -1), *chosen], dim=1) + constants.offsets
            numbers = constants.unexpanded.expand(rows, -1).scatter(1, ids, numbers[:, : 1 + self.expanded])
        tokens, paths = zip(*self._levels, strict=True)
        parts = [self.last_tokens.expand(-1, self.children), *tokens, numbers, constants.places.expand(rows, -1)]
        parts += [constants.root_paths.expand(rows, -1), *paths]
        values = torch.cat(parts, dim=1).view(rows, 1 + PATH, -1)
        if self.children > 1:
            order = self._order(values[:, PATH], ids, nodes, expanded_first, with_expanded)
            values = values.gather(2, order[:, None].expand(-1, 1 + PATH, -1))
        values = values[:, :, : 1 + nodes]
        integers = values[:, : 1 + PARENT].long()
        structure = None
        if self.children > 1:
            is_parent = integers[:, PARENT, :, None] == integers[:, NUMBER, None]
            structure = TreeStructure(integers[:, DEPTH], ancestors_of(is_parent))
        shown: Any = {"drafting_rows": self.rows, "keeps_all": expanded_first, "inputs": integers[:, TOKEN]}
        return GrownTree(integers[:, TOKEN, 1:], structure, values, **shown), integers[:, PARENT, 1:]

    def _order(self, paths: Tensor, ids: Tensor, nodes: int, expanded_first: bool, with_expanded: bool) -> Tensor:
        """`[rows, 1 + nodes]` each row's last token and the candidates of its tree, parents before their children."""
        if not expanded_first and not with_expanded:
            return paths.topk(1 + nodes, dim=1).indices
        rest = paths.scatter(1, ids, -inf).topk(nodes - self.expanded, dim=1).indices
        order = torch.cat([ids, rest], dim=1)
        return order if expanded_first else order.gather(1, paths.gather(1, order).argsort(dim=1, descending=True))


class _Constants(NamedTuple):
    """What depends on the shape of a growing tree alone."""

    depths: Tensor  # [1 + expanded] of each row's last token and of the expanded nodes
    offsets: Tensor  # [1 + expanded] the candidate that index 0 of each one's level stands for
    numbers: Tensor  # 0, 1, 2, …, at least one for each candidate
    unexpanded: Tensor  # `UNEXPANDED` for each candidate
    places: Tensor  # [2 * candidates] depth, and number of the parent of each candidate
    root_paths: Tensor  # [children] logarithms of the path probabilities of group 0
    root_ids: Tensor  # [1] the number of each row's last token


@lru_cache(maxsize=256)
def _constants(children: int, widths: tuple[int, ...], device: torch.device) -> _Constants:
    """The constants of a tree whose levels were expanded by these widths."""
    depths, offsets, expanded = [0], [0], 0
    for level, width in enumerate(widths, start=1):
        group = 1 if level == 1 else 2 + expanded - widths[level - 2]
        depths += [level] * width
        offsets += [group * children] * width
        expanded += width
    groups = 2 + expanded
    size = groups * children
    places = [[depth] * children for depth in (0, *(1 + depth for depth in depths))]
    places += [[group - 1] * children for group in range(groups)]
    root = [0.0] + [2 * NO_NODE] * (children - 1)  # never chosen before a candidate
    flat = [value for group in places for value in group]
    lists = (depths, offsets, range(size), [UNEXPANDED] * size, flat, root, [0])
    return _Constants(*(torch.tensor(list(values), device=device) for values in lists))


def _descending(paths: Floats) -> Floats:
    """Probabilities of which the logarithms are known, sorted by row."""
    return probability_of(np.sort(paths, axis=1)[:, ::-1])


class Snapshot(NamedTuple):
    """What the host has read of a `Growth`: path probabilities of each row, in descending order."""

    levels: int
    probability: Floats  # [rows, candidates or selected nodes], 0 for those that are no node
    frontier: Floats  # [rows, last level] of candidates that can be expanded, else 0

    def may_improve(self, nodes: int) -> bool:
        """Whether expanding the frontier may change the best tree of a row of `nodes` nodes.

        A child of a node that is not among the best `nodes` nodes cannot be among them either.
        """
        least = self.probability[:, nodes - 1] if self.probability.shape[1] >= nodes else 0.0
        return bool((self.frontier[:, 0] > least).any())
