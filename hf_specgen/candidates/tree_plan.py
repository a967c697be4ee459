"""Which tree to verify: a given one, or the one that is worth most for how sure the heads are at this step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hf_specgen.candidates.rank_tree import RankTree
from hf_specgen.depth import CostCurve
from hf_specgen.heads.acceptance import Acceptance, best_tree, confidence_bin

MAX_NODES = 64
SIZES = [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
UNMEASURED = CostCurve((1, 65), (1.0, 2.0), context=256, batch=1)
"""What is assumed of a target on which `hf-specgen tune` was not run: 64 guesses double the time of a step."""


class StepCost(NamedTuple):
    """What a step costs by the nodes of its draft, in eighths of an octave above a step without.

    So coarse, that a tree can be kept for when the same costs come again.
    """

    eighths: tuple[int, ...]

    @classmethod
    def rounded(cls, seconds: NDArray[np.floating[Any]]) -> StepCost:
        """From the seconds of a step with 0, 1, 2, … nodes."""
        return cls(tuple(np.round(8 * np.log2(seconds[SIZES] / seconds[0])).astype(int).tolist()))

    def by_nodes(self) -> list[float]:
        """For each number of nodes."""
        known = [2 ** (eighth / 8) for eighth in self.eighths]
        return [float(cost) for cost in np.interp(range(MAX_NODES + 1), SIZES, known)]


class TreePlan(Protocol):
    """Chooses a tree for a row."""

    def tree(self, confidences: Sequence[float], rows: int, cost: StepCost | None = None) -> RankTree:
        """The tree for a row.

        Args:
            confidences: of each head, from 0 to 1.
            rows: how many rows are verified together.
            cost: of a step with that many rows, where that is known.
        """


class FixedTree:
    """Always the same tree.

    Args:
        paths: lists of ranks, as in `[[0], [0, 0], [1]]`.
        heads: how many heads there are.
        vocab: how many ranks there are.

    Raises:
        ValueError: if it is not a tree, or too deep or too wide for the heads.
    """

    def __init__(self, paths: Sequence[Sequence[int]], heads: int, vocab: int):
        self._tree = RankTree.from_paths(paths)
        if self._tree.depth > heads:
            raise ValueError(f"the tree is {self._tree.depth} deep, but there are {heads} heads; shorten its paths")
        if self._tree.width > vocab:
            raise ValueError(f"the tree has rank {self._tree.width - 1}, but the vocabulary ends at {vocab - 1}")

    def tree(self, confidences: Sequence[float], rows: int, cost: StepCost | None = None) -> RankTree:
        return self._tree


class ConfidentTree:
    """The tree that yields most tokens per second, by what is known of acceptance and of the target's cost.

    There are as many trees as combinations of the heads' bins of confidence; each is built when first needed.

    Args:
        acceptance: of the heads.
        cost: T(q) of the target, measured at batch 1; several rows are taken for as many tokens in one. Used where
            `tree` is not told what a step costs.
        budget: verify that many nodes, whatever they cost; None leaves it to the cost.
    """

    def __init__(self, acceptance: Acceptance, cost: CostCurve = UNMEASURED, budget: int | None = None):
        self._acceptance, self._cost, self._budget = acceptance, cost, budget
        self._built: dict[tuple[tuple[int, ...], int, StepCost | None], RankTree] = {}

    def tree(self, confidences: Sequence[float], rows: int, cost: StepCost | None = None) -> RankTree:
        key = tuple(map(confidence_bin, confidences)), rows, cost
        if key not in self._built:
            self._built[key] = self._build(*key)
        return self._built[key]

    def _build(self, bins: tuple[int, ...], rows: int, step_cost: StepCost | None) -> RankTree:
        measured = None if step_cost is None else step_cost.by_nodes()

        def cost(nodes: int) -> float:
            if self._budget:
                return 1.0
            return self._cost(rows * (1 + nodes)) if measured is None else measured[nodes]

        paths, _ = best_tree(self._acceptance.at(bins), cost, self._budget or MAX_NODES)
        return RankTree.from_paths(paths) if paths else RankTree((), ())
