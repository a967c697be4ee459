"""Draft trees of drafters with one forward pass per level, as tensors on the drafter's device.

A pass gives for some nodes likely next tokens with acceptance probabilities; the most likely ones are the nodes of the
next pass. Shapes depend on the numbers of levels, nodes and children alone, so several levels run without a host
synchronization.

All tokens that were proposed are *candidates*; the children of a node are a *group*. Candidates that a pass of the
drafter has run on are *expanded*; their *expansion index* counts them in that order, and is 0 for the row's last token.
Group n + 1 has the children of expansion index n. Group 0 is the row's last token and `children - 1` padding entries.
A *candidate index* counts the entries of all groups, group 0 included; `num_candidates` excludes group 0. A row whose
last token is t, with two children of each node, after two passes that expanded b (1), then c (2) and d (3)::

    t ─┬─ a                     group      0  0 | 1  1 | 2  2 | 3  3   4  4     by candidate index 0, 1, 2, …
       └─ b ─┬─ c ─┬─ e         token      t  . | a  b | c  d | e  f   g  h     bars separate levels
             │     └─ f         expansion  0  . | .  1 | 2  3 | .  .   .  .     expansion index; none: not expanded
             └─ d ─┬─ g         depth      0  0 | 1  1 | 2  2 | 3  3   3  3
                   └─ h         parent    -1 -1 | 0  0 | 1  1 | 2  2   3  3     the expansion index of its parent

    candidate index of t, b, c, d: [0, 3, 4, 5] = [0, 2, 4, 4] where their level begins + [0, 1, 0, 1] in their level

Source: Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees" (2024), section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from math import inf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_specgen.candidates.level_tensors import Expansion, LevelTensors, TreeLevel
from hf_specgen.device_tree import (
    DEPTH,
    EXPANSION_INDEX,
    LOG_PATH,
    NO_NODE,
    PARENT,
    PLANES,
    TOKEN,
    UNEXPANDED,
    Ancestors,
    DeviceTree,
    Floats,
    Frontier,
    NodeSelection,
    probability_of,
)
from hf_specgen.targets.cache import padded_tokens
from hf_specgen.tree import TreeStructure, ancestors_of

LEVELS_PER_SYNC = 4
"""Passes of the drafter between two synchronizations with the host; 1 on a CPU."""
NOT_EXPANDABLE_PENALTY = 1e4
"""Subtracted from the expansion score of a candidate that must not be expanded: it is expanded only as padding."""


class TreeBuilder:
    """Builds the draft trees of one step, level by level, as tensors on the drafter's device.

    Args:
        max_depths: the maximum depth of each row's tree; 0 for a row without a draft.
        children: candidates after each node; 1 for chains.
        last_tokens: `[rows, 1]` the root of each row's tree.
        depths_on_device: `[rows, 1]` the `max_depths`: needed if levels may exceed all of them, as captured ones may.

    Example:
        >>> builder = TreeBuilder([2], children=2, last_tokens=torch.tensor([[4]]))
        >>> builder.add(torch.tensor([[[5, 6]]]), torch.tensor([[[0.6, 0.3]]]).log())
        >>> builder.select_frontier(1).tokens.tolist()  # the most likely node is expanded first
        [[5]]
        >>> builder.add(torch.tensor([[[7, 8]]]), torch.tensor([[[0.9, 0.1]]]).log())
        >>> tree = builder.best(3)  # of 4 nodes: 5, then 7 below it (0.54), then 6 (0.3)
        >>> tree.token_lists(), tree.parents
        ([[5, 7, 6]], ((-1, 0, -1),))
    """

    _expansion_scores: Tensor
    """`[rows, last level]` log path probabilities by which the last level is expanded."""

    def __init__(
        self, max_depths: Sequence[int], children: int, last_tokens: Tensor, depths_on_device: Tensor | None = None
    ):
        self.max_depths = list(max_depths)
        self.children = children
        self.last_tokens = last_tokens
        self.num_levels = 0  # levels of candidates so far, which is also the depth of the last level
        self.num_expanded = 0  # how many nodes of each row are expanded so far
        self.levels_per_sync = 1 if last_tokens.is_cpu else LEVELS_PER_SYNC
        self.max_depths_on_device = depths_on_device
        if depths_on_device is None and len(set(max_depths)) > 1:  # if all are equal, no level exceeds any of them
            self.max_depths_on_device = torch.tensor(self.max_depths, device=last_tokens.device)[:, None]
        self._levels: list[TreeLevel] = []
        self._expansions: list[Expansion] = []  # the n-th one comes before level n + 1
        self._widths: tuple[int, ...] = ()  # of the expansions
        self._ancestors = Ancestors(len(self.max_depths), 1, last_tokens.device)  # of the last frontier
        self._level_tensors: list[LevelTensors] = []  # the first `_num_packed_levels` levels, packed
        self._num_packed_levels = 0
        # The best nodes, if a captured function has made the last levels, and their values once the host has read them.
        self._selection: NodeSelection | None = None
        self._host_values: Floats | None = None
        self._final_constants: ShapeConstants | None = None  # after all levels of a captured function, if in one

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.last_tokens.device

    @property
    def num_candidates(self) -> int:
        """How many candidates each row has."""
        return self.children * (1 + self.num_expanded)

    @property
    def last_level_size(self) -> int:
        """How many candidates of each row are in the last level."""
        return self.children * (self._widths[-1] if self._widths else 1)

    def add(self, tokens: Tensor, log_acceptance: Tensor, may_expand: Tensor | None = None) -> None:
        """Add a level: the children of the nodes that were expanded last, or at first of each row's last token.

        Args:
            tokens: `[rows, expanded last, children]`, most preferred first.
            log_acceptance: of the same shape, the logarithm of the probability that the target chooses each, given that
                it reached the node; a candidate with NaN or -inf is no node.
            may_expand: of the same shape, whether each may be expanded; None: all.
        """
        log_paths = log_acceptance
        if self._expansions:
            log_paths = log_paths + self._expansions[-1].scores[..., None]  # acceptance times that of the parent
        log_paths = log_paths.flatten(1).nan_to_num(nan=NO_NODE, neginf=NO_NODE)
        if self.max_depths_on_device is not None:  # the children have the depth `num_levels + 1`
            log_paths = log_paths.masked_fill(self.max_depths_on_device <= self.num_levels, NO_NODE)
        self._expansion_scores = log_paths
        if may_expand is not None:  # others stay candidates, but have no children
            self._expansion_scores = torch.where(may_expand.flatten(1), log_paths, log_paths - NOT_EXPANDABLE_PENALTY)
        self._levels.append(TreeLevel(tokens.flatten(1), log_paths))
        self.num_levels += 1
        self._selection = None

    def select_frontier(self, width: int) -> Frontier:
        """Select the `width` candidates of each row's last level with the highest expansion scores (1 in chains).

        They count as expanded: the next drafter pass reads them, and `add` adds their children. If a row has fewer
        expandable candidates, others fill the width, and their children have probability 0.
        """
        self.num_expanded += width
        self._widths += (width,)
        tokens = self._levels[-1].tokens
        parent_index = None
        depths = None
        is_chain = self.children == 1
        if is_chain:
            self._expansions.append(Expansion(self._expansion_scores))
        else:
            scores, index = self._expansion_scores.topk(width, dim=1)
            self._expansions.append(Expansion(scores, index))
            tokens = tokens.gather(1, index)
            # In a level the groups are in the order of the frontier before this one, which at first is the root.
            parent_index = index // self.children if len(self._widths) > 1 else None
            depths = self.constants.depths[: 1 + self.num_expanded]
        self._ancestors = Ancestors(len(self.max_depths), width, self.device, self._ancestors, parent_index)
        return Frontier(tokens, self.num_levels, self.num_expanded, is_chain, self._ancestors, depths, parent_index)

    def frontier_structure(self) -> TreeStructure:
        """Depths of the last token and all expanded nodes (from `constants`), and ancestors of the last frontier."""
        depths = self.constants.depths[: 1 + self.num_expanded].expand(len(self.max_depths), -1)
        return TreeStructure(depths, self._ancestors.matrix)

    @property
    def constants(self) -> ShapeConstants:
        """What depends on the shape of the tree alone; in a captured function, on its shape after the last pass."""
        return self._final_constants or self.constants_after(0, 0)

    def constants_after(self, passes: int, width: int) -> ShapeConstants:
        """The constants of the tree after further passes, each of which expands `width` nodes of a row."""
        return _constants(self.children, self._widths + (width,) * passes, self.device)

    def pack_levels(self) -> tuple[LevelTensors, ...]:
        """`LevelTensors` of all levels: those that were packed before, and one that packs the levels since then."""
        first = self._num_packed_levels  # the index of the first level that is not packed
        if first < len(self._levels):
            # `_levels[i]` comes after `_expansions[i - 1]`, and `_levels[0]` after none.
            first_expansion = max(0, first - 1)
            levels = self._levels[first:]
            expansions = self._expansions[first_expansion:]
            ancestors = self._ancestors.matrix if self._widths else None
            self._level_tensors.append(LevelTensors.pack(levels, expansions, self._expansion_scores, ancestors))
            self._num_packed_levels = len(self._levels)
        return tuple(self._level_tensors)

    @classmethod
    def from_level_tensors(
        cls,
        level_tensors: Sequence[LevelTensors],
        children: int,
        last_tokens: Tensor,
        depths_on_device: Tensor | None,
        final_constants: ShapeConstants,
    ) -> TreeBuilder:
        """Rebuild a tree in a captured function; the constants are those after all passes of the function."""
        builder = cls([0] * len(last_tokens), children, last_tokens, depths_on_device)  # host depths are not used
        builder._final_constants = final_constants
        for tensors in level_tensors:
            builder.add_packed_levels(tensors)
        return builder

    def add_packed_levels(self, tensors: LevelTensors, selection: NodeSelection | None = None) -> None:
        """Add levels that `pack_levels` of another builder has returned, as in a captured function.

        Args:
            tensors: the levels after the present ones.
            selection: the best nodes of the tree with these levels; None: `best` selects them.
        """
        levels, expansions, self._expansion_scores = tensors.unpack(self.children, is_first=not self._levels)
        # What `select_frontier` changes, for each of the expansions.
        self._expansions += expansions
        self._widths += tensors.widths
        self.num_expanded += sum(tensors.widths)
        if tensors.ancestors is not None:
            self._ancestors = Ancestors.of(tensors.ancestors)
        # What `add` changes, for each of the levels.
        self._levels += levels
        self.num_levels += len(levels)
        self._selection = selection
        self._host_values = None
        self._level_tensors.append(tensors)  # these levels are packed already
        self._num_packed_levels = len(self._levels)

    def padded_selection(self, nodes: int) -> NodeSelection:
        """Select the best `nodes` nodes, padded to the width of a captured pass; with the expansion scores."""
        tree = self.best(nodes)
        return NodeSelection.of(tree.padded(padded_tokens(1 + tree.nodes) - 1), self._expansion_scores)

    def read_probabilities(self) -> ProbabilitySnapshot:
        """Read the path probabilities, and those of the last level for its expansion, on the host in one transfer.

        If a captured function has selected nodes, only these are read. Side effect: their values are kept for `best`.
        """
        if self._selection is not None:
            flat = self._selection.flat.cpu().numpy()
            values, scores = self._selection.split(flat)
            self._host_values = values
            log_paths = values[:, LOG_PATH, 1:]
        else:
            levels = (level.log_paths for level in self._levels)
            flat = torch.cat([*levels, self._expansion_scores], dim=1).cpu().numpy()
            log_paths = flat[:, : self.num_candidates]
            scores = flat[:, self.num_candidates :]
        if min(self.max_depths) <= self.num_levels:  # nodes at the maximum depth of their row are not expanded
            scores = np.where(np.array(self.max_depths)[:, None] > self.num_levels, scores, NO_NODE)
        return ProbabilitySnapshot(self.num_levels, _descending(log_paths), _descending(scores))

    def best(self, nodes: int) -> DeviceTree:
        """The most probable tree of each row, of at most `nodes` nodes in descending order of path probability."""
        nodes = min(nodes, self.num_candidates)
        if self._selection is not None:
            return self._selection.first(nodes, self._host_values)
        values = self._values_of_candidates(self._expanded_candidate_indices())
        selected = None  # chains have this order already
        if self.children > 1:
            # Parents precede children, equally likely ones too: the sort is stable, and parents have lower indices.
            selected = values[:, LOG_PATH].sort(dim=1, descending=True, stable=True).indices[:, : 1 + nodes]
        tree, _ = self._device_tree(values, selected, nodes)
        return tree

    def best_with_expanded(self, nodes: int, expanded_first: bool) -> tuple[DeviceTree, Tensor]:
        """The trees of all expanded nodes and the most probable others.

        Returns the trees, and `[rows, nodes]` the expansion index of each node's parent (0: the row's last token).

        Args:
            nodes: how many nodes at most, but at least `num_expanded`.
            expanded_first: expanded nodes first, in their order, then the others; if not, all by path probability.
        """
        nodes = min(nodes, self.num_candidates)
        expanded = self._expanded_candidate_indices()
        values = self._values_of_candidates(expanded)
        selected = None
        if expanded is not None:
            log_paths = values[:, LOG_PATH]
            # The most probable candidates but the last token and the expanded ones, which are selected in any case.
            further = log_paths.scatter(1, expanded, -inf).topk(nodes - self.num_expanded, dim=1).indices
            selected = torch.cat([expanded, further], dim=1)
            if not expanded_first:
                by_probability = log_paths.gather(1, selected).argsort(dim=1, descending=True, stable=True)
                selected = selected.gather(1, by_probability)
        # Where expanded nodes come first, those that are padding keep their places too.
        return self._device_tree(values, selected, nodes, keeps_placeholders=expanded_first)

    def _device_tree(
        self, values: Tensor, selected: Tensor | None, nodes: int, keeps_placeholders: bool = False
    ) -> tuple[DeviceTree, Tensor]:
        """Trees of some candidates, and `[rows, nodes]` the expansion index of each node's parent.

        Args:
            values: of all candidates, see `_values_of_candidates`.
            selected: `[rows, 1 + nodes]` the candidate index of each row's last token, then of the nodes; children come
                after their parents. None for chains, of which the first nodes are taken.
            nodes: how many nodes a row has.
            keeps_placeholders: see `DeviceTree`.
        """
        if selected is not None:
            values = values.gather(2, selected[:, None].expand(-1, PLANES, -1))
        values = values[:, :, : 1 + nodes]
        integers = values[:, :LOG_PATH].long()
        structure = None
        if selected is not None:
            is_parent = integers[:, PARENT, :, None] == integers[:, EXPANSION_INDEX, None]
            structure = TreeStructure(integers[:, DEPTH], ancestors_of(is_parent))
        tree = DeviceTree(values, integers[:, TOKEN], structure, keeps_placeholders)
        return tree, integers[:, PARENT, 1:]

    def _expanded_candidate_indices(self) -> Tensor | None:
        """`[rows, 1 + expanded]` the candidate index of each expansion index; None for chains, where both are equal."""
        if self.children == 1:
            return None
        root = self.constants.root_index.expand(len(self.max_depths), -1)
        indices = [expansion.indices for expansion in self._expansions if expansion.indices is not None]
        return torch.cat([root, *indices], dim=1) + self.constants.level_starts

    def _values_of_candidates(self, expanded: Tensor | None) -> Tensor:
        """`[rows, PLANES, children + candidates]` values by candidate index, from group 0 on, see `DeviceTree`."""
        rows = len(self.max_depths)
        constants = self.constants
        indices = constants.expansion_indices.expand(rows, -1)
        if expanded is not None:  # expansion index n belongs to the candidate `expanded[n]`
            indices = constants.unexpanded.expand(rows, -1).scatter(1, expanded, indices[:, : 1 + self.num_expanded])
        tokens = [self.last_tokens.expand(-1, self.children), *(level.tokens for level in self._levels)]
        depths_and_parents = constants.depths_and_parents.expand(rows, -1)
        log_paths = [constants.root_log_paths.expand(rows, -1), *(level.log_paths for level in self._levels)]
        # All planes in one operation: TOKEN, EXPANSION_INDEX, DEPTH and PARENT, LOG_PATH; as float32, in which token
        # ids below 2**24 are exact.
        return torch.cat([*tokens, indices, depths_and_parents, *log_paths], dim=1).view(rows, PLANES, -1)


class ShapeConstants(NamedTuple):
    """Tensors that depend on the tree's shape alone. An *entry* is a candidate of any group, or padding of group 0."""

    depths: Tensor  # [1 + expanded] of each row's last token and of the expanded nodes
    level_starts: Tensor  # [1 + expanded] the candidate index with which the level of each expanded node begins
    expansion_indices: Tensor  # 0, 1, 2, …, one for each entry, group 0 included
    unexpanded: Tensor  # `UNEXPANDED`, one for each entry, group 0 included
    depths_and_parents: Tensor  # [2 * entries] the depths of all, then the expansion indices of their parents
    root_log_paths: Tensor  # [children] logarithms of the path probabilities of group 0
    root_index: Tensor  # [1] the candidate index of each row's last token


