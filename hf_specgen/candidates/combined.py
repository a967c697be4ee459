"""Several strategies whose proposals are ranked by estimated acceptance in one draft tree, in every step.

Source: Hu et al., "SAM Decoding: Speculative Decoding via Suffix Automaton" (2024), for combining copied text with
Token Recycling or EAGLE; there one of them drafts a step, here both do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING

from hf_specgen.candidates.base import Candidates, DraftSession, Tree, check_tree
from hf_specgen.candidates.combined_member import Member
from hf_specgen.candidates.merged_tree import merge_trees
from hf_specgen.candidates.ngram import NgramCandidates
from hf_specgen.candidates.recycling import RecyclingCandidates
from hf_specgen.candidates.tree_shape import FastestSize, FixedSize, TreeShape, tree_shape
from hf_specgen.candidates.union_tree import UnionTree, unite
from hf_specgen.depth import Policy
from hf_specgen.depth.calibration import calibration_memory
from hf_specgen.state import Call
from hf_specgen.target.early_exit import EarlyExitTarget
from hf_specgen.target.requirements import TargetRequirements
from hf_specgen.tree import DraftTree
from hf_specgen.verification.result import VerificationResult, judged_nodes, result_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MIN_SPEEDUP_WITHOUT_NETWORK = 1.25
"""Speedup from leaving out a network at which it is left out; above 1, since drafts that look good are overestimated.
The projected speed of n-grams and a draft model is 4.60x of plain decoding with it, 4.54x with 1.1 and 4.43x with 1."""


class CombinedCandidates(Candidates):
    """Combines the drafts of several strategies: n-grams where the text repeats itself, other drafts elsewhere.

    Args:
        strategies: the members. Left out, they are n-grams and Token Recycling, which need no model and no training.
        tree: how many draft tokens are verified: "auto" the tree with the highest expected tokens per second, if the
            policy has a latency model; a number is the size of every tree; None all that is proposed.
        policy: chooses the depth of all members, step by step.

    Raises:
        ValueError: if there are none, or two of them run the target in different ways.
        TypeError: if one of them is no strategy.

    Example:
        >>> CombinedCandidates([NgramCandidates(k=16)]).k
        16
    """

    def __init__(
        self, strategies: Sequence[Candidates] | None = None, *, tree: Tree = "auto", policy: Policy | None = None
    ):
        if strategies is None:
            strategies = [NgramCandidates(), RecyclingCandidates()]
        if not strategies:
            raise ValueError("CombinedCandidates needs at least one strategy, such as NgramCandidates()")
        for strategy in strategies:
            if not isinstance(strategy, Candidates):
                raise TypeError(f"CombinedCandidates takes strategies such as NgramCandidates(), got {strategy!r}")
        super().__init__("auto", policy, max_k=max(strategy.k for strategy in strategies))
        self.strategies = tuple(strategies)
        self.tree = check_tree(tree, self.k)
        self.adaptive_tree = self.tree == "auto"
        self.negligible_draft_cost = all(strategy.negligible_draft_cost for strategy in strategies)

    def target_requirements(self, model: PreTrainedModel) -> TargetRequirements:
        needs = [strategy.target_requirements(model) for strategy in self.strategies]
        return reduce(TargetRequirements.__or__, needs)

    def start(self, call: Call) -> DraftSession:
        return _CombinedSession(self, call)

    def profile_key(self) -> tuple[str | int | float | bool, ...]:
        """The kind is that of the member whose drafting takes time."""
        network = next((s for s in self.strategies if not s.negligible_draft_cost), self.strategies[0])
        members = (part for s in self.strategies for part in s.profile_key())
        return (network.profile_key()[0], "combined", str(self.tree), *members)

    def __repr__(self) -> str:
        tree = "" if self.tree == "auto" else f", tree={self.tree!r}"
        return f"CombinedCandidates({list(self.strategies)}{tree}{self._show_policy()})"


class _CombinedSession(DraftSession):
    """The sessions of the members, and the tree of the current step."""

    def __init__(self, settings: CombinedCandidates, call: Call):
        super().__init__(call)
        self._settings = settings
        self._members = [Member(one, one.start(call), call.state.batch) for one in settings.strategies]
        self.top_tokens = max(member.session.top_tokens for member in self._members)
        # An early-exit target has run its first layers on the nodes of one member; others cannot be added to its draft.
        self._merges = not isinstance(call.target, EarlyExitTarget)
        self._wants_q = call.verification is not None and call.verification.wants_q
        self._key = (settings.profile_key(), "combined", call.do_sample, round(call.temperature, 2))
        self._calibration = calibration_memory.recall(call.model if self.remembers else None, self._key)
        self._trees: list[UnionTree] = []
        self._has_drafted = False
        self._verified = 0
        self._in_prefill = True

    def draft(self, budget: Sequence[int]) -> DraftTree:
        self._in_prefill = False
        return self._combine(budget, lambda session: session.draft, is_prefill=False)

    def draft_at_prefill(self, budget: Sequence[int]) -> DraftTree:
        return self._combine(budget, lambda session: session.draft_at_prefill, is_prefill=True)

    def observe(self, result: VerificationResult) -> None:
        """Count what was accepted, and pass the outcome on to every member as one of its own draft."""
        for tree, emitted in zip(self._trees, result.tokens, strict=False):
            for node, accepted in judged_nodes(tree.tokens, tree.parents, emitted):
                self._calibration.count(tree.classes[node], tree.bins[node], accepted, tree.weights[node])
        self._trees = []
        for member in self._members:
            if member.has_passes and member.draft.nodes and self._verified:
                member.measure(sum(result.accepted), self._verified)
            # After a prefill without drafts only members that use more than the outcome of a draft are called.
            if not self._in_prefill or member.draft.nodes or member.session.top_tokens or self._has_drafted:
                member.session.observe(result_for(result, member.draft))

    def end(self) -> None:
        if self.remembers:
            calibration_memory.store(self.call.model, self._key, self._calibration)
        for member in self._members:
            member.session.end()

    def _combine(
        self,
        budget: Sequence[int],
        method: Callable[[DraftSession], Callable[[Sequence[int]], DraftTree]],
        is_prefill: bool,
    ) -> DraftTree:
        self._trees = []
        shape = tree_shape(self._settings.tree, self.call, budget, is_prefill=is_prefill) if any(budget) else None
        ranks = self._merges and not self._wants_q
        extends = ranks and isinstance(shape, FixedSize | FastestSize)
        for member in self._members:
            member.draft = DraftTree.empty(len(budget))
        # Members whose drafts cost nothing come first: where their drafts are long, no pass of a network is made.
        for member in sorted(self._members, key=lambda member: member.has_passes and ranks):
            if ranks and member.has_passes and isinstance(shape, FastestSize) and not is_prefill:
                member.session.suggest(self._ranked(shape, budget, is_prefill))
            has_draft = not self._merges and any(other.draft.nodes for other in self._members)
            is_left_out = (
                has_draft
                or (extends and member.session.knows_successors)
                or (ranks and member.has_passes and self._is_slower(member, shape, budget, is_prefill))
            )
            if is_left_out and member.has_passes and any(budget):
                member.skip()
            depth = [0 if is_left_out else min(depth, member.k) for depth in budget]
            member.draft = method(member.session)(depth)
            member.expected_draft_seconds = 0.0
            if any(depth) and member.has_passes and isinstance(shape, FastestSize):
                member.expected_draft_seconds = shape.latency.drafter.draft(member.passes)
        self.passes = [tokens for member in self._members for tokens in member.passes]
        tree = self._ranked(shape, budget, is_prefill) if ranks and shape is not None else self._merged()
        self._has_drafted = tree.nodes > 0
        self._verified = 0 if is_prefill else tree.nodes
        return tree

    def _merged(self) -> DraftTree:
        """Every node that a member proposed."""
        return merge_trees([member.draft for member in self._members])

    def _ranked(self, shape: TreeShape, budget: Sequence[int], is_prefill: bool) -> DraftTree:
        """The best tree of what the members proposed."""
        drafts = [member.draft for member in self._members]
        if isinstance(shape, FastestSize):
            count, min_joint = shape.max_nodes, shape.min_joint
        else:
            every = sum(draft.nodes for draft in drafts)
            count, min_joint = shape.size if isinstance(shape, FixedSize) else every, 0.0
        extends = isinstance(shape, FixedSize | FastestSize)
        successors = next(
            (
                (number, member.session.successors)
                for number, member in enumerate(self._members)
                if extends and member.session.knows_successors
            ),
            None,
        )
        acceptance, state = self._calibration.by_bin(), self.call.state
        self._trees = [
            unite(
                drafts,
                row,
                acceptance,
                last_token=state.last_token(row),
                depth=depth,
                nodes=count,
                min_joint=min_joint,
                successors=successors,
                only_chain=is_prefill and extends,
            )
            for row, depth in enumerate(budget)
        ]
        if isinstance(shape, FastestSize):
            # More nodes are optimal where drafting has taken long.
            draft_seconds = sum(member.expected_draft_seconds for member in self._members)
            count, _ = shape.of_grown([tree.joint for tree in self._trees], draft_seconds)
        joint = tuple(tuple(tree.joint[:count]) for tree in self._trees)
        return DraftTree.from_nodes([tree.first(count) for tree in self._trees], joint=joint)

    def _is_slower(self, network: Member, shape: TreeShape | None, budget: Sequence[int], is_prefill: bool) -> bool:
        """Whether more tokens per second are expected of the drafts so far without those of a network than with them.

        The network is assumed to yield its usual gain where the first token of these drafts is rejected.
        """
        if not isinstance(shape, FastestSize) or not network.steps:
            return False
        self._ranked(shape, budget, is_prefill)
        trees, self._trees = self._trees, []
        count, rate = shape.of_grown([tree.joint for tree in trees])
        gain = sum(sum(tree.joint[:count]) for tree in trees)
        first = sum(p for tree in trees for p, parent in zip(tree.joint, tree.parents, strict=True) if parent < 0)
        rejected = max(0.0, 1 - first / sum(depth > 0 for depth in budget))
        nodes = max(count, network.nodes)
        with_network = shape.rate_of(gain + rejected * network.gain, nodes, network.seconds)
        return rate >= MIN_SPEEDUP_WITHOUT_NETWORK * with_network
