"""A draft tree that was grown by tensor functions, on the device of the drafter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from hf_specgen.tree import DraftTree, Parents, TreeStructure, chain_parents

NO_NODE = -1e30
"""In place of the logarithm of the probability of a candidate that is no node."""
TOKEN, NUMBER, DEPTH, PARENT, PATH = range(5)
"""What is known of each node: its token, its number and depth, the number of its parent, and the logarithm of its path
probability, very low for padding at the end of a row."""


class GrownTree(DraftTree):
    """A draft tree on the drafter's device, which the host reads at once, and only when it has to.

    `values` `[batch, 1 + PATH, 1 + nodes]` are of each row's last token, then of each node; `inputs` the tokens as
    integers. A tree that still grows has neither, and the tokens of its last nodes alone, those of the drafter's next
    pass: they are at depth `level`, and their parents are `above` `[batch, new]`, by their index among the nodes of the
    pass before, None if that was a single one. Its structure is computed when it is asked for, and has the ancestors of
    the last nodes alone.
    """

    drafting_rows: int = 0
    is_chain: bool
    selection: Selection | None = None
    """The nodes of which these are the first ones."""
    _host: _HostTree | None = None
    _copied: tuple[torch.Tensor, torch.cuda.Event] | None = None
    """The values in memory of the host, and when they have arrived there."""
    _known: NDArray[np.floating[Any]] | None = None
    """The values, where the host has read them."""

    def __init__(
        self,
        tokens: torch.Tensor,
        structure: TreeStructure | Callable[[], TreeStructure] | None = None,
        values: torch.Tensor | None = None,
        *,
        nodes: int | None = None,
        level: int = 0,
        above: torch.Tensor | None = None,
        drafting_rows: int = 0,
        q: torch.Tensor | None = None,
        keeps_all: bool = False,
        inputs: torch.Tensor | None = None,
    ):
        vars(self).update(drafting_rows=drafting_rows, is_chain=structure is None)
        self.tokens, self.batch, self.nodes = tokens, len(tokens), tokens.shape[1] if nodes is None else nodes
        self._structure, self._values, self._inputs = structure, values, inputs
        self.level, self.above, self.q, self.keeps_all = level, above, q, keeps_all

    @property
    def parents(self) -> tuple[Parents, ...]:
        return self._read().parents

    @property
    def probability(self) -> tuple[tuple[float, ...], ...] | None:
        return self._read().probability

    @property
    def node_values(self) -> list[Any]:
        """For each row `[nodes, PATH]` integers: what is known of each node but its path probability."""
        return self._read().values

    def structure(self) -> TreeStructure:
        if self._structure is None:
            return TreeStructure.of_chains(self.batch, self.nodes, self.tokens.device)
        return self._structure if isinstance(self._structure, TreeStructure) else self._structure()

    def step_tokens(self, pending: Sequence[int], device: torch.device) -> torch.Tensor:
        return super().step_tokens(pending, device) if self._inputs is None else self._inputs.to(device)

    def token_lists(self) -> list[list[int]]:
        return self._read().tokens

    def read_with(self, chosen: torch.Tensor) -> list[list[int]]:
        if self._host is None and self._known is None and chosen.device == self.tokens.device:
            return self._read(chosen).chosen
        return super().read_with(chosen)

    def of_parents(self, values: torch.Tensor) -> torch.Tensor:
        """`[batch, nodes of the pass before, …]` values to `[batch, new, …]`: that of the parent of each last node."""
        if self.above is None:
            return values.expand(-1, self.tokens.shape[1], *values.shape[2:])
        index = self.above.to(values.device).view(*self.above.shape, *[1] * (values.dim() - 2))
        return values.gather(1, index.expand(*self.above.shape, *values.shape[2:]))

    def depths(self, row: int) -> list[int]:
        if self.is_chain:
            return list(range(1 + self.nodes))
        if self._values is not None:
            return super().depths(row)
        depths: list[int] = self.structure().depths[row].tolist()
        return depths

    def replace(self, **parts: Any) -> GrownTree:
        """The same trees with other parts, such as `tokens` or `q`."""
        tree = copy.copy(self)
        vars(tree).update(parts)
        return tree

    def select(self, rows: Sequence[int]) -> GrownTree:
        if len(rows) == self.batch:
            return self
        index = torch.tensor(list(rows), device=self.tokens.device)
        structure = None if self.is_chain else TreeStructure(*(part[index] for part in self.structure()))
        parts = {"_values": self._values, "_inputs": self._inputs, "above": self.above}
        selected = {name: part[index] for name, part in parts.items() if part is not None}
        tree = self.replace(tokens=self.tokens[index], selection=None, _known=None, _host=None, **selected)
        tree._copied = None
        tree.batch, tree._structure = len(index), structure
        return tree

    def checked(self, vocabulary: int) -> GrownTree:
        return self  # its tokens are indices into a drafter's logits, so that the host need not read them here

    def padded(self, nodes: int) -> GrownTree:
        more = nodes - self.nodes
        if more <= 0:
            return self
        if self.selection is not None and nodes < self.selection.tokens.shape[1]:
            return self.selection.first(nodes)  # further nodes instead of padding: their results are ignored alike
        structure = None if self.is_chain else self.structure()
        if structure is not None:
            ancestors = pad(structure.ancestors, (0, more, 0, more))
            ancestors[:, -more:, 0].fill_(True)  # a query that sees nothing would write NaN into the cache
            structure = TreeStructure(pad(structure.depths, (0, more)), ancestors)
        tree = self.replace(tokens=pad(self.tokens, (0, more)), _known=None, _host=None, _copied=None)
        tree.nodes, tree._structure = nodes, structure
        if self._values is not None:
            tree._values = pad(self._values, (0, more), value=-2)  # no number, and that of no parent
            tree._values[:, PATH, -more:].fill_(NO_NODE)
        tree._inputs = None if self._inputs is None else pad(self._inputs, (0, more))
        return tree

    def start_reading(self) -> None:
        """Let a GPU copy the tree to the host, which then can read it during the target's pass."""
        if self._values is not None and self._values.is_cuda and self._known is None:
            host = torch.empty_like(self._values, device="cpu", pin_memory=True).copy_(self._values, non_blocking=True)
            self._copied = host, torch.cuda.current_stream(self._values.device).record_event()

    def _read(self, chosen: torch.Tensor | None = None) -> _HostTree:
        """Read the tree, and tokens chosen by the target, in one transfer; token ids below 2**24 are exact."""
        if self._host is None:
            if self._values is None:
                raise ValueError("a draft tree that still grows is not read by the host")
            if self._known is not None:
                self._host = _HostTree.of(self._known, [], self.is_chain, self.keeps_all)
                return self._host
            if self._copied is not None and chosen is None:
                copied, arrival = self._copied
                arrival.synchronize()
                self._host = _HostTree.of(copied.numpy(), [], self.is_chain, self.keeps_all)
                return self._host
            parts = [self._values.flatten(1), *([] if chosen is None else [chosen])]
            packed = torch.cat(parts, dim=1).cpu().numpy()
            size = 1 + self.nodes
            values = packed[:, : (1 + PATH) * size].reshape(self.batch, 1 + PATH, size)
            read = packed[:, (1 + PATH) * size :].astype(int).tolist()
            self._host = _HostTree.of(values, read, self.is_chain, self.keeps_all)
        return self._host


