"""Draft trees of drafters with one forward pass per level, as tensors on the drafter's device.

A pass gives for some nodes likely next tokens with acceptance probabilities; the most likely ones are the nodes of the
next pass. Shapes depend on the number of levels, nodes and children alone, and nothing is decided by the host, so that
several levels can run without a read by the host.

All tokens that were proposed are *candidates*, in groups of siblings; those that a pass of the drafter has run on are
*expanded*, and are numbered in that order. A row whose last token is t, with two children of each node, after two
passes that expanded b as number 1 and then, in one pass, c as number 2 and d as number 3::

    t ─┬─ a                       group       0  0 | 1  1 | 2  2 | 3  3 | 4  4     children of the node with
       └─ b ─┬─ c ─┬─ e           token       t  . | a  b | c  d | e  f | g  h     number group - 1
             │     └─ f           number      0  . | .  1 | 2  3 | .  .   .  .     under which it was expanded
             └─ d ─┬─ g           depth       0  0 | 1  1 | 2  2 | 3  3   3  3
                   └─ h           parent     -1 -1 | 0  0 | 1  1 | 2  2   3  3     the number of its parent

    candidate index of each number (root, b, c, d): [0, 3, 4, 5]; index in its level: b 1, c 0, d 1

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

from hf_specgen.device_tree import (
    DEPTH,
    NO_NODE,
    NUMBER,
    PARENT,
    PATH,
    PLANES,
    TOKEN,
    Ancestors,
    DeviceTree,
    Frontier,
    HostCopy,
    Selection,
    probability_of,
)
from hf_specgen.targets.cache import padded_width
from hf_specgen.tree import TreeStructure, ancestors_of

Floats = NDArray[np.floating[Any]]
LEVELS_PER_READ = 4
"""Passes between reads of an accelerator by the host; on a CPU, where nothing has to wait, every level is read."""
CLOSED = 1e4
"""Subtracted from the log path probability of a candidate that cannot be expanded: it is chosen after all others."""
UNEXPANDED = -2
"""The number of a candidate that was not expanded."""


class _Level(NamedTuple):
    """The candidates of a level, `[rows, candidates]`: tokens, and logarithms of their path probabilities."""

    tokens: Tensor
    paths: Tensor


class _Expansion(NamedTuple):
    """Nodes that were expanded in one pass, `[rows, width]`."""

    paths: Tensor  # logarithms of their path probabilities, as in `Growth._open`
    chosen: Tensor | None = None  # their index in their level; None in a chain


class Grown(NamedTuple):
    """Consecutive levels of a growing tree, packed into few tensors for a captured function; see `Growth.extend`."""

    paths: Tensor  # `[rows, …]` of the candidates of each level, of each expansion's nodes, and `Growth._open`
    integers: Tensor  # `[rows, …]` the tokens of each level, then `chosen` of each expansion
    ancestors: Tensor | None  # the matrix of the last frontier; None before the first expansion


class Shape(NamedTuple):
    """The shape of a growing tree: rows, children of a node, and for each `Grown` the nodes that each pass expanded."""

    rows: int
    children: int
    widths: tuple[tuple[int, ...], ...]


class Growth:
    """Draft trees that grow by one level at a time.

    Args:
        depths: the maximum depth of each row's tree; 0 for a row without a draft.
        children: candidates after each node; 1 for chains.
        last_tokens: `[rows, 1]`.
        limits: `[rows, 1]` the depths as a tensor: needed if levels may go beyond them, as captured ones may.

    Attributes:
        levels: levels of candidates so far, which is also the depth of the last level.
        expanded: expanded nodes of each row.

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

    def __init__(self, depths: Sequence[int], children: int, last_tokens: Tensor, limits: Tensor | None = None):
        self.limits = list(depths)
        self.children = children
        self.last_tokens = last_tokens
        self.levels = 0
        self.expanded = 0
        self.rows = sum(depth > 0 for depth in depths)  # that have a draft; the batch has `len(limits)` rows
        self.levels_per_read = 1 if last_tokens.is_cpu else LEVELS_PER_READ
        self.limits_on_device = limits
        if limits is None and len(set(depths)) > 1:
            self.limits_on_device = torch.tensor(self.limits, device=last_tokens.device)[:, None]
        self._levels: list[_Level] = []
        self._expansions: list[_Expansion] = []
        self._widths: tuple[int, ...] = ()
        self._open: Tensor = last_tokens  # set by `add`: paths of the last level, low where it cannot be expanded
        self._ancestors = Ancestors(len(self.limits), 1, last_tokens.device)  # of the last frontier
        self._parts: list[Grown] = []  # the first `_levels_in_parts` levels
        self._widths_of_parts: tuple[tuple[int, ...], ...] = ()
        self._levels_in_parts = 0
        self._selection: Selection | None = None  # the best nodes, if a captured function has selected them
        self._read_values: Any = None  # what the host has read of them
        self._given_constants: Constants | None = None  # in a captured function

    @property
    def device(self) -> torch.device:
        """Where it grows."""
        return self.last_tokens.device

    @property
    def candidates(self) -> int:
        """How many candidates each row has."""
        return self.children * (1 + self.expanded)

    @property
    def last_level_width(self) -> int:
        """How many candidates of each row are in the last level."""
        return self.children * (self._widths[-1] if self._widths else 1)

    def add(self, tokens: Tensor, log_acceptance: Tensor, expandable: Tensor | None = None) -> None:
        """Add the children of the nodes that were expanded last, at first of each row's last token.

        Args:
            tokens: `[rows, expanded last, children]`, most preferred first.
            log_acceptance: of the same shape, the logarithm of the probability that the target chooses each, given that
                it reached the node.
            expandable: of the same shape, whether each may be expanded; None: all.
        """
        paths = log_acceptance + self._expansions[-1].paths[..., None] if self._expansions else log_acceptance
        paths = paths.flatten(1)
        if self.limits_on_device is not None:
            paths = paths.masked_fill(self.limits_on_device <= self.levels, NO_NODE)
        self._open = paths if expandable is None else torch.where(expandable.flatten(1), paths, paths - CLOSED)
        self._levels.append(_Level(tokens.flatten(1), paths))
        self.levels += 1
        self._selection = None

    def expand(self, width: int) -> Frontier:
        """Expand the likeliest candidates of the last level, so many of each row; the drafter's next pass reads them.

        A row with fewer expandable candidates expands others as padding; the children of these have probability 0.
        """
        self.expanded += width
        self._widths += (width,)
        tokens = self._levels[-1].tokens
        parent_index = None
        depths = None
        if self.children == 1:
            self._expansions.append(_Expansion(self._open))
        else:
            paths, index = self._open.topk(width, dim=1)
            self._expansions.append(_Expansion(paths, index))
            tokens = tokens.gather(1, index)
            parent_index = index // self.children if len(self._widths) > 1 else None
            depths = self.constants.depths[: 1 + self.expanded]
        self._ancestors = Ancestors(len(self.limits), width, self.device, self._ancestors, parent_index)
        return Frontier(tokens, self.levels, self.expanded, self.children == 1, self._ancestors, depths, parent_index)

    def structure(self) -> TreeStructure:
        """As `Frontier.structure`, for captured functions: of `constants`, which are not freed before a graph."""
        depths = self.constants.depths[: 1 + self.expanded].expand(len(self.limits), -1)
        return TreeStructure(depths, self._ancestors.matrix)

    @property
    def constants(self) -> Constants:
        """What depends on the shape of the tree alone."""
        return self._given_constants or self.constants_after(0, 0)

    def constants_after(self, passes: int, width: int) -> Constants:
        """The constants of the tree after so many passes, each of which expands so many nodes."""
        return _constants(self.children, self._widths + (width,) * passes, self.device)

    def parts(self) -> tuple[Grown, ...]:
        """All levels so far, packed: a `Grown` for the levels that were added between two calls of this method."""
        first = self._levels_in_parts
        if first < len(self._levels):
            begin = max(0, first - 1)  # `_levels[i + 1]` follows `_expansions[i]`, `_levels[0]` no expansion
            levels = self._levels[first:]
            expansions = self._expansions[begin:]
            paths = [*(level.paths for level in levels), *(expansion.paths for expansion in expansions), self._open]
            integers = [level.tokens for level in levels]
            integers += [expansion.chosen for expansion in expansions if expansion.chosen is not None]
            ancestors = self._ancestors.matrix if self._widths else None
            grown = Grown(torch.cat(paths, dim=1), torch.cat(integers, dim=1), ancestors)
            self._add_part(grown, self._widths[begin:])
        return tuple(self._parts)

    def _add_part(self, grown: Grown, widths: tuple[int, ...]) -> None:
        self._parts.append(grown)
        self._widths_of_parts = (*self._widths_of_parts, widths)
        self._levels_in_parts = len(self._levels)

    @property
    def shape(self) -> Shape:
        """What the shapes of `parts` and of the next passes depend on."""
        return Shape(len(self.limits), self.children, self._widths_of_parts)

    @classmethod
    def of_parts(
        cls, shape: Shape, last_tokens: Tensor, limits: Tensor | None, parts: Sequence[Grown], constants: Constants
    ) -> Growth:
        """Rebuild a growing tree from `parts` in a captured function; `constants` are of the tree at its end."""
        growth = cls([0] * shape.rows, shape.children, last_tokens, limits)  # the host's limits are not read in it
        growth._given_constants = constants
        for grown, widths in zip(parts, shape.widths, strict=True):
            growth.extend(grown, widths)
        return growth

    def extend(self, grown: Grown, widths: tuple[int, ...], selection: Selection | None = None) -> None:
        """Add packed levels: one after each expansion of `widths` nodes; before them level 1 if there is no level."""
        sizes = [self.children] * (not self.levels) + [width * self.children for width in widths]
        *paths, rest = grown.paths.split([*sizes, grown.paths.shape[1] - sum(sizes)], dim=1)
        *expanded_paths, self._open = rest.split([*widths, sizes[-1]], dim=1)
        integers = grown.integers.split([*sizes, *(widths if self.children > 1 else ())], dim=1)
        tokens = integers[: len(sizes)]
        index = integers[len(sizes) :] or [None] * len(widths)
        self._levels += map(_Level, tokens, paths)
        self._expansions += map(_Expansion, expanded_paths, index)
        if grown.ancestors is not None:
            self._ancestors = Ancestors.of(grown.ancestors)
        self.levels += len(sizes)
        self.expanded += sum(widths)
        self._widths += widths
        self._selection = selection
        self._read_values = None
        self._add_part(grown, widths)

    def select(self, nodes: int) -> Selection:
        """The best nodes, at most so many, padded to the width of a captured pass; and the last level."""
        tree, _ = self.best(nodes)
        return Selection.of(tree.padded(padded_width(1 + tree.nodes) - 1), self._open)

    def read(self) -> Snapshot:
        """Read the probabilities, in one transfer to the host; after a selection, all values of the selected nodes."""
        if self._selection is not None:
            self._read_values, opened = self._selection.split(self._selection.read.cpu().numpy())
            paths = self._read_values[:, PATH, 1:]
        else:
            values = torch.cat([*(level.paths for level in self._levels), self._open], dim=1).cpu().numpy()
            paths = values[:, : self.candidates]
            opened = values[:, self.candidates :]
        if min(self.limits) <= self.levels:
            opened = np.where(np.array(self.limits)[:, None] > self.levels, opened, NO_NODE)
        return Snapshot(self.levels, _descending(paths), _descending(opened))

    def best(
        self, nodes: int, expanded_first: bool = False, with_expanded: bool = False
    ) -> tuple[DeviceTree, Tensor | None]:
        """The most probable trees of at most `nodes` nodes, and `[rows, nodes]` the number of each node's parent.

        With `expanded_first` all expanded nodes come first, in their order; `with_expanded` includes them all, sorted
        by probability; both need `nodes >= expanded`. The parents are None if the tree comes from a selection.
        """
        nodes = min(nodes, self.candidates)
        if self._selection is not None and not expanded_first and not with_expanded:
            return self._selection.first(nodes, self._read_values, self.rows), None
        ids = self._expanded_ids()
        values = self._values(ids)
        if self.children > 1:
            order = self._order(values[:, PATH], ids, nodes, expanded_first, with_expanded)
            values = values.gather(2, order[:, None].expand(-1, PLANES, -1))
        values = values[:, :, : 1 + nodes]
        integers = values[:, : 1 + PARENT].long()
        structure = None
        if self.children > 1:
            is_parent = integers[:, PARENT, :, None] == integers[:, NUMBER, None]
            structure = TreeStructure(integers[:, DEPTH], ancestors_of(is_parent))
        host = HostCopy(values, structure is None, includes_rejected=expanded_first)
        return DeviceTree(values, integers[:, TOKEN], structure, self.rows, host), integers[:, PARENT, 1:]

    def _expanded_ids(self) -> Tensor | None:
        """`[rows, 1 + expanded]` the candidate index of each number; None for chains, where both are equal."""
        if self.children == 1:
            return None
        root = self.constants.root_id.expand(len(self.limits), -1)
        chosen = [expansion.chosen for expansion in self._expansions if expansion.chosen is not None]
        return torch.cat([root, *chosen], dim=1) + self.constants.level_starts

    def _values(self, ids: Tensor | None) -> Tensor:
        """`[rows, PLANES, children + candidates]` values by candidate index, from group 0 on, see `DeviceTree`."""
        rows = len(self.limits)
        constants = self.constants
        numbers = constants.numbers[: self.children + self.candidates].expand(rows, -1)
        if ids is not None:
            numbers = constants.unexpanded.expand(rows, -1).scatter(1, ids, numbers[:, : 1 + self.expanded])
        # All planes are concatenated in one operation. Candidates whose drafter gave NaN are no nodes.
        tokens = [self.last_tokens.expand(-1, self.children), *(level.tokens for level in self._levels)]
        depths_and_parents = constants.depths_and_parents.expand(rows, -1)
        paths = [constants.root_paths.expand(rows, -1), *(level.paths for level in self._levels)]
        values = torch.cat([*tokens, numbers, depths_and_parents, *paths], dim=1)
        return values.nan_to_num(NO_NODE, inf, -inf).view(rows, PLANES, -1)

    def _order(
        self, paths: Tensor, ids: Tensor | None, nodes: int, expanded_first: bool, with_expanded: bool
    ) -> Tensor:
        """`[rows, 1 + nodes]` candidate indices: each row's last token, then its nodes, parents before children."""
        if ids is None or not (expanded_first or with_expanded):
            return paths.topk(1 + nodes, dim=1).indices
        others = paths.scatter(1, ids, -inf).topk(nodes - self.expanded, dim=1).indices
        order = torch.cat([ids, others], dim=1)
        return order if expanded_first else order.gather(1, paths.gather(1, order).argsort(dim=1, descending=True))


