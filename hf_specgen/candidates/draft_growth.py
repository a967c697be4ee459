"""A draft tree under construction by a network that proposes the children of the nodes that it has read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hf_specgen.candidates.read_nodes import ReadNodes
from hf_specgen.candidates.scored_nodes import ScoredNodes
from hf_specgen.candidates.tree_builder import Floats, Ints, Proposals, TreeBuilder
from hf_specgen.candidates.tree_shape import TreeShape
from hf_specgen.depth.calibration import Calibration
from hf_specgen.tree import DraftTree


class DraftGrowth:
    """The trees of one step.

    Args:
        shape: decides how they grow.
        depths: `[rows]` maximum depth of each row's tree.
        calibration: maps the network's confidence in a token to the probability that it is accepted.

    Attributes:
        builder: of the trees.
        read: the nodes that the network has read; at first those that it reads together with the text.
        expanded: `[rows, nodes]` the nodes that were read after they had been proposed.
    """

    def __init__(self, shape: TreeShape, depths: Sequence[int], calibration: Calibration):
        self.shape, self.builder, self._calibration = shape, TreeBuilder(depths), calibration
        self.read = ReadNodes(DraftTree.empty(len(depths)))
        self.expanded: Ints = np.zeros((len(depths), 0), dtype=np.int64)
        self._confidences: list[Floats] = []
        self._qs: list[torch.Tensor] = []

    def confidence(self) -> Floats:
        """`[rows, nodes]` of the nodes of the builder."""
        return np.concatenate(self._confidences, axis=1)

    def q(self) -> torch.Tensor | None:
        """`[rows, 1 + expanded, vocab]` probabilities after the last token and each expanded node; None if not kept."""
        return torch.cat(self._qs, dim=1) if self._qs else None

    def read_now(self, new: int) -> NDArray[np.bool_]:
        """`[rows, new]` which of the tokens read last belong to a row that drafts, and do not merely fill it up.

        Args:
            new: how many; one more than nodes were read for each row's last token too.
        """
        drafts = self.builder.limits[:, None] > 0
        real = self.read.real(min(new, len(self.read)))
        return np.concatenate([np.broadcast_to(drafts, (len(real), new - real.shape[1])), real & drafts], axis=1)

    def begin(self, scored: ScoredNodes) -> None:
        """Add the children of each row's last token, and those of nodes that were read with it and are proposed.

        Args:
            scored: after the last token, and after each node of `read`.
        """
        self._add(None, scored, np.zeros((len(self.builder.limits), 1), dtype=np.int64))
        self._add_found(scored, seen=0, first=-1)

    def expand(self, nodes: Ints, scored: ScoredNodes) -> float:
        """Add the children of nodes, and those of first-stage nodes that are proposed.

        Args:
            nodes: `[rows, nodes]` of the builder, which were read in a pass together with first-stage nodes.
            scored: after each of them, and after each first-stage node.

        Returns:
            the probability of the first-stage nodes that the drafter proposed, relative to that of the nodes.
        """
        expanded = float(np.take_along_axis(self.builder.joint, nodes, axis=1).sum())
        self.expanded = np.concatenate([self.expanded, nodes], axis=1)
        seen, count = self.builder.tokens.shape[1], scored.tokens.shape[1]
        self._add(nodes, scored, np.broadcast_to(np.arange(nodes.shape[1]), nodes.shape))
        if count == nodes.shape[1]:
            return 0.0
        return self._add_found(scored, seen, len(self.read) - count) / max(expanded, 1e-9)

    def _add_found(self, scored: ScoredNodes, seen: int, first: int) -> float:
        """Add the children of nodes that were read before they were proposed; returns the sum of their probabilities.

        Args:
            scored: of the pass that has read them.
            seen: number of nodes in the builder that none of them is.
            first: the place of the first node of the pass.
        """
        total = 0.0
        while (found := self.read.find(self.builder, seen)) is not None:
            seen = self.builder.tokens.shape[1]
            nodes, places, real = found
            total += float(np.take_along_axis(self.builder.joint, nodes, axis=1)[real].sum())
            self._add(nodes, scored, np.maximum(places - first, 0), real)
        return total

    def _add(
        self, nodes: Ints | None, scored: ScoredNodes, places: Ints, real: NDArray[np.bool_] | None = None
    ) -> None:
        """Add the children of nodes, at these places of the pass; None for the children of each row's last token."""
        tokens, confidence, expandable = scored.at(places, self.shape.children)
        proposals = Proposals(tokens, self._calibration.acceptance(confidence), expandable)
        self._confidences.append(confidence.reshape(len(confidence), -1))
        if scored.q is not None:
            self._qs.append(scored.q)
        if nodes is None:
            self.builder.add_root(proposals)
        else:
            self.builder.add(nodes, proposals, real)