class Selection(NamedTuple):
    """The best nodes of a growing tree, most probable first: any first ones of them are the best tree of that size.

    Args:
        known: `[batch, (1 + PATH) * width + frontier]` what the host reads: the values of each row's last token and of
            the nodes, see `GrownTree`, and the logarithms of the path probabilities of the last level.
        tokens: `[batch, width]` integers.
        structure: None for chains.
    """

    known: torch.Tensor
    tokens: torch.Tensor
    structure: TreeStructure | None

    @classmethod
    def of(cls, tree: GrownTree, frontier: torch.Tensor) -> Selection:
        """All nodes of a tree."""
        assert tree._values is not None and tree._inputs is not None
        known = torch.cat([tree._values.flatten(1), frontier], dim=1)
        return cls(known, tree._inputs, None if tree.is_chain else tree.structure())

    def parts(self, known: Any) -> tuple[Any, Any]:
        """`[batch, 1 + PATH, width]` values, and the last level; of `known`, on any device or as an array."""
        batch, width = self.tokens.shape
        size = (1 + PATH) * width
        return known[:, :size].reshape(batch, 1 + PATH, width), known[:, size:]

    def first(self, nodes: int, values: Any = None, drafting_rows: int = 0) -> GrownTree:
        """The tree of so many nodes; `values` are those that the host has read, if it has."""
        width, structure = 1 + nodes, self.structure
        if structure is not None:
            structure = TreeStructure(structure.depths[:, :width], structure.ancestors[:, :width, :width])
        tokens, on_device = self.tokens[:, :width], self.parts(self.known)[0][:, :, :width]
        tree = GrownTree(tokens[:, 1:], structure, on_device, drafting_rows=drafting_rows, inputs=tokens)
        tree.selection, tree._known = self, None if values is None else values[:, :, :width]
        return tree


def probability_of(logarithms: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    """Probabilities from their logarithms; 0 where there is no node, whatever `np.seterr` says of underflow."""
    with np.errstate(under="ignore"):
        return np.exp(logarithms.astype(float))


class _HostTree(NamedTuple):
    """What the host has read of a `GrownTree`."""

    tokens: list[list[int]]
    parents: tuple[Parents, ...]
    probability: tuple[tuple[float, ...], ...]
    values: list[Any]
    chosen: list[list[int]]

    @classmethod
    def of(cls, values: Any, chosen: list[list[int]], is_chain: bool, keeps_all: bool) -> _HostTree:
        """From `[batch, 1 + PATH, 1 + nodes]` values."""
        probability = probability_of(values[:, PATH, 1:])
        is_node = probability > 0
        counted = is_node | (is_node.any(axis=1, keepdims=True) & keeps_all)
        sizes = counted.sum(axis=1).tolist()
        if is_chain:
            parents = tuple(chain_parents(size) for size in sizes)
        else:
            is_parent = values[:, PARENT, 1:, None] == values[:, NUMBER, None]
            places = (is_parent & (values[:, NUMBER, None] >= 0)).argmax(axis=2) - 1
            parents = tuple(tuple(row[:size]) for row, size in zip(places.tolist(), sizes, strict=True))
        known = values[:, :PATH, 1:].transpose(0, 2, 1)
        return cls(
            np.where(is_node, values[:, TOKEN, 1:], -1).astype(int).tolist(),
            parents,
            tuple(tuple(row[:size]) for row, size in zip(probability.tolist(), sizes, strict=True)),
            [row[:size].astype(int) for row, size in zip(known, sizes, strict=True)],
            chosen,
        )
