"""Base class of sessions that draft with confidences: calibrates acceptance probabilities, and counts outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_specgen.candidates.base import DraftCall, DraftSession
from hf_specgen.candidates.tree_builder import TreeBuilder
from hf_specgen.candidates.tree_shape import MAX_CHILDREN, TreeShape, tree_shape
from hf_specgen.depth.calibration import Calibration, calibration_memory
from hf_specgen.tree import DraftTree
from hf_specgen.verification.result import VerificationResult, judged_nodes


class CalibratedSession(DraftSession):
    """Counts how often draft tokens were accepted, by calibration, and remembers it for later calls.

    Args:
        call: the call.
        calibrations: how many are kept; one for each depth of heads that draft all depths at once.
    """

    def __init__(self, call: DraftCall, calibrations: int = 1):
        super().__init__(call)
        temperature = round(call.temperature, 2)
        self._keys = [(call.drafting.key, self._mode, temperature, index) for index in range(calibrations)]
        known = call.model if self.remembers else None
        self.calibrations: list[Calibration] = [calibration_memory.recall(known, key) for key in self._keys]
        self._tree = DraftTree.empty(call.state.batch)
        # For each row the rank, confidence and depth of its nodes.
        self._features: list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]] = []

    def verified(self, tree: DraftTree, builder: TreeBuilder, nodes: Sequence[list[int]], confidence: Any) -> DraftTree:
        """Record the tree that is verified; returns it with its joint probabilities.

        Args:
            tree: the draft.
            builder: that it was chosen from.
            nodes: for each row, the builder's index of each node of the draft.
            confidence: `[rows, nodes of the builder]`.
        """
        self._features = [
            (builder.rank[row, index], confidence[row, index], builder.depth[row, index])
            for row, index in enumerate(nodes)
        ]
        joint = tuple(tuple(builder.joint[row, index].tolist()) for row, index in enumerate(nodes))
        self._tree = replace(tree, joint=joint)
        return self._tree

    def not_drafted(self, batch: int) -> DraftTree:
        """An empty draft."""
        self._tree, self._features = DraftTree.empty(batch), []
        return self._tree

    def observe(self, result: VerificationResult) -> None:
        """Count which nodes were accepted, among the children of each row's last token and of its accepted nodes."""
        for row, path in enumerate(result.paths):
            if path is None or not self._features or not self._tree.parents[row]:
                continue
            judged = judged_nodes(self._tree.tokens[row].tolist(), self._tree.parents[row], result.tokens[row])
            accepted = np.array([is_accepted for _, is_accepted in judged], dtype=bool)
            rank, confidence, depth = (values[[node for node, _ in judged]] for values in self._features[row])
            for index, calibration in enumerate(self.calibrations):
                chosen = slice(None) if len(self.calibrations) == 1 else depth == index + 1
                calibration.observe(rank[chosen], confidence[chosen], accepted[chosen])

    def end(self) -> None:
        if self.remembers:
            for key, calibration in zip(self._keys, self.calibrations, strict=True):
                calibration_memory.store(self.call.model, key, calibration)

    def shape(self, size: str | int | None, depths: Sequence[int], children: int = MAX_CHILDREN) -> TreeShape:
        """How the next tree grows.

        Args:
            size: a number of nodes; "auto" for the fastest; None for a chain.
            depths: `[rows]` maximum depths.
            children: of a node at most.
        """
        return tree_shape(size, self.call, depths, children)

    @property
    def _mode(self) -> str:
        if self.wants_q:
            return "rejection"
        return "sampled" if self.call.do_sample else "greedy"

    @property
    def wants_q(self) -> bool:
        """Whether verification needs the probabilities that draft tokens were sampled with."""
        return self.call.verification is not None and self.call.verification.wants_q
