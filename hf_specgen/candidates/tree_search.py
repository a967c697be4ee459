"""Draft trees as arrays, for drafters with one forward pass per level, and how large all kinds of draft trees become.

A drafter gives for some nodes likely next tokens with acceptance probabilities. The path probability of a node is their
product along its path. The expected number of tokens of a step is one plus the sum of the path probabilities of its
nodes, so the best tree of a given size consists of the nodes with the highest ones. They form a tree, since no node is
more likely than its parent.

Source: Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees" (2024), section 4; Chen et
al., "Sequoia" (2024), section 3, for the best tree of a given size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, zip_longest
from math import inf, isqrt
from typing import Any, Generic

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from hf_specgen.candidates.base import DraftCall, DraftSession, Tree
from hf_specgen.candidates.best_first import SearchLimits, SearchTree, Tag
from hf_specgen.depth.latency import CostCurve, DraftLatency, StepLatency
from hf_specgen.tree import NO_NODE, DraftTree, GrownTree, TreeStructure

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.integer[Any]]
CLOSED = 1e4
"""Subtracted from the logarithm of the probability of a candidate that cannot be expanded."""
LEVELS_PER_READ = 4
"""Passes between two reads of the probabilities by the host, which waits for an accelerator then. A CPU waits anyway
and reads after every pass that decides about the next one."""
MAX_NODES = 64
"""Maximum number of nodes of a row: beyond, each further one adds to the latency even of a memory-bound target."""
MAX_CHILDREN = 8
"""Maximum number of children of a node, and of nodes of a row that are expanded in one pass."""
MIN_GAIN = 0.001
"""Relative gain in expected tokens per second below which no pass of the drafter is made, even if it costs nothing."""


class Growth:
    """Draft trees that grow by one pass of the drafter at a time, as tensors on the drafter's device.

    Every expanded node has the same number of candidate children. Expanded node 0 is the row's last token, and
    candidate ``i`` is a child of expanded node ``i // children``.

    Args:
        depths: `[rows]` maximum depth of each row's tree; 0 for a row without a draft.
        children: of a node; 1 for chains.

    Attributes:
        tokens: `[rows, candidates]` of every candidate.
        levels: passes so far; no candidate is deeper.
        expanded: how many nodes of each row were expanded, without its last token.

    Example:
        >>> growth = Growth([2], children=2)
        >>> bins = torch.zeros(1, 1, 2)
        >>> growth.add(torch.tensor([[[5, 6]]]), torch.tensor([[[0.6, 0.3]]]).log(), bins)
        >>> growth.expand(1).tokens.tolist()  # the most likely node is expanded first
        [[5]]
        >>> growth.add(torch.tensor([[[7, 8]]]), torch.tensor([[[0.9, 0.1]]]).log(), bins)
        >>> tree, _ = growth.best(3)  # of 4 nodes: 5, then 7 below it (0.54), then 6 (0.3)
        >>> tree.token_lists(), tree.parents
        ([[5, 7, 6]], ((-1, 0, -1),))
    """

    tokens: Tensor
    _open: Tensor

    def __init__(self, depths: Sequence[int], children: int):
        self.limits, self.children, self.levels, self.expanded = list(depths), children, 0, 0
        self.rows = sum(depth > 0 for depth in depths)
        self._paths: list[Tensor] = []
        self._features: list[Tensor] = []
        self._shallowest = min((depth for depth in depths if depth), default=0)

    def add(self, tokens: Tensor, log_acceptance: Tensor, features: Tensor, expandable: Tensor | None = None) -> None:
        """Add the children of the nodes that were expanded last, at first of each row's last token.

        Args:
            tokens: `[rows, expanded, children]`, most preferred first.
            log_acceptance: of the same shape: logarithm of the probability that the target chooses the token, given
                that it reached the node; below 0.
            features: of the same shape.
            expandable: of the same shape: whether a child may be expanded.
        """
        is_first = self.levels == 0
        if is_first:
            self._begin(log_acceptance)
        self.levels += 1
        path = (self._above[..., None] + log_acceptance).flatten(1)
        opened = path
        if self.levels >= self._shallowest and self._limits is not None:
            depth = 1 + self._depths[:, -self._above.shape[1] :].repeat_interleave(self.children, dim=1)
            path = path.masked_fill(depth > self._limits, NO_NODE)
            opened = torch.where(depth < self._limits, path, path - CLOSED)
        if expandable is not None:
            opened = torch.where(expandable.flatten(1), opened, path - CLOSED)
        self._paths.append(path)
        self._features.append(features.flatten(1))
        tokens = tokens.flatten(1)
        self.tokens = tokens if is_first else torch.cat([self.tokens, tokens], dim=1)
        if self.children > 1:
            self._open = opened if is_first else torch.cat([self._open, opened], dim=1)

    @property
    def log_probability(self) -> Tensor:
        """`[rows, candidates]` logarithm of each candidate's path probability."""
        if len(self._paths) > 1:
            self._paths = [torch.cat(self._paths, dim=1)]
        return self._paths[0]

    def _begin(self, like: Tensor) -> None:
        rows, device = len(self.limits), like.device
        self._above = like.new_zeros(rows, 1)
        self._depths = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self._limits: Tensor | None = None
        if self.children > 1 or len(set(self.limits)) > 1:
            self._limits = torch.tensor(self.limits, device=device)[:, None]
        if 0 in self.limits and self._limits is not None:
            self._above = torch.where(self._limits > 0, self._above, NO_NODE)
        self._reached = [self._above]
        self._ancestors = torch.ones(rows, 1, 1, dtype=torch.bool, device=device)
        self._parents = self._nodes = self._depths[:, :0]

    def expand(self, width: int) -> GrownTree:
        """Choose the most likely candidates that were not expanded: the nodes of the drafter's next pass.

        A row with fewer of them is filled up with others, whose children have no probability.

        Returns:
            The tree of all expanded nodes, the new ones last.
        """
        if self.children == 1:
            self._above, self.expanded = self._paths[-1][:, -1:], self.levels
            if self._limits is not None:
                self._depths = torch.cat([self._depths, self._depths[:, -1:] + 1], dim=1)
            self._reached.append(self._above)
            return GrownTree(self.tokens, drafting_rows=self.rows)
        self._above, index = self._open.topk(width, dim=1)
        self._open = self._open.scatter(1, index, -inf)
        parent = index // self.children
        rows = self._ancestors.gather(1, parent[..., None].expand(-1, -1, self._ancestors.shape[2]))
        itself = _identity(width, index.device).expand(len(index), -1, -1)
        self._ancestors = torch.cat([pad(self._ancestors, (0, width)), torch.cat([rows, itself], dim=2)], dim=1)
        self._parents = torch.cat([self._parents, parent], dim=1)
        self._depths = torch.cat([self._depths, self._depths.gather(1, parent) + 1], dim=1)
        self._reached.append(self._above)
        self._nodes, self.expanded = torch.cat([self._nodes, index], dim=1), self.expanded + width
        structure = TreeStructure(self._parents, self._depths, self._ancestors)
        return GrownTree(self.tokens.gather(1, self._nodes), structure, drafting_rows=self.rows)

    def read(self) -> Snapshot:
        """Read the probabilities, in one transfer to the host."""
        paths, count = self.log_probability, self.tokens.shape[1]
        opened = paths if self.children == 1 else self._open
        values = np.exp(torch.cat([paths, opened, *self._reached], dim=1).cpu().numpy().astype(float))
        frontier = values[:, count : 2 * count]
        if self.children == 1:
            frontier[:, : self.expanded] = 0.0
        return Snapshot(values[:, :count], frontier, values[:, 2 * count :])

    def best(self, nodes: int, expanded_first: bool = False) -> tuple[GrownTree, Tensor]:
        """The best tree of at most `nodes` nodes for each row; a chain in its order.

        Its `node_values` are the feature of each node, and its place among the expanded nodes, from 1 on, or 0.

        Args:
            expanded_first: whether expanded nodes come first, in their order, whatever their probability; they count.

        Returns:
            The trees; and `[rows, nodes]` the expanded node that each node is a child of, 0 for the row's last token.
        """
        nodes = min(nodes, self.tokens.shape[1])
        if self.children == 1:
            return self._chain(nodes)
        order = self._order(nodes, expanded_first)
        places = torch.arange(1, 1 + max(order.shape[1], self.expanded), device=order.device).expand(len(order), -1)
        no_place = torch.zeros_like(self.tokens)
        expanded = no_place.scatter(1, self._nodes, places[:, : self.expanded]).gather(1, order)
        source = order // self.children
        place_of = no_place.scatter_(1, order, places[:, : order.shape[1]])
        parents = pad(place_of.gather(1, self._nodes), (1, 0)).gather(1, source)
        values = [self.log_probability.gather(1, order), torch.cat(self._features, dim=1).gather(1, order), expanded]
        return GrownTree(
            self.tokens.gather(1, order),
            structure_of(parents, self.levels),
            torch.stack([value.float() for value in values], dim=-1),
            drafting_rows=self.rows,
            keeps_all=expanded_first,
        ), source

    def _chain(self, nodes: int) -> tuple[GrownTree, Tensor]:
        paths, features = self.log_probability[:, :nodes], torch.cat(self._features, dim=1)[:, :nodes]
        places, source = _chain_places(nodes, self.expanded, self.tokens.device)
        values = torch.stack([paths, features.float(), places.expand_as(paths)], dim=-1)
        tree = GrownTree(self.tokens[:, :nodes], None, values, drafting_rows=self.rows)
        return tree, source.expand_as(paths)

    def _order(self, nodes: int, expanded_first: bool) -> Tensor:
        """`[rows, nodes]` the candidates of the best trees, parents before their children."""
        if not expanded_first or not self.expanded:
            return self.log_probability.topk(nodes, dim=1).indices
        further = nodes - self.expanded
        if further <= 0:
            return self._nodes
        rest = self.log_probability.scatter(1, self._nodes, -inf)
        return torch.cat([self._nodes, rest.topk(further, dim=1).indices], dim=1)


