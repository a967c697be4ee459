"""Several strategies in one draft tree: copies of text that repeats itself, and the draft of a model or head.

Members without a forward pass draft first, into one tree, which Token Recycling extends. If that is expected to yield
many tokens, or if drafters, the members with a forward pass, have added too little in this call, it is verified alone.
Otherwise the drafters propose too, and all drafts are merged into one tree: most probable nodes first, cut at the
fastest size. Presets are strategies by purpose, chosen when the target is known.

Source: Hu et al., "SAM Decoding: Speculative Decoding via Suffix Automaton" (2024), for combining copied text with
Token Recycling or EAGLE; there one of them drafts a step, here both may.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import reduce
from typing import Literal

from transformers import PreTrainedModel

from hf_specgen.call import DraftingSettings, Prediction, memory
from hf_specgen.candidates.base import Candidates, DraftSession, StartSession, TreeSetting, checked_draft
from hf_specgen.candidates.best_first import SearchLimits, SearchTree, best_first, draft_rows
from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.candidates.draft_heads import MTPCandidates
from hf_specgen.candidates.drafter_time_loss import DrafterTimeLoss
from hf_specgen.candidates.merged_tree import MemberDrafts, MergedNode, UnproposedTokens, merged_children
from hf_specgen.candidates.ngram import NgramCandidates
from hf_specgen.candidates.ngram_history import NgramHistory
from hf_specgen.candidates.recycling import RecyclingCandidates, RecyclingSession
from hf_specgen.depth import AdaptiveDepth, Policy
from hf_specgen.heads.mtp import NUM_LAYERS_KEYS
from hf_specgen.targets.early_exit import EarlyExitTarget
from hf_specgen.targets.model_parts import text_config
from hf_specgen.targets.requirements import TargetRequirements
from hf_specgen.tree import DraftTree
from hf_specgen.verification.result import VerificationResult, reindexed_result

ENOUGH_TOKENS = 7.0
"""Expected tokens of a step from which the draft of the members without a pass is verified alone: from there on a
drafter with a pass adds 0.3 to 0.8 tokens to a step; in steps with fewer expected tokens it adds 1.4 to 3.9."""
Preset = Literal["auto", "latency", "throughput", "memory"]


class CombinedCandidates(Candidates):
    """Combines the drafts of several strategies: n-grams where the text repeats itself, other drafts elsewhere.

    Args:
        strategies: the members. Left out, they are n-grams and Token Recycling, which need no model and no training.
        tree: how many draft tokens are verified: "auto", also if left out, the tree with the highest expected tokens
            per second, or as many likely ones as the draft may be deep if the policy has no latency model; a number is
            the size of every tree.
        prediction: the expected output, for the n-grams among the members; see `NgramCandidates`.
        policy: chooses the depth of all members, step by step.

    Raises:
        ValueError: if there are none, two of them run the target in different ways, or none uses a prediction.
        TypeError: if one of them is no strategy.

    Example:
        >>> CombinedCandidates([NgramCandidates(k=16)]).k
        16
    """

    arguments = {"tree": "auto"}

    def __init__(
        self,
        strategies: Sequence[Candidates] | None = None,
        *,
        tree: TreeSetting = None,
        prediction: Prediction | None = None,
        policy: Policy | None = None,
    ):
        if strategies is None:
            strategies = [NgramCandidates(), RecyclingCandidates()]
        if not isinstance(strategies, Sequence) or isinstance(strategies, str):
            raise TypeError(f"CombinedCandidates takes a list of strategies, got {strategies!r}; put it in brackets")
        if not strategies:
            raise ValueError("CombinedCandidates needs at least one strategy, such as NgramCandidates()")
        for strategy in strategies:
            if not isinstance(strategy, Candidates):
                raise TypeError(f"CombinedCandidates takes strategies such as NgramCandidates(), got {strategy!r}")
        super().__init__("auto", policy, tree=tree, max_k=max(strategy.k for strategy in strategies))
        self.strategies = tuple(strategies)
        self.drafter = list(strategies)
        self.prediction = prediction
        self.uses_prediction = any(strategy.uses_prediction for strategy in strategies)
        if prediction is not None and not self.uses_prediction:
            raise ValueError("prediction= needs n-grams among the strategies; add NgramCandidates()")
        self.negligible_draft_cost = all(strategy.negligible_draft_cost for strategy in strategies)

    def with_history(self, history: NgramHistory) -> CombinedCandidates:
        if not self.uses_prediction:
            super().with_history(history)  # raises a ValueError
        members = [member.with_history(history) if member.uses_prediction else member for member in self.strategies]
        return self._changed(strategies=tuple(members), drafter=members)

    def settings(self) -> DraftingSettings:
        settings = super().settings()
        return replace(
            settings,
            has_negligible_cost_drafts=any(member.negligible_draft_cost for member in self.strategies),
            max_slots=max(settings.max_slots, *(member.settings().max_slots for member in self.strategies)),
        )

    def target_requirements(self, model: PreTrainedModel) -> TargetRequirements:
        needs = [strategy.target_requirements(model) for strategy in self.strategies]
        return reduce(TargetRequirements.__or__, needs)

    def start(self, batch: DraftBatch) -> DraftSession:
        return self.start_members(batch, [strategy.start for strategy in self.strategies])

    def start_members(self, batch: DraftBatch, starts: Sequence[StartSession]) -> DraftSession:
        """Begin a call in which the sessions of the members begin in other ways than by `Candidates.start`."""
        return _CombinedSession(self, starts, batch)

    def profile_key(self) -> tuple[str | int | float | bool, ...]:
        """The settings of all members; the kind is that of the member whose drafting takes time."""
        members = self.strategies
        costly_member = next((member for member in members if not member.negligible_draft_cost), members[0])
        keys_of_members = (part for member in members for part in member.profile_key())
        return (costly_member.profile_key()[0], "combined", str(self.tree), *keys_of_members)


class _CombinedSession(DraftSession):
    """The sessions of the members, those without a forward pass first, and their drafts of the current step."""

    def __init__(self, settings: CombinedCandidates, starts: Sequence[StartSession], batch: DraftBatch):
        if settings.prediction is not None and batch.call.settings.prediction is None:
            batch = batch.with_settings(prediction=settings.prediction)
        super().__init__(batch)
        members = list(zip(settings.strategies, starts, strict=True))
        members.sort(key=lambda member: not member[0].negligible_draft_cost)
        self._tree_setting = settings.tree
        self._members: list[tuple[DraftSession, int]] = []
        with ExitStack() as stack:  # if a member cannot start, those before it end
            for strategy, start in members:
                session = start(batch)
                stack.callback(session.end)
                self._members.append((session, strategy.k))
            self._stack = stack.pop_all()
        self._num_without_pass = sum(strategy.negligible_draft_cost for strategy in settings.strategies)
        self.top_tokens = max(session.top_tokens for session, _ in self._members)
        recycling = (session for session, _ in self._members if isinstance(session, RecyclingSession))
        self._recycling = next(recycling, None)
        # Nodes cannot be added to a draft that an early-exit target has run its first layers on. Rejection sampling
        # verifies every node that was drawn: copied ones beside them cost more than they yield.
        self._verifies_one_draft = batch.wants_q or isinstance(batch.target, EarlyExitTarget)
        # A short call does not make up for the prefill of drafters.
        self._uses_drafters = self._num_without_pass < len(members) and batch.prefill_is_short()
        self._member_trees = [DraftTree.empty(batch.state.batch)] * len(members)
        # Of the present step: whether `plan` has drafted with the members without a forward pass, and whether the
        # drafters, the members with one, draft too.
        self._is_planned = False
        self._drafters_take_part = False
        self._member_drafts: list[MemberDrafts] = []
        self._unproposed = UnproposedTokens()
        self._drafter_time_loss = DrafterTimeLoss(batch)
        self._tree_without_pass = DraftTree.empty(batch.state.batch)  # of the members without a forward pass
        self._returned_tree = self._tree_without_pass
        self.tokens_per_pass: list[int] = []

    def observe(self, result: VerificationResult) -> None:
        """Update the estimates of the merged tree and the drafters' time loss, then pass the outcome to the members."""
        if any(draft.nodes for draft in self._member_trees[self._num_without_pass :]):
            for member_drafts, tokens in zip(self._member_drafts, result.tokens, strict=True):
                self._unproposed.observe(member_drafts, tokens)
        if self._uses_drafters:
            self.excluded_time_loss = self._drafter_time_loss.observe(
                result, self._tree_without_pass, self._returned_tree, self.tokens_per_pass
            )
        for (session, _), draft in zip(self._members, self._member_trees, strict=True):
            session.observe(reindexed_result(result, draft, self._returned_tree))

    def end(self) -> None:
        self._stack.close()

    def plan(self, max_depths: Sequence[int]) -> None:
        """Draft with the members that have no forward pass, and choose how deep the others draft."""
        self._draft_without_pass(max_depths)
        self._is_planned = True
        for session, k in self._members[self._num_without_pass :]:
            session.plan([min(depth, k) if self._drafters_take_part else 0 for depth in max_depths])

    def _draft_without_pass(self, max_depths: Sequence[int]) -> None:
        """Draft with the members that have no forward pass; sets their tree, and whether the others draft too."""
        self._member_trees = []
        self.tokens_per_pass = []
        # Token Recycling has no draft here: it extends the merged tree, see `merged_children`.
        for session, k in self._members[: self._num_without_pass]:
            self._draft_member(session, 0 if session is self._recycling else k, max_depths)
        tree = self._search(max_depths)
        # Expected tokens of a step with this tree, by row with a draft.
        expected = [1 + sum(row) for row in tree.probability or () if row]
        is_enough = bool(expected) and sum(expected) / len(expected) >= ENOUGH_TOKENS
        self._drafters_take_part = self._uses_drafters and not is_enough and not self._drafter_time_loss.is_too_high
        self._tree_without_pass = tree

    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        """The members' drafts in one tree."""
        if not self._is_planned:
            self._draft_without_pass(max_depths)
        self._is_planned = False
        tree = self._tree_without_pass
        for session, k in self._members[self._num_without_pass :]:
            draft = self._draft_member(session, k if self._drafters_take_part else 0, max_depths)
            self.tokens_per_pass += session.passes_of(draft)
            if draft.nodes and self._verifies_one_draft:
                # This draft is verified alone: nothing is merged, and no further member drafts.
                tree = draft
                self._drafters_take_part = False
        if self._drafters_take_part and any(draft.nodes for draft in self._member_trees[self._num_without_pass :]):
            tree = self._search(max_depths, self.tokens_per_pass)
        self._returned_tree = tree
        return tree

    def _draft_member(self, session: DraftSession, k: int, max_depths: Sequence[int]) -> DraftTree:
        """Draft with a member, up to depth `k`; returns its draft, which `_member_trees` gets too."""
        draft = session.draft([min(depth, k) for depth in max_depths])
        self._member_trees.append(checked_draft(draft, self.batch.call.drafting.name, self.batch.state.batch))
        return self._member_trees[-1]

    def _search(self, max_depths: Sequence[int], passes: Sequence[int] | None = None) -> DraftTree:
        """The most probable tree of what the members proposed, extended by Token Recycling."""

        self._member_drafts = [
            MemberDrafts(self._member_trees, self._num_without_pass, row) for row in range(len(max_depths))
        ]

        def search(row: int, limits: SearchLimits) -> SearchTree[MergedNode]:
            children = merged_children(self._member_drafts[row], self._unproposed.factor, self._recycling)
            root = self._member_drafts[row].root(self.batch.state.last_token(row))
            return best_first(root, children, max_depths[row], limits)

        return draft_rows(self.batch, self._tree_setting, max_depths, search, passes)[0]


