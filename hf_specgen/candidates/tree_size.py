"""How large the draft trees of a step become: how many nodes the drafter expands, and how many the target verifies.

The path probability of a node is the product of the acceptance probabilities along its path. With n nodes in each row

    tokens(n)  = active rows + sum of the path probabilities of the first n nodes of all rows, most probable first
    seconds(n) = target's pass over 1 + n tokens of each row + the drafter's passes so far

`FastestTreeSizer` verifies the number of nodes with the most tokens per second, and makes a further pass of the drafter
as long as that raises it; `FastestChainSizer` does so where drafts must be chains. `FixedTreeSizer` and, for chains,
`ChainSizer` are for `tree=<number>`; `ChainSizer` also for `tree=None`, and where no latencies are known.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest
from math import inf, isqrt
from typing import Any, NamedTuple

import numpy as np

from hf_specgen.candidates.acceptance_estimator import AcceptanceEstimator, LevelProbabilities
from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.candidates.tree_builder import ProbabilitySnapshot, TreeBuilder
from hf_specgen.depth.latency import CostCurve, DraftLatency, NodeLatency, StepLatency, fastest
from hf_specgen.device_tree import Floats
from hf_specgen.drafter import Drafter
from hf_specgen.targets.cache import padded_tokens
from hf_specgen.targets.row_layout import UNLIMITED

MAX_NODES = 63
"""Maximum number of nodes of a row, which with its last token fill a pass of 64: beyond, each further node adds to the
latency even of a memory-bound target."""
MAX_CHILDREN = 8  # of a node
MAX_EXPANSION_WIDTH = 8  # nodes of a row that are expanded in one pass
MIN_GAIN = 0.001  # relative gain in expected tokens per second that a further pass of the drafter must have
MIN_NODE_PROBABILITY = 0.001  # least path probability of a node in best-first search (`best_first.py`)
PathProbabilities = Sequence[Sequence[float]]  # of each row, in descending order


class ExpansionPlan(NamedTuple):
    """The next passes of the drafter: how many, and how many nodes of each row each of them expands."""

    num_passes: int
    expansion_width: int


class TreeSizer(ABC):
    """Sizes the trees of one step: at most `max_nodes` nodes of a row and `children` of a node (1 child: chains)."""

    def __init__(self, max_nodes: int, children: int):
        self.max_nodes = max_nodes
        self.children = children

    @abstractmethod
    def plan_without_sync(self, builder: TreeBuilder, k: int) -> ExpansionPlan | None:
        """The passes after level 1, chosen without a host synchronization.

        None if `_plan_with_sync` has to choose, or if no level may follow.
        It may be called before level 1 exists.
        """

    def next_plan(self, builder: TreeBuilder, k: int) -> ExpansionPlan | None:
        """The next passes; None if the trees are large enough. No draft is deeper than `k`."""
        if max(builder.max_depths) <= builder.num_levels:
            return None
        plan = None if builder.num_expanded else self.plan_without_sync(builder, k)
        return plan or self._plan_with_sync(builder, k)

    @abstractmethod
    def _plan_with_sync(self, builder: TreeBuilder, k: int) -> ExpansionPlan | None:
        """The plan after the first one, or if `plan_without_sync` made none; may read probabilities on the host."""

    def record_passes(self, plan: ExpansionPlan) -> None:
        """Record passes that were made: their time, and how many nodes they expanded."""

    @abstractmethod
    def num_verified_of_builder(self, builder: TreeBuilder) -> int:
        """How many nodes of each row are verified."""

    @abstractmethod
    def num_verified_by_probability(
        self, probability: PathProbabilities, draft_seconds: float = 0.0, wants_q: bool = False
    ) -> int:
        """How many nodes of each row are verified, of trees that the drafter does not extend any more.

        Args:
            probability: the path probabilities of the nodes of each row.
            draft_seconds: what the drafter has taken.
            wants_q: take the first local maximum: whether a node is verified then depends on no node after it, as
                rejection sampling requires.
        """

    def drafting_seconds(self, passes: Sequence[int]) -> float:
        """Seconds of passes of the drafter, given by their tokens; 0 where no latencies are known."""
        return 0.0

    def record_levels(self) -> None:
        """Record the levels of this draft in the estimator, which sizes later drafts."""


class FixedTreeSizer(TreeSizer):
    """Trees of at most `nodes` nodes of each row, of which about √nodes are expanded at a time.

    Rejection sampling and layer skip verify all expanded nodes, which may be more.
    """

    def __init__(self, nodes: int, children: int = MAX_CHILDREN):
        super().__init__(nodes, children)
        self._width = isqrt(nodes)

    def plan_without_sync(self, builder: TreeBuilder, k: int) -> ExpansionPlan | None:
        levels = self._levels_after_first(builder, k)
        passes = min(builder.levels_per_sync - 1, levels)  # level 1 counts among the levels before the synchronization
        return ExpansionPlan(passes, min(self._width, builder.children)) if passes else None

    def _plan_with_sync(self, builder: TreeBuilder, k: int) -> ExpansionPlan | None:
        levels = min(max(builder.max_depths), self.max_nodes) - builder.num_levels  # that may follow
        if levels <= 0:
            return None
        since_sync = builder.num_levels % builder.levels_per_sync
        # The host reads the probabilities every `levels_per_sync` levels, and may stop then. If one level is left, it
        # does not read them from a GPU, since the pass that this might save takes less time.
        may_stop = not since_sync and (levels > 1 or builder.levels_per_sync == 1)
        if may_stop and not builder.read_probabilities().may_improve(self.max_nodes):
            return None
        passes = min(builder.levels_per_sync - since_sync, levels)
        return ExpansionPlan(passes, min(self._width, builder.last_level_size))

    def _levels_after_first(self, builder: TreeBuilder, k: int) -> int:
        """How many levels may follow the first one, limited by `max_nodes`, as each has a node at least."""
        return min(_rounded_levels_after_first(builder, k), self.max_nodes - 1)

    def num_verified_of_builder(self, builder: TreeBuilder) -> int:
        return self.max_nodes

    def num_verified_by_probability(
        self, probability: PathProbabilities, draft_seconds: float = 0.0, wants_q: bool = False
    ) -> int:
        return self.max_nodes


class ChainSizer(FixedTreeSizer):
    """Chains as deep as the rows may draft, of at most `nodes` nodes.

    Args:
        may_end_early: whether some nodes must not be expanded (confidence threshold), so that a chain may end early.
    """

    def __init__(self, nodes: int = UNLIMITED, may_end_early: bool = False):
        super().__init__(nodes, children=1)
        self._may_end_early = may_end_early

    def plan_without_sync(self, builder: TreeBuilder, k: int) -> ExpansionPlan | None:
        if self._may_end_early:
            return super().plan_without_sync(builder, k)
        levels = self._levels_after_first(builder, k)
        return ExpansionPlan(levels, 1) if levels else None

    def num_verified_of_builder(self, builder: TreeBuilder) -> int:
        return min(self.max_nodes, max(1, *builder.max_depths))


class FastestTreeSizer(TreeSizer):
    """Trees with the most expected tokens per second.

    Args:
        rows, pass_rows: rows that draft, and rows of the target's pass if these are more.
        num_active_rows: rows that have not ended, each of which emits a token, if these are more than those that draft.
        is_padded: whether the target's passes are padded to the width of a captured one.
        estimator: of the call; None: of no earlier draft.
        verifies_expanded: whether all expanded nodes are verified, so that their number is limited too.
    """

    _max_children = MAX_CHILDREN

    def __init__(
        self,
        latency: StepLatency,
        rows: int = 1,
        pass_rows: int = 0,
        num_active_rows: int = 0,
        is_padded: bool = False,
        estimator: AcceptanceEstimator | None = None,
        verifies_expanded: bool = False,
    ):
        super().__init__(MAX_NODES, self._max_children)
        self._estimator = estimator or AcceptanceEstimator()
        self._levels = LevelProbabilities()
        self._verifies_expanded = verifies_expanded
        self._rows = rows
        self._num_active_rows = max(rows, num_active_rows)
        self._draft_latency = latency.draft
        self._snapshot: ProbabilitySnapshot | None = None
        self._target_latency = _target_latency(latency.target, max(rows, pass_rows), self.max_nodes, is_padded)
        self._target_seconds = self._target_latency.seconds
        self.min_probability = _min_probability(self._target_seconds)
        # `_pass_seconds[n - 1]` are those of a further pass over n nodes of each row.
        self._pass_seconds = _pass_seconds_by_width(latency.draft, rows)
        self._draft_seconds = latency.draft.draft_seconds([rows])  # of the draft so far; at first of one level

    def plan_without_sync(self, builder: TreeBuilder, k: int) -> ExpansionPlan | None:
        levels = min(_rounded_levels_after_first(builder, k), builder.levels_per_sync)
        if not levels or builder.levels_per_sync == 1:  # a synchronization is free
            return None
        width = min(len(self._pass_seconds), builder.children)
        # An optimistic estimate, before the host has any probability: the tokens of all candidates of each level in
        # the time of verifying one node for each level.
        passes_ahead = np.arange(1 + levels)
        nodes = np.minimum(1 + passes_ahead, self.max_nodes)
        tokens = self._num_active_rows + self._rows * self._estimator.expected_of_draft(1 + levels)
        seconds = self._target_seconds[nodes] + self._draft_seconds + passes_ahead * self._pass_seconds[width - 1]
        passes = fastest(tokens, seconds)  # choice n is n passes
        if passes > 2:  # so that there are few different plans, since each is captured
            passes = levels
        return ExpansionPlan(passes, width) if passes else None

    def _plan_with_sync(self, builder: TreeBuilder, k: int) -> ExpansionPlan | None:
        self._snapshot = builder.read_probabilities()
        width = self._choose_expansion_width(self._snapshot, builder)
        if not width:
            return None
        if builder.levels_per_sync == 1:
            return ExpansionPlan(1, width)
        # `width` only decides whether there is a plan: the plan has the largest width, so that few graphs are captured.
        passes = min(builder.levels_per_sync, k - builder.num_levels)
        width = min(len(self._pass_seconds), builder.children)
        if self._verifies_expanded:
            remaining = self.max_nodes - builder.num_expanded
            passes = min(passes, remaining)
            width = min(width, remaining // passes)
        return ExpansionPlan(passes, width)

    def record_passes(self, plan: ExpansionPlan) -> None:
        self._draft_seconds += plan.num_passes * float(self._pass_seconds[plan.expansion_width - 1])
        self._levels.expanded_width = plan.expansion_width

    def _choose_expansion_width(self, snapshot: ProbabilitySnapshot, builder: TreeBuilder) -> int:
        """How many nodes of each row the next pass should expand for the most tokens per second; 0 for no pass.

        A width of n means the n most probable candidates of the last level. Side effect: if expanding any of them may
        improve the tree, the level is added to `_levels`, for the estimator.
        """
        max_width = max(0, min(len(self._pass_seconds), self.max_nodes - builder.num_expanded))
        expansion_probability = snapshot.expansion_probability[:, :max_width]
        widths = int(np.count_nonzero(expansion_probability.sum(axis=0)))  # the most candidates that a row may expand
        if not widths or not snapshot.may_improve(self.max_nodes):
            return 0
        # `[rows, widths]` the probability that one of the nodes of each width is accepted; then the same, given that
        # one of the nodes expanded before is.
        cumulative = expansion_probability[:, :widths].cumsum(axis=1)
        conditional = self._levels.add(builder.num_levels, cumulative, snapshot.expansion_probability.sum(axis=1))
        # Without a further pass: tokens and seconds of the step if 0, 1, … of the present nodes are verified.
        probability = self._estimator.scaled(snapshot.probability[:, : self.max_nodes]).sum(axis=0)
        tokens = np.concatenate([[self._num_active_rows], probability]).cumsum()
        seconds = self._target_seconds[: len(tokens)] + self._draft_seconds
        verified = fastest(tokens, seconds)
        # If further passes follow, at least as many present nodes count as verified as one path has.
        verified_if_extended = min(max(verified, builder.num_levels), len(tokens) - 1)
        gains, seconds_ahead = self._gains_of_further_levels(builder, verified_if_extended, cumulative, conditional)
        # Choice 0 is no further pass, choice 1 + i the i-th of `[2, levels, widths]`, whose last axis is the width.
        all_tokens = np.append(tokens[verified], tokens[verified_if_extended] + gains)
        all_seconds = np.append(seconds[verified], seconds_ahead)
        choice = fastest(all_tokens, all_seconds, margin=MIN_GAIN)
        return 1 + (choice - 1) % widths if choice else 0

    def _gains_of_further_levels(
        self, builder: TreeBuilder, num_verified: int, cumulative: Floats, conditional: Floats
    ) -> tuple[Floats, Floats]:
        """What 1, 2, … further levels add to the expected tokens, and the seconds of the step with them.

        Both are `[2, levels, widths]`. `[0]`: of each further level only the nodes to expand are verified; `[1]`: all
        of its candidates. `num_verified` nodes of the present levels are verified in both cases. All numbers of levels
        are returned, as the second draft token may cost far less than the first one, and a run of certain tokens is
        faster only as a whole. `cumulative` and `conditional`: see `LevelProbabilities.add`.
        """
        widths = np.arange(1, 1 + cumulative.shape[1])
        levels = np.arange(1, 1 + max(1, max(builder.max_depths) - builder.num_levels))[:, None]
        # [2, levels, rows, widths] below the nodes of each width, given that one of them is accepted
        expected_below = self._estimator.expected(conditional, len(levels))
        gains = (expected_below * self._estimator.scaled(cumulative)).sum(axis=2)
        expanded = levels * widths
        nodes = np.minimum(num_verified + np.stack([expanded, builder.children * expanded]), self.max_nodes)
        seconds = self._target_seconds[nodes] + self._draft_seconds + levels * self._pass_seconds[: len(widths)]
        seconds[:, builder.num_expanded + expanded > self.max_nodes] = inf  # more than a tree may have
        return gains, seconds

    def record_levels(self) -> None:
        self._estimator.record_levels(self._levels)

    def num_verified_of_builder(self, builder: TreeBuilder) -> int:
        if self._snapshot is None or self._snapshot.num_levels < builder.num_levels:
            self._snapshot = builder.read_probabilities()
        probability = self._estimator.scaled(self._snapshot.probability[:, : self.max_nodes])
        return self.num_verified_by_probability(probability.tolist(), self._draft_seconds)

    def num_verified_by_probability(
        self, probability: PathProbabilities, draft_seconds: float = 0.0, wants_q: bool = False
    ) -> int:
        gains = probability[0] if len(probability) == 1 else map(sum, zip_longest(*probability, fillvalue=0.0))
        tokens = np.cumsum([self._num_active_rows, *gains], dtype=float)[: len(self._target_seconds)]
        seconds = self._target_seconds[: len(tokens)] + draft_seconds
        if wants_q:
            # Numbers of nodes n with fewer tokens per second at n + 1; the first one is the first local maximum.
            before_decrease = np.flatnonzero(np.diff(tokens / seconds) < 0)
            return int(before_decrease[0]) if len(before_decrease) else len(tokens) - 1
        return fastest(tokens, seconds)

    def drafting_seconds(self, passes: Sequence[int]) -> float:
        return self._draft_latency.draft_seconds(passes)

    def node_latency(self, draft_seconds: float) -> NodeLatency:
        """The latency of the step, of which the drafter has taken `draft_seconds`."""
        return self._target_latency._replace(seconds=self._target_seconds + draft_seconds)


class FastestChainSizer(FastestTreeSizer):
    """Chains with the most expected tokens per second."""

    _max_children = 1


def _rounded_levels_after_first(builder: TreeBuilder, k: int) -> int:
    """How many levels may follow the first level.

    They are rounded up to a multiple of `levels_per_sync`, but not beyond depth `k`: where passes are captured, drafts
    near the end of a text, which are less deep than `k`, then use the same graphs as other drafts.
    """
    levels = max(builder.max_depths) - 1
    per_sync = builder.levels_per_sync
    return min(k - 1, -(-levels // per_sync) * per_sync) if levels > 0 else 0


@lru_cache(maxsize=64)
def _target_latency(target: CostCurve, rows: int, nodes: int, is_padded: bool) -> NodeLatency:
    """The latency of the target's pass with up to `nodes` nodes of each row."""
    tokens = [padded_tokens(1 + count) if is_padded else 1 + count for count in range(nodes + 1)]
    seconds = np.array([target.seconds_of(rows * count) for count in tokens])
    return NodeLatency.of_seconds(seconds)


