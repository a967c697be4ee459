"""Draft trees on the device of the drafter: a frontier while they grow, a `DeviceTree` once they are finished.

A tree grows by one level in each pass of the drafter. The pass reads a `Frontier`: the nodes that are expanded next,
and their ancestors. One row, with two passes that expand two nodes each; d is never expanded, so no frontier has it::

    last token ─┬─ a ─┬─ c        frontier 1: tokens [a, b]            depth 1
                │     └─ d        frontier 2: tokens [c, e]            depth 2, parent_index [0, 1]
                └─ b ─── e        ancestors of frontier 2, over (last token, a, b, c, e): c 11010, e 10101
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from hf_specgen.tree import DraftTree, Parents, TreeStructure, chain_parents, identity

Floats = NDArray[np.floating[Any]]
NO_NODE = -1e30
"""Log path probability of what is no node: padding, and candidates beyond a row's maximum depth or with NaN."""
TOKEN, EXPANSION_INDEX, DEPTH, PARENT, LOG_PATH = range(5)
"""The planes of the values of a tree: the token of each node, its expansion index (0 for a row's last token, 1 for the
node that was expanded first, and so on; negative, but not in chains, if it was not expanded), its depth, the expansion
index of its parent, and the logarithm of its path probability, which is `NO_NODE` for padding at the end of a row."""
PLANES = 1 + LOG_PATH
UNEXPANDED = -2  # the expansion index of a node that was not expanded


class Ancestors:
    """The tree attention mask of a frontier: each node attends to its ancestors and to itself.

    The matrix is computed when it is read first, since some drafters never read it.

    Args:
        rows, nodes: the number of rows, and of nodes of each row, of the frontier.
        above: of the frontier before; None if the frontier is each row's last token.
        parent_index: see `Frontier`.
    """

    def __init__(
        self,
        rows: int,
        nodes: int,
        device: torch.device,
        above: Ancestors | None = None,
        parent_index: torch.Tensor | None = None,
    ):
        self._rows = rows
        self._nodes = nodes
        self._device = device
        self._above = above
        self._parent_index = parent_index

    @classmethod
    def of(cls, matrix: torch.Tensor) -> Ancestors:
        """The ancestors with a matrix that was computed already."""
        rows, nodes, _ = matrix.shape
        ancestors = cls(rows, nodes, matrix.device)
        ancestors.matrix = matrix
        return ancestors

    @cached_property
    def matrix(self) -> torch.Tensor:
        """`[rows, nodes, 1 + expanded]` bool, over a row's last token and all its expanded nodes in their order."""
        itself = identity(self._nodes, torch.bool, self._device).expand(self._rows, -1, -1)
        if self._above is None:
            return itself
        return torch.cat([gather_parents(self._above.matrix, self._parent_index, self._nodes), itself], dim=2)


def gather_parents(values: torch.Tensor, parent_index: torch.Tensor | None, nodes: int) -> torch.Tensor:
    """`[rows, nodes of the frontier before, …]` to `[rows, nodes, …]`: the value of the parent of each node."""
    if parent_index is None:  # the frontier before has one node, the parent of all
        return values.expand(-1, nodes, *values.shape[2:])
    index = parent_index.to(values.device).view(*parent_index.shape, *[1] * (values.dim() - 2))
    return values.gather(1, index.expand(*parent_index.shape, *values.shape[2:]))