AUTO = CombinedCandidates()  # a strategy that needs no files and no training: n-grams and Token Recycling
PRESETS: dict[str, Candidates] = {
    "auto": AUTO,
    "latency": AUTO,
    "throughput": NgramCandidates(),
    "memory": NgramCandidates(k=8, policy=AdaptiveDepth()),
}
"""The strategy of each preset, one object for all calls."""
WITH_MTP = CombinedCandidates([NgramCandidates(), MTPCandidates()])


class PresetCandidates(Candidates):
    """The strategy for a purpose. All need no further checkpoint, and draft while that is faster than plain decoding.

    - "auto": n-grams and Token Recycling, in trees.
    - "latency": for single requests. N-grams and the multi-token prediction layer in the target's own checkpoint, if it
      has one; otherwise as "auto".
    - "throughput": for batches. N-grams in trees, whose size follows from the latency of the rows together; nothing is
      computed for rows that repeat nothing.
    - "memory": n-grams in chains of at most 8 tokens; no weights and no tables, a few slots of cache a row.

    Args:
        name: one of these.

    Raises:
        ValueError: for another name.
    """

    arguments = {}

    def __init__(self, name: str):
        super().__init__()
        if name not in PRESETS:
            raise ValueError(
                f"there is no preset {name!r}; choose {', '.join(map(repr, PRESETS))}, or give a strategy such as "
                "NgramCandidates(), for a checkpoint AutoCandidates.from_pretrained(name)"
            )
        self.name = self.drafter = name

    def for_model(self, model: PreTrainedModel) -> Candidates:
        has_layer = self.name == "latency" and any(getattr(text_config(model), name, None) for name in NUM_LAYERS_KEYS)
        if has_layer and memory.recall(model, "has MTP", lambda: True):
            try:
                WITH_MTP.target_requirements(model)
                return WITH_MTP
            except (OSError, ValueError):  # the checkpoint does not have what its config names
                memory.store(model, "has MTP", False)
        return PRESETS[self.name]

    def start(self, batch: DraftBatch) -> DraftSession:
        return PRESETS[self.name].start(batch)