@lru_cache(maxsize=256)
def _constants(children: int, widths: tuple[int, ...], device: torch.device) -> ShapeConstants:
    """The constants of a tree whose levels were expanded by these widths."""
    depths = [0]
    level_starts = [0]
    expanded = 0
    for level, width in enumerate(widths, start=1):
        # A level begins with group n + 1, n the expansion index of the first node of the previous pass, or 0: the root.
        first_parent = 0 if level == 1 else 1 + expanded - widths[level - 2]
        depths += [level] * width
        level_starts += [(first_parent + 1) * children] * width
        expanded += width
    groups = 2 + expanded
    size = groups * children
    depth_of_group = [0, *(1 + depth for depth in depths)]
    depth_of_candidate = [depth for depth in depth_of_group for _ in range(children)]
    parent_of_candidate = [group - 1 for group in range(groups) for _ in range(children)]
    root_log_paths = [0.0] + [-inf] * (children - 1)  # the others in group 0 are never chosen before a candidate
    tensor = partial(torch.tensor, device=device)
    return ShapeConstants(
        depths=tensor(depths),
        level_starts=tensor(level_starts),
        expansion_indices=tensor(range(size)),
        unexpanded=tensor([UNEXPANDED] * size),
        depths_and_parents=tensor(depth_of_candidate + parent_of_candidate),
        root_log_paths=tensor(root_log_paths),
        root_index=tensor([0]),
    )


def _descending(log_paths: Floats) -> Floats:
    """`[rows, …]` logarithms to probabilities, in each row in descending order."""
    return probability_of(np.sort(log_paths, axis=1)[:, ::-1])


class ProbabilitySnapshot(NamedTuple):
    """What the host has read of a `TreeBuilder`: path probabilities of each row, in descending order."""

    num_levels: int
    probability: Floats  # [rows, candidates or selected nodes], 0 where there is no node
    expansion_probability: Floats  # [rows, last level], descending too; 0 where a candidate cannot be expanded

    def may_improve(self, nodes: int) -> bool:
        """Whether expanding candidates of the last level may change any row's best tree of `nodes` nodes.

        No child is more likely than its parent, so only a candidate among the best `nodes` can have one among them.
        """
        least = self.probability[:, nodes - 1] if self.probability.shape[1] >= nodes else 0.0
        return bool((self.expansion_probability[:, 0] > least).any())