class Constants(NamedTuple):
    """Tensors that depend on the shape of a growing tree alone; they count group 0 among the candidates."""

    depths: Tensor  # [1 + expanded] of each row's last token and of the expanded nodes
    level_starts: Tensor  # [1 + expanded] the candidate index with which the level of each expanded node begins
    numbers: Tensor  # 0, 1, 2, …, at least one for each candidate
    unexpanded: Tensor  # `UNEXPANDED` for each candidate
    depths_and_parents: Tensor  # [2 * candidates] the depths of all, then the numbers of the parents of all
    root_paths: Tensor  # [children] logarithms of the path probabilities of group 0
    root_id: Tensor  # [1] the candidate index of each row's last token


@lru_cache(maxsize=256)
def _constants(children: int, widths: tuple[int, ...], device: torch.device) -> Constants:
    """The constants of a tree whose levels were expanded by these widths."""
    depths = [0]
    level_starts = [0]
    expanded = 0
    for level, width in enumerate(widths, start=1):
        # Group n + 1 has the children of number n; a level begins with children of the first node of the last pass.
        first_group = 1 if level == 1 else 2 + expanded - widths[level - 2]
        depths += [level] * width
        level_starts += [first_group * children] * width
        expanded += width
    groups = 2 + expanded
    size = groups * children
    depth_of_group = [0, *(1 + depth for depth in depths)]
    depth_of_candidate = [depth for depth in depth_of_group for _ in range(children)]
    parent_of_candidate = [group - 1 for group in range(groups) for _ in range(children)]
    root_paths = [0.0] + [2 * NO_NODE] * (children - 1)  # the others in group 0 are never chosen before a candidate

    def tensor(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=device)

    return Constants(
        depths=tensor(depths),
        level_starts=tensor(level_starts),
        numbers=tensor(range(size)),
        unexpanded=tensor([UNEXPANDED] * size),
        depths_and_parents=tensor(depth_of_candidate + parent_of_candidate),
        root_paths=tensor(root_paths),
        root_id=tensor([0]),
    )


def _descending(paths: Floats) -> Floats:
    """`[rows, …]` logarithms to probabilities, in each row in descending order."""
    return probability_of(np.sort(np.nan_to_num(paths, nan=NO_NODE), axis=1)[:, ::-1])


class Snapshot(NamedTuple):
    """What the host has read of a `Growth`: path probabilities of each row, in descending order."""

    levels: int
    probability: Floats  # [rows, candidates or selected nodes], 0 where there is no node
    expandable: Floats  # [rows, last level], 0 where a candidate cannot be expanded

    def may_improve(self, nodes: int) -> bool:
        """Whether expanding candidates of the last level may change any row's best tree of `nodes` nodes.

        A child of a node that is not among the best `nodes` nodes cannot be among them either.
        """
        least = self.probability[:, nodes - 1] if self.probability.shape[1] >= nodes else 0.0
        return bool((self.expandable[:, 0] > least).any())
