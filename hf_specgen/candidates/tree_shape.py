"""Chooses the size of a draft tree: a fixed number of nodes, or the number with the most expected tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, zip_longest
from math import isqrt
from typing import Protocol

import numpy as np

from hf_specgen.candidates.base import DraftCall
from hf_specgen.candidates.tree_builder import Floats, TreeBuilder
from hf_specgen.depth.cost import CostCurve
from hf_specgen.depth.latency import DraftLatency, StepLatency
from hf_specgen.depth.schedules import context_length

MAX_NODES = 64
"""Maximum number of nodes of a row: beyond, each further one adds to the latency even of a memory-bound target."""
MAX_BEAM = 8
"""Maximum number of nodes of a row that are expanded in one pass of the drafter."""
MAX_CHILDREN = 8
"""Maximum number of children of a node: the eighth most likely token is accepted in about 1% of the cases."""
MAX_READ_AHEAD = 32
"""Maximum number of first-stage nodes of a row that a drafter reads in a pass: half of the cache's free slots."""
MIN_GAIN = 0.001
"""Relative gain in expected tokens per second below which no pass of the drafter is made, even if it costs nothing."""
MIN_PREFILL_JOINT = 0.3
"""Joint probability below which a token from the text is not verified with the prompt, whose pass is compute-bound:
after 60 chat prompts of five domains no draft token was accepted."""
EXPECTED_CHILD = 0.6
"""Assumed probability that one of a node's children is accepted, before a node was expanded in this draft."""


class TreeShape(Protocol):
    """Decides how a tree grows, and how much of it is verified."""

    @property
    def children(self) -> int:
        """How many children are proposed for a node."""

    def beam(self, builder: TreeBuilder) -> int:
        """How many nodes of each row to expand in the next pass of the drafter; 0 to stop.

        Args:
            builder: the tree so far.
        """

    def nodes(self, builder: TreeBuilder) -> int:
        """How many nodes of each row are verified."""


@dataclass(frozen=True)
class Chain:
    """A chain of the drafter's most preferred tokens."""

    children: int = 1

    def beam(self, builder: TreeBuilder) -> int:
        return 1

    def nodes(self, builder: TreeBuilder) -> int:
        return max(1, int(builder.limits.max(initial=1)))


CHAIN = Chain()


@dataclass(frozen=True)
class FixedSize:
    """The best tree of a fixed number of nodes, expanded about the square root of that many nodes at a time."""

    size: int
    children: int = MAX_CHILDREN

    def beam(self, builder: TreeBuilder) -> int:
        beam = max(1, isqrt(self.size))
        return beam if _may_improve(builder, self.size) else 0

    def nodes(self, builder: TreeBuilder) -> int:
        return self.size