@lru_cache(maxsize=64)
def _identity(size: int, device: torch.device) -> Tensor:
    return torch.eye(size, dtype=torch.bool, device=device)


@lru_cache(maxsize=64)
def _chain_places(nodes: int, expanded: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of the nodes of a chain, their places among the expanded ones, from 1 on or 0; and those of their parents."""
    places = [node + 1.0 if node < expanded else 0.0 for node in range(nodes)]
    return torch.tensor(places, device=device), torch.arange(nodes, device=device)


def structure_of(parents: Tensor, depth: int) -> TreeStructure:
    """The structure of trees of at most this depth, from `[rows, nodes]` parents as in `TreeStructure`.

    Parents come before their children.

    Powers of (identity + parent matrix) have an entry wherever a node is an ancestor at most that far above.
    """
    rows, nodes = parents.shape
    links = _identity(1 + nodes, parents.device).float().repeat(rows, 1, 1)
    links[:, 1:].scatter_(2, parents[..., None], 1.0)
    for _ in range((depth - 1).bit_length()):
        links = links @ links
    ancestors = links > 0
    return TreeStructure(parents, ancestors.sum(dim=2) - 1, ancestors)


@dataclass(frozen=True)
class Snapshot:
    """What the host has read of a `Growth`.

    Args:
        probability: `[rows, candidates]` path probabilities, 0 for candidates that are no node.
        frontier: of the same shape: path probabilities of candidates that can be expanded and have not been, else 0.
        reached: `[rows, expanded]` path probabilities of the expanded nodes, 1 for the row's last token.
    """

    probability: Floats
    frontier: Floats
    reached: Floats

    def sorted_probability(self, nodes: int) -> Floats:
        """`[rows, at most nodes]` the highest path probabilities in descending order."""
        return -np.sort(-self.probability, axis=1)[:, :nodes]

    def frontier_probability(self, width: int) -> Floats:
        """`[rows, at most width]` the highest path probabilities among nodes that can be expanded, descending."""
        return -np.sort(-self.frontier, axis=1)[:, :width]

    def may_improve(self, nodes: int) -> bool:
        """Whether expanding the frontier may change the best tree of a row of `nodes` nodes.

        A child of a node that is not among the best `nodes` nodes cannot be among them either.
        """
        best, next_best = self.sorted_probability(nodes), self.frontier_probability(1)[:, 0]
        is_full = best.shape[1] == nodes
        return bool((next_best > (best[:, -1] if is_full else 0.0)).any())

    def children_accepted(self, first: int) -> float | None:
        """P(one of a node's children is accepted | the node is), over the expanded nodes from `first` on."""
        rows, expanded = self.reached.shape
        children = self.probability.reshape(rows, expanded, -1)[:, first:].sum(axis=2)
        reached = (self.reached[:, first:] * (children > 0)).sum()
        return float(children.sum() / reached) if reached > 0 else None


class TreeSize:
    """How large the trees of a step become: chains, a number of nodes, or the most expected tokens per second.

    Args:
        nodes: of each row at most; None for `MAX_NODES`.
        children: of a node at most; 1 for chains.
        latency: of the step; with it trees leave out all passes of the drafter and all nodes that cost more than they
            gain. None for trees of `nodes` nodes, expanded about the square root of that many at a time.
        rows: how many rows draft.
        min_probability: path probability below which a node is left out.
        levels_per_read: passes of the drafter between two decisions.
    """

    _snapshot: Snapshot | None = None

    def __init__(
        self,
        nodes: int | None,
        children: int = MAX_CHILDREN,
        latency: StepLatency | None = None,
        rows: int = 1,
        min_probability: float = 0.0,
        levels_per_read: int = 1,
    ):
        self.levels_per_read, self._width = levels_per_read, 0
        self.max_nodes, self.children, self._rows = nodes or MAX_NODES, children, rows
        self.min_probability, self.latency, self.is_fastest = min_probability, latency, latency is not None
        if latency is None:
            return
        self._target, least = _target_seconds(latency.target, rows, self.max_nodes)
        self.min_probability = max(min_probability, least)
        self._pass, self._spent = _drafter_seconds(latency.drafter, rows, MAX_CHILDREN if children > 1 else 1)
        self._seen = self._expanded = 0
        self._child = 0.6  # P(one of a node's children is accepted | the node is), before a node was expanded

    def width(self, growth: Growth) -> int:
        """How many nodes of each row to expand in the next pass of the drafter; 0 to stop."""
        if growth.levels >= max(growth.limits) and (self.children == 1 or not self.is_fastest):
            return 0
        if not self.is_fastest:
            if self.children == 1:
                return 1
            is_due = growth.levels % LEVELS_PER_READ == 0
            width = min(isqrt(self.max_nodes), growth.tokens.shape[1])
            return width if not is_due or growth.read().may_improve(self.max_nodes) else 0
        if growth.levels % self.levels_per_read and self._width:
            return self._spend(self._width)
        self._snapshot = growth.read()
        self._width = self._fastest_width(self._snapshot, growth)
        return self._spend(self._width)

    def _spend(self, width: int) -> int:
        if width:
            self._spent += float(self._pass[width - 1])
            self._expanded += width
        return width

    def _fastest_width(self, snapshot: Snapshot, growth: Growth) -> int:
        accepted = snapshot.children_accepted(self._seen)
        self._child = self._child if accepted is None else min(1.0, accepted)
        self._seen = snapshot.reached.shape[1]
        probability = snapshot.sorted_probability(self.max_nodes).sum(axis=0)
        tokens = self._rows + np.concatenate([[0.0], np.cumsum(probability)])
        rates = tokens / (self._target[: len(tokens)] + self._spent)
        best = int(np.argmax(rates))
        frontier = snapshot.frontier_probability(max(0, min(len(self._pass), self.max_nodes - self._expanded)))
        reached = frontier.sum(axis=0)
        reached = reached[reached > 0]  # expected rows that reach the j-th node to expand
        if not len(reached) or not snapshot.may_improve(self.max_nodes):
            return 0
        # A first draft token may cost far more than each further one, so several levels are considered at once.
        levels = np.arange(1, max(2, max(growth.limits) - growth.levels + 1))[:, None]
        gain = np.cumsum(self._child**levels, axis=0) * np.cumsum(reached)
        nodes = np.minimum(best + levels * np.arange(1, len(reached) + 1), self.max_nodes)
        seconds = self._target[nodes] + self._spent + levels * self._pass[: len(reached)]
        expected_rates = ((tokens[best] + gain) / seconds).max(axis=0)  # by width
        width = int(np.argmax(expected_rates)) + 1
        return width if expected_rates[width - 1] > rates[best] * (1 + MIN_GAIN) else 0

    def nodes(self, growth: Growth) -> int:
        """How many nodes of each row are verified."""
        if not self.is_fastest:
            return self.max_nodes if self.children > 1 else max(1, *growth.limits)
        if self._snapshot is None or self._snapshot.probability.shape[1] < growth.tokens.shape[1]:
            self._snapshot = growth.read()
        return self.best_size(self._snapshot.sorted_probability(self.max_nodes).tolist(), self._spent)

    def best_size(self, probability: Sequence[Sequence[float]], drafting: float = 0.0) -> int:
        """How many nodes of complete trees are verified."""
        if not self.is_fastest:
            return self.max_nodes
        gains = probability[0] if len(probability) == 1 else map(sum, zip_longest(*probability, fillvalue=0.0))
        tokens = accumulate(gains, initial=float(self._rows))
        rates = [count / (seconds + drafting) for count, seconds in zip(tokens, self._target.tolist(), strict=False)]
        return rates.index(max(rates))


@lru_cache(maxsize=64)
def _target_seconds(target: CostCurve, rows: int, nodes: int) -> tuple[Floats, float]:
    """Seconds of the target's pass by the nodes of each row, from 0 on; and the least useful path probability.

    Each node adds its path probability to the tokens of a step, of which there is at least one for each row.
    """
    seconds = np.array([target.seconds_of(rows * (1 + count)) for count in range(nodes + 1)])
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
    children: int = MAX_CHILDREN,
    is_prefill: bool = False,
    only_pass: int = 0,
) -> TreeSize:
    """How large the next trees of a call become.

    Args:
        depths: `[rows]` maximum depths.
        only_pass: tokens per row of the one pass of a drafter that needs no further pass for deeper levels.
    """
    if isinstance(size, int):
        return TreeSize(size, children)
    latency = None if call.depth is None else call.depth.latency
    if size is None or latency is None:
        return TreeSize(None, children=1)
    rows = max(1, sum(depth > 0 for depth in depths))
    minimum, levels = 0.3 if is_prefill else 0.0, 1 if call.state.device.type == "cpu" else LEVELS_PER_READ
    step = latency.at(rows, call.context_length)
    if only_pass:
        step = step._replace(drafter=DraftLatency(overhead=step.drafter.draft([rows * only_pass])))
    return TreeSize(None, children, step, rows, minimum, levels)


def draft_rows(
    call: DraftCall,
    size: Tree,
    depths: Sequence[int],
    search: Callable[[int, SearchLimits], SearchTree[Tag]],
    is_prefill: bool = False,
) -> tuple[DraftTree, list[SearchTree[Tag]]]:
    """Search a tree for every row and cut it to the size to verify."""
    if not any(depths):
        return DraftTree.empty(len(depths)), [SearchTree() for _ in depths]
    limit = tree_size(size, call, depths, is_prefill=is_prefill)
    is_chain = is_prefill or size is None
    if limit.is_fastest or isinstance(size, int):
        limits = SearchLimits(limit.max_nodes, limit.min_probability, is_chain)
    else:  # without a latency model, "auto" drafts what is not improbable
        limits = SearchLimits(max(depths), 0.0 if size is None else 0.05, is_chain)
    trees = [search(row, limits) for row in range(len(depths))]
    nodes = limit.best_size([tree.probability for tree in trees]) if limit.is_fastest else limits.nodes
    return draft_of(trees, nodes), trees


class SearchSession(DraftSession, Generic[Tag]):
    """Base class of sessions that search the tree of each row, without a forward pass."""

    passes = ()

    def __init__(self, call: DraftCall, k: int, size: Tree):
        super().__init__(call)
        self._k, self._size = k, size
        self._trees: list[SearchTree[Tag]] = []

    @abstractmethod
    def search(self, row: int, depth: int, limits: SearchLimits) -> SearchTree[Tag]:
        """The most probable tree of a row."""

    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        return self._draft(max_depths, is_prefill=False)

    def draft_at_prefill(self, max_depths: Sequence[int]) -> DraftTree:
        return self._draft(max_depths, is_prefill=True)

    def _draft(self, max_depths: Sequence[int], is_prefill: bool) -> DraftTree:
        depths = [min(self._k, depth) for depth in max_depths]

        def search(row: int, limits: SearchLimits) -> SearchTree[Tag]:
            return self.search(row, depths[row], limits) if depths[row] else SearchTree()

        draft, self._trees = draft_rows(self.call, self._size, depths, search, is_prefill)
        return draft


def draft_of(trees: Sequence[SearchTree[Any]], nodes: int) -> DraftTree:
    """The first `nodes` nodes of each row's tree as a draft."""
    probability = tuple(tuple(tree.probability[:nodes]) for tree in trees)
    return DraftTree.from_nodes([(tree.tokens[:nodes], tuple(tree.parents[:nodes])) for tree in trees], probability)