@dataclass(frozen=True)
class Frontier:
    """The nodes of growing trees that the drafter's next pass reads: the last ones that are expanded, of one depth."""

    tokens: torch.Tensor  # [rows, new]
    depth: int  # of these nodes; a row's last token has depth 0
    nodes: int  # how many nodes of each row are expanded, these included
    is_chain: bool  # whether each row has one path
    ancestors: Ancestors  # of these nodes
    depths_of_nodes: torch.Tensor | None = None  # [1 + nodes] of a row's last token and expanded nodes; None for chains
    # [rows, new] the index of each node's parent in the frontier before; None if that has one node.
    parent_index: torch.Tensor | None = None

    @property
    def batch(self) -> int:
        """The number of rows."""
        return len(self.tokens)

    @property
    def device(self) -> torch.device:
        """Where the trees grow."""
        return self.tokens.device

    def structure(self) -> TreeStructure:
        """Depths of the last token and of all expanded nodes; ancestors of the new nodes.

        In a chain the ancestors have all nodes as queries, of which callers take the last ones.
        """
        if self.depths_of_nodes is None:
            return TreeStructure.of_chains(self.batch, self.nodes, self.device)
        return TreeStructure(self.depths_of_nodes.expand(self.batch, -1), self.ancestors.matrix)

    def depths(self, row: int) -> list[int]:
        """`[1 + nodes]` depths: 0 for the row's last token, then of each node; the same in every row."""
        if self.depths_of_nodes is None:
            return list(range(1 + self.nodes))
        depths: list[int] = self.depths_of_nodes.tolist()
        return depths

    def gather_parents(self, values: torch.Tensor) -> torch.Tensor:
        """`[rows, nodes of the frontier before, …]` to `[rows, new, …]`: the value of the parent of each node."""
        return gather_parents(values, self.parent_index, self.tokens.shape[1])

    def select(self, rows: Sequence[int]) -> Frontier:
        """The frontier of some of the rows."""
        if len(rows) == self.batch:
            return self
        index = torch.tensor(list(rows), device=self.device)
        parent_index = None if self.parent_index is None else self.parent_index[index]
        # The ancestors of a chain are never read, see `structure`.
        ancestors = self.ancestors if self.is_chain else Ancestors.of(self.ancestors.matrix[index])
        return replace(self, tokens=self.tokens[index], ancestors=ancestors, parent_index=parent_index)

    def padded(self, nodes: int) -> Frontier:
        """The frontier with padding tokens up to `nodes` expanded nodes of each row, for a forward pass."""
        extra = nodes - self.nodes
        if extra <= 0:
            return self
        tokens = pad(self.tokens, (0, extra))
        if self.depths_of_nodes is None:
            return replace(self, tokens=tokens, nodes=nodes)
        depths = pad(self.depths_of_nodes, (0, extra))
        ancestors = Ancestors.of(_padded_ancestors(self.ancestors.matrix, extra))
        return replace(self, tokens=tokens, nodes=nodes, depths_of_nodes=depths, ancestors=ancestors)