@dataclass
class FastestSize:
    """The tree with the highest expected tokens per second: without passes and nodes that cost more than they save.

    Args:
        latency: of the next steps.
        rows: how many rows draft.
        max_nodes: nodes of a row at most.
        children: of a node; 1 for chains.
        is_prefill: whether the tree is verified together with the prompt.

    Attributes:
        min_joint: a node that is less likely to be accepted than this cannot make a step faster, whatever the tree.
        passes_per_level: passes of the drafter that a level takes on average; below 1 if they read ahead.
    """

    latency: StepLatency
    rows: int
    max_nodes: int = MAX_NODES
    children: int = MAX_CHILDREN
    is_prefill: bool = False

    def __post_init__(self) -> None:
        self._target, self._target_list, self.min_joint = _target_seconds(
            self.latency.target, self.rows, self.max_nodes
        )
        if self.is_prefill:
            self.min_joint = max(self.min_joint, MIN_PREFILL_JOINT)
        widths = MAX_BEAM if self.children > 1 else 1
        self._pass, self._spent = _drafter_seconds(self.latency.drafter, self.rows, widths)
        self._seen = self._expanded = 0
        self._child = EXPECTED_CHILD
        self.passes_per_level = 1.0

    def beam(self, builder: TreeBuilder) -> int:
        self._measure_children(builder)
        tokens, rate, best = self._best(builder)
        frontier = builder.frontier_joint(max(0, min(len(self._pass), self.max_nodes - self._expanded))).sum(axis=0)
        frontier = frontier[frontier > 0]  # expected rows that reach the j-th node to expand
        if not len(frontier) or not _may_improve(builder, self.max_nodes):
            return 0
        # A first draft token may cost far more than each further one, so several levels are considered at once.
        levels = np.arange(1, max(2, int(builder.limits.max() - builder.depth.max()) + 1))[:, None]
        width = np.arange(1, len(frontier) + 1)
        gain = np.cumsum(self._child**levels, axis=0) * np.cumsum(frontier)
        nodes = np.minimum(best + levels * width, self.max_nodes)
        passes = levels * self.passes_per_level
        seconds = self._target[nodes] + self._spent + passes * self._pass[: len(frontier)]
        expected_rate = ((tokens + gain) / seconds).max(axis=0)  # by width
        beam = int(np.argmax(expected_rate)) + 1
        if expected_rate[beam - 1] <= rate * (1 + MIN_GAIN):
            return 0
        self._spent += float(self._pass[beam - 1])
        self._expanded += beam
        return beam

    def nodes(self, builder: TreeBuilder) -> int:
        return self._best(builder)[2]

    def read_ahead(self, joint: Sequence[Sequence[float]], read: int = 1) -> int:
        """How many first-stage nodes of each row the drafter reads in a pass besides others, whose latency then counts.

        A node is read if the pass that it is expected to save takes longer than one token more in this pass.

        Args:
            joint: of each row's nodes, the probability that a pass over the node would follow, in descending order.
            read: how many tokens of each row the pass reads anyway.
        """
        drafter = self.latency.drafter
        saved = np.array([sum(column) for column in zip_longest(*joint, fillvalue=0.0)][:MAX_READ_AHEAD])
        seconds = drafter.by_tokens(self.rows * np.arange(float(read), len(saved) + read + 1))
        passes = np.concatenate([[0.0], np.cumsum(saved / self.rows)])
        count = int(np.argmax(passes * drafter.seconds_of(self.rows) - (seconds - seconds[0])))
        self._spent += float(seconds[count] - seconds[0])
        self._expanded += count
        return count

    def of_grown(self, joint: Sequence[Sequence[float]], drafting: float = 0.0) -> tuple[int, float]:
        """How many nodes of complete trees to verify, and the expected tokens per second with them.

        Args:
            joint: joint probabilities of each row's nodes, in descending order.
            drafting: seconds that the passes of the drafter took.
        """
        gains = joint[0] if len(joint) == 1 else map(sum, zip_longest(*joint, fillvalue=0.0))
        tokens = accumulate(gains, initial=float(self.rows))
        rates = [count / (seconds + drafting) for count, seconds in zip(tokens, self._target_list, strict=False)]
        best = max(rates)
        return rates.index(best), best

    def _best(self, builder: TreeBuilder) -> tuple[float, float, int]:
        """Expected tokens of all rows, tokens per second, and nodes of the fastest tree so far."""
        joint = builder.sorted_joint(self.max_nodes).sum(axis=0)
        tokens = self.rows + np.concatenate([[0.0], np.cumsum(joint)])
        rates = tokens / (self._target[: len(tokens)] + self._spent)
        best = int(np.argmax(rates))
        return float(tokens[best]), float(rates[best]), best

    def _measure_children(self, builder: TreeBuilder) -> None:
        """Estimate `_child`: P(one of a node's children is accepted | the node is), from the nodes expanded last."""
        new = slice(self._seen, builder.joint.shape[1])
        parents = builder.parents[:, new]
        row = np.arange(len(parents))[:, None]
        above = np.where(parents < 0, 1.0, builder.joint[row, parents])
        live = builder.joint[:, new] > 0
        if live.any():
            reached = (above * live).sum() / self.children
            self._child = float(builder.joint[:, new].sum() / max(reached, 1e-9))
            self._child = min(self._child, 1.0)
        self._seen = builder.joint.shape[1]


def _may_improve(builder: TreeBuilder, size: int) -> bool:
    """Whether expanding the frontier may change the best tree of a row of `size` nodes.

    A child of a node that is not among the best `size` nodes cannot be among them either.
    """
    best = builder.sorted_joint(size)
    return best.shape[1] < size or bool((builder.frontier_joint(1)[:, 0] > best[:, -1]).any())


@lru_cache(maxsize=64)
def _target_seconds(target: CostCurve, rows: int, max_nodes: int) -> tuple[Floats, list[float], float]:
    """Seconds of the target's pass by the nodes of each row, from 0 on, as an array and as a list; and `min_joint`."""
    seconds = target.by_tokens(rows * np.arange(1.0, max_nodes + 2))
    # Each node adds its probability to the tokens of a step, of which there is at least one for each row.
    return seconds, seconds.tolist(), max(MIN_GAIN, float((np.diff(seconds) / seconds[1:]).min()))


@lru_cache(maxsize=64)
def _drafter_seconds(drafter: DraftLatency, rows: int, widths: int) -> tuple[Floats, float]:
    """Seconds of the drafter's pass by the nodes of each row, from 1 on; and of the pass over its last token."""
    passes = np.maximum.accumulate(drafter.by_tokens(rows * np.arange(1.0, widths + 1)))
    return passes, drafter.draft([rows])


def tree_shape(
    size: str | int | None,
    call: DraftCall,
    depths: Sequence[int],
    children: int = MAX_CHILDREN,
    is_prefill: bool = False,
) -> TreeShape:
    """How the next tree of a call grows.

    Args:
        size: a number of nodes; "auto" for the fastest; None for a chain.
        call: whose latency model decides; without one, "auto" is a chain.
        depths: `[rows]` maximum depths.
        children: of a node at most.
        is_prefill: whether the tree is verified together with the prompt.
    """
    if isinstance(size, int):
        return FixedSize(size, children)
    latency = None if call.depth is None else call.depth.latency
    if size is None or latency is None:
        return CHAIN
    rows = sum(depth > 0 for depth in depths)
    return FastestSize(latency.at(rows, context_length(call)), rows, children=children, is_prefill=is_prefill)
