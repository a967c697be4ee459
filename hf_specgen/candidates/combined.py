"""Several strategies whose proposals are ranked by estimated acceptance in one draft tree, in every step.

Source: Hu et al., "SAM Decoding: Speculative Decoding via Suffix Automaton" (2024), for combining copied text with
Token Recycling or EAGLE; there one of them drafts a step, here both do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING

from hf_specgen.candidates.base import Candidates, DraftCall, DraftSession, Tree, check_tree
from hf_specgen.candidates.combined_member import Member
from hf_specgen.candidates.merged_tree import merge_trees
from hf_specgen.candidates.network_gain import network_gain_memory
from hf_specgen.candidates.ngram import NgramCandidates
from hf_specgen.candidates.recycling import RecyclingCandidates
from hf_specgen.candidates.tree_shape import FastestSize, FixedSize, TreeShape, tree_shape
from hf_specgen.candidates.union_tree import UnionTree, unite
from hf_specgen.depth import Policy
from hf_specgen.depth.calibration import calibration_memory
from hf_specgen.targets.early_exit import EarlyExitTarget
from hf_specgen.targets.requirements import TargetRequirements
from hf_specgen.tree import DraftTree
from hf_specgen.verification.result import VerificationResult, judged_nodes, result_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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

    def start(self, call: DraftCall) -> DraftSession:
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

    def __init__(self, settings: CombinedCandidates, call: DraftCall):
        super().__init__(call)
        self._settings = settings
        self._key = (settings.profile_key(), "combined", call.do_sample, round(call.temperature, 2))
        known = call.model if self.remembers else None
        self._members = [
            Member(one, one.start(call), call.state.batch, network_gain_memory.recall(known, (*self._key, number)))
            for number, one in enumerate(settings.strategies)
        ]
        self.top_tokens = max(member.session.top_tokens for member in self._members)
        # An early-exit target has run its first layers on the nodes of one member; others cannot be added to its draft.
        self._merges = not isinstance(call.target, EarlyExitTarget)
        self._wants_q = call.verification is not None and call.verification.wants_q
        self._calibration = calibration_memory.recall(known, self._key)
        self._trees: list[UnionTree] = []
        self._has_drafted = False
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
            member.count_gain(result)
            # After a prefill without drafts only members that use more than the outcome of a draft are called.
            if not self._in_prefill or member.draft.nodes or member.session.top_tokens or self._has_drafted:
                member.session.observe(result_for(result, member.draft))

    def end(self) -> None:
        if self.remembers:
            calibration_memory.store(self.call.model, self._key, self._calibration)
        for number, member in enumerate(self._members):
            if self.remembers and member.has_passes:
                network_gain_memory.store(self.call.model, (*self._key, number), member.gain)
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
            member.draft, member.expected_draft_seconds = DraftTree.empty(len(budget)), 0.0
        # Members whose drafts cost nothing come first: a draft model reads what they propose in its first pass.
        for member in sorted(self._members, key=lambda member: member.has_passes and ranks):
            has_draft = not self._merges and any(other.draft.nodes for other in self._members)
            is_left_out = has_draft or (extends and member.session.knows_successors)
            depth = [0 if is_left_out else min(depth, member.k) for depth in budget]
            sized = shape if member.has_passes and any(depth) and isinstance(shape, FastestSize) else None
            if sized and ranks and not self._is_network_used(member, sized, budget, is_prefill):
                sized, depth = None, [0] * len(budget)
            member.draft = method(member.session)(depth)
            if sized:
                member.expected_draft_seconds = sized.latency.drafter.draft(member.passes)
        self.passes = [tokens for member in self._members for tokens in member.passes]
        tree = self._ranked(shape, budget, is_prefill) if ranks and shape is not None else self._merged()
        self._has_drafted = tree.nodes > 0
        return tree

    def _is_network_used(self, member: Member, shape: FastestSize, budget: Sequence[int], is_prefill: bool) -> bool:
        """Whether a member drafts in addition to those without a network; if so, it receives what they propose."""
        without = DraftTree.empty(len(budget))  # at prefill networks always draft
        if not is_prefill:
            without = self._ranked(shape, budget, is_prefill)
            if not member.has_gain(without, shape.latency):
                return False
        if member.session.takes_suggestions:
            sources = [other.session for other in self._members if other.session.knows_continuations]
            member.session.suggest(without, sources)
        return True

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
        network = next((number for number, member in enumerate(self._members) if member.has_passes), None)
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
                network=network,
                attends_to_text=network is not None and self._members[network].session.attends_to_text,
            )
            for row, depth in enumerate(budget)
        ]
        if isinstance(shape, FastestSize):
            # More nodes are optimal where drafting has taken long.
            draft_seconds = sum(member.expected_draft_seconds for member in self._members)
            count, _ = shape.of_grown([tree.joint for tree in self._trees], draft_seconds)
        joint = tuple(tuple(tree.joint[:count]) for tree in self._trees)
        return DraftTree.from_nodes([tree.first(count) for tree in self._trees], joint=joint)