class DeviceTree(DraftTree):
    """A finished draft tree on the drafter's device, which the host reads in one transfer, and only when it has to.

    Args:
        values: `[batch, PLANES, 1 + nodes]` of each row's last token, then of each node.
        step_tokens: `[batch, 1 + nodes]` the plane `TOKEN` of the values as integers.
        structure: None for chains.
        keeps_placeholders: whether entries with path probability 0, expanded as padding and never accepted, keep their
            node index in rows that have a draft; the host reads their token as -1. Otherwise they are padding.
        host_values: `values` in the host's memory, if the host has read them already.
        selection: a selection that begins with the nodes of this tree; `padded` takes further nodes from it.
    """

    def __init__(
        self,
        values: torch.Tensor,
        step_tokens: torch.Tensor,
        structure: TreeStructure | None,
        keeps_placeholders: bool = False,
        host_values: Floats | None = None,
        selection: NodeSelection | None = None,
    ):
        super().__init__(step_tokens[:, 1:], None)
        self.is_chain = structure is None
        self.keeps_placeholders = keeps_placeholders
        self._structure = structure
        self._values = values
        self._step_tokens = step_tokens
        self._selection = selection
        self._host_values = host_values
        self._host_tree: HostTree | None = None
        # A copy of the values that is on its way to the host, and the event that completes it.
        self._host_copy: tuple[torch.Tensor, torch.cuda.Event] | None = None

    @property
    def parents(self) -> tuple[Parents, ...]:
        return self._on_host().parents

    @property
    def probability(self) -> tuple[tuple[float, ...], ...] | None:
        return self._on_host().probability

    @property
    def node_values(self) -> list[Any]:
        """For each row `[nodes, 4]` integers: token, expansion index, depth and expansion index of the parent."""
        return self._on_host().values

    def structure(self) -> TreeStructure:
        return self._structure or TreeStructure.of_chains(self.batch, self.nodes, self.tokens.device)

    def step_tokens(self, pending: Sequence[int], device: torch.device) -> torch.Tensor:
        return self._step_tokens.to(device)

    def token_lists(self) -> list[list[int]]:
        return self._on_host().tokens

    def read_with(self, chosen: torch.Tensor) -> list[list[int]]:
        is_read = self._host_tree is not None or self._host_values is not None
        if is_read or chosen.device != self.tokens.device:
            return super().read_with(chosen)
        return self._on_host(chosen).chosen

    def depths(self, row: int) -> list[int]:
        return list(range(1 + self.nodes)) if self.is_chain else super().depths(row)

    def select(self, rows: Sequence[int]) -> DeviceTree:
        if len(rows) == self.batch:
            return self
        index = torch.tensor(list(rows), device=self.tokens.device)
        structure = self._structure and TreeStructure(*(tensor[index] for tensor in self._structure))
        return self._with(self._values[index], self._step_tokens[index], structure)

    def padded(self, nodes: int) -> DeviceTree:
        extra = nodes - self.nodes
        if extra <= 0:
            return self
        if self._selection is not None and nodes < self._selection.tokens.shape[1]:
            return self._selection.first(nodes)  # further nodes instead of padding: their results are ignored alike
        structure = self._structure and TreeStructure(
            pad(self._structure.depths, (0, extra)), _padded_ancestors(self._structure.ancestors, extra)
        )
        values = pad(self._values, (0, extra), value=UNEXPANDED)  # in all planes: the parent is no node either
        values[:, LOG_PATH, -extra:].fill_(NO_NODE)
        tokens = pad(self._step_tokens, (0, extra))
        return self._with(values, tokens, structure)

    def _with(self, values: torch.Tensor, tokens: torch.Tensor, structure: TreeStructure | None) -> DeviceTree:
        """A tree with other values, which the host has not read yet."""
        return DeviceTree(values, tokens, structure, self.keeps_placeholders)

    def checked(self, vocabulary: int) -> DeviceTree:
        return self  # its tokens are indices into a drafter's logits, so that the host need not read them here

    def start_reading(self) -> None:
        """Start the copy of the tree from a GPU to the host, so that the host can read it during the target's pass."""
        if self._values.is_cuda and self._host_values is None:
            host = torch.empty_like(self._values, device="cpu", pin_memory=True).copy_(self._values, non_blocking=True)
            self._host_copy = host, torch.cuda.current_stream(self._values.device).record_event()

    def _on_host(self, chosen: torch.Tensor | None = None) -> HostTree:
        """The trees as the host reads them, in one transfer with the `chosen` tokens of the target if there are any.

        Callers have `chosen` tokens transferred only with the first read, see `read_with`.
        """
        if self._host_tree is None:
            values, tokens = self._transferred(chosen)
            self._host_tree = HostTree.of(values, tokens, self.is_chain, self.keeps_placeholders)
        return self._host_tree

    def _transferred(self, chosen: torch.Tensor | None) -> tuple[Floats, list[list[int]]]:
        """The values and `chosen` tokens in the host's memory, by one transfer; token ids below 2**24 are exact."""
        if self._host_values is not None:
            return self._host_values, []
        if self._host_copy is not None and chosen is None:
            copy, is_complete = self._host_copy
            is_complete.synchronize()
            return copy.numpy(), []
        flat = self._values.flatten(1)
        size = flat.shape[1]
        joined = (flat if chosen is None else torch.cat([flat, chosen], dim=1)).cpu().numpy()
        return joined[:, :size].reshape(self._values.shape), joined[:, size:].astype(int).tolist()


PassTree = DraftTree | Frontier
"""What a forward pass runs on: finished trees after each row's last token, or a frontier."""