def _min_probability(seconds: Floats) -> float:
    """The least path probability of a node in best-first search, by the target's seconds T(n) for n nodes.

    A node with path probability p raises tokens per second only if p > (T(n + 1) - T(n)) / T(n + 1), a lower bound,
    since a step emits at least one token per row. Where padding makes this bound 0, `MIN_NODE_PROBABILITY` counts.
    """
    return max(MIN_NODE_PROBABILITY, float((np.diff(seconds) / seconds[1:]).min()))


@lru_cache(maxsize=64)
def _pass_seconds_by_width(latency: DraftLatency, rows: int) -> Floats:
    """Seconds of the drafter's pass by the nodes of each row, from 1 on."""
    seconds = [latency.pass_seconds(rows * width) for width in range(1, 1 + MAX_EXPANSION_WIDTH)]
    return np.maximum.accumulate(seconds)  # a wider pass is never assumed to be faster


def tree_sizer(
    tree: str | int | None,
    batch: DraftBatch,
    depths: Sequence[int],
    drafter: Drafter[Any] | None = None,
    estimator: AcceptanceEstimator | None = None,
    may_end_early: bool = False,
) -> TreeSizer:
    """The sizer of the next trees of a batch, whose rows have these maximum depths.

    Args:
        tree: maximum number of nodes; "auto" for the most tokens per second; None, or "auto" without latencies: chains.
        drafter: makes a pass for each level; None: the trees are searched without passes.
        may_end_early: see `ChainSizer`.
    """
    is_chain = batch.verifies_chains_only or (drafter is not None and drafter.drafts_chains)
    if isinstance(tree, int):
        return ChainSizer(tree, may_end_early) if is_chain else FixedTreeSizer(tree)
    rows = max(1, sum(depth > 0 for depth in depths))
    num_active_rows = sum(not batch.state.has_ended(row) for row in range(batch.state.batch))
    # A captured pass over 2 tokens is padded to 4, so `pass_shape(2)` shows whether passes are padded.
    pass_rows, padded_tokens_of_two = batch.pass_shape(2)
    pads_passes = padded_tokens_of_two > 2
    pass_rows = max(rows, pass_rows)
    latency = None if tree is None else batch.step_latency(pass_rows)
    if latency is None:
        return ChainSizer(may_end_early=may_end_early)
    if drafter is not None and (tokens := drafter.single_pass_tokens):  # further levels of the draft take no time
        latency = latency._replace(draft=DraftLatency(overhead=latency.draft.draft_seconds([rows * tokens])))
    sizer = FastestChainSizer if is_chain else FastestTreeSizer
    verifies_expanded = drafter is not None and must_verify_expanded(batch, drafter)
    return sizer(latency, rows, pass_rows, num_active_rows, pads_passes, estimator, verifies_expanded)


def must_verify_expanded(batch: DraftBatch, drafter: Drafter[Any]) -> bool:
    """Whether the target has to verify all nodes that a pass of the drafter has expanded.

    In rejection sampling a node must not be left out because of its token, nor because of what follows it.
    """
    return batch.wants_q or drafter.expanded_nodes_first