def _padded_ancestors(ancestors: torch.Tensor, extra: int) -> torch.Tensor:
    """The matrix with `extra` more nodes, each of which attends to the row's last token alone."""
    padded = pad(ancestors, (0, extra, 0, extra))
    padded[:, -extra:, 0].fill_(True)  # a query that attends to nothing would write NaN into the cache
    return padded


class NodeSelection(NamedTuple):
    """The best nodes of a growing tree, most probable first: the first n nodes are the best tree of n nodes.

    The host reads the values of each row's last token and of the nodes, see `DeviceTree`, and the expansion scores of
    the last level, see `TreeBuilder`.
    """

    flat: torch.Tensor  # [batch, PLANES * width + last level]
    tokens: torch.Tensor  # [batch, width] integers, of each row's last token and the nodes
    structure: TreeStructure | None  # None for chains

    @classmethod
    def of(cls, tree: DeviceTree, expansion_scores: torch.Tensor) -> NodeSelection:
        """Select all nodes of a tree, with the expansion scores of the last level."""
        flat = torch.cat([tree._values.flatten(1), expansion_scores], dim=1)
        return cls(flat, tree._step_tokens, tree._structure)

    def split(self, flat: Any) -> tuple[Any, Any]:
        """Split `flat`, a tensor or an array: `[batch, PLANES, width]` values, and scores of the last level."""
        batch, width = self.tokens.shape
        size = PLANES * width
        return flat[:, :size].reshape(batch, PLANES, width), flat[:, size:]

    def first(self, nodes: int, values: Any = None) -> DeviceTree:
        """The tree of the first `nodes` nodes; `values` is the first result of `split` if the host has read it."""
        width = 1 + nodes
        structure = self.structure
        if structure is not None:
            structure = TreeStructure(structure.depths[:, :width], structure.ancestors[:, :width, :width])
        on_device = self.split(self.flat)[0][:, :, :width]
        host_values = None if values is None else values[:, :, :width]
        return DeviceTree(on_device, self.tokens[:, :width], structure, host_values=host_values, selection=self)


def probability_of(logarithms: Floats) -> Floats:
    """Probabilities from their logarithms; 0 where there is no node, whatever `np.seterr` is set to."""
    with np.errstate(under="ignore"):
        return np.exp(logarithms.astype(float))


class HostTree(NamedTuple):
    """What the host has read of a `DeviceTree`, for each row; `chosen` are tokens that the target chose, if given."""

    tokens: list[list[int]]
    parents: tuple[Parents, ...]
    probability: tuple[tuple[float, ...], ...]
    values: list[Any]
    chosen: list[list[int]]

    @classmethod
    def of(cls, values: Any, chosen: list[list[int]], is_chain: bool, keeps_placeholders: bool) -> HostTree:
        """From `[batch, PLANES, 1 + nodes]` values, and arguments as of `DeviceTree`."""
        probability = probability_of(values[:, LOG_PATH, 1:])
        is_node = probability > 0
        # Nodes that have an index; the others, at the end of a row, are padding.
        is_counted = is_node | (is_node.any(axis=1, keepdims=True) & keeps_placeholders)
        sizes = is_counted.sum(axis=1).tolist()
        if is_chain:
            parents = tuple(chain_parents(size) for size in sizes)
        else:
            is_parent = values[:, PARENT, 1:, None] == values[:, EXPANSION_INDEX, None]
            # The parent is the node, or at index 0 the row's last token, with the parent's expansion index.
            index = (is_parent & (values[:, EXPANSION_INDEX, None] >= 0)).argmax(axis=2) - 1
            parents = tuple(tuple(row[:size]) for row, size in zip(index.tolist(), sizes, strict=True))
        tokens = np.where(is_node, values[:, TOKEN, 1:], -1).astype(int)
        probabilities = tuple(tuple(row[:size]) for row, size in zip(probability.tolist(), sizes, strict=True))
        integers = values[:, :LOG_PATH, 1:].transpose(0, 2, 1)
        node_values = [row[:size].astype(int) for row, size in zip(integers, sizes, strict=True)]
        return cls(tokens.tolist(), parents, probabilities, node_values, chosen)
