"""Several strategies whose proposals are merged into one draft tree in every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING

from hf_specgen.candidates.base import Candidates, DraftSession
from hf_specgen.depth import Policy
from hf_specgen.state import Call
from hf_specgen.target.early_exit import EarlyExitTarget
from hf_specgen.target.requirements import TargetRequirements
from hf_specgen.tree import DraftTree, depths, merge_trees

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_specgen.verification import VerificationResult


class CombinedCandidates(Candidates):
    """Merges the drafts of several strategies: n-grams where the text repeats itself, a network elsewhere.

    Args:
        strategies: at least one; earlier ones come first in the tree.
        policy: chooses the depth of all of them, step by step.

    Raises:
        ValueError: if there are none, or two of them run the target in different ways.
        TypeError: if one of them is no strategy.

    Example:
        >>> from hf_specgen import NgramCandidates
        >>> CombinedCandidates([NgramCandidates(k=16)]).k
        16
    """

    def __init__(self, strategies: Sequence[Candidates], *, policy: Policy | None = None):
        if not strategies:
            raise ValueError("CombinedCandidates needs at least one strategy, such as NgramCandidates()")
        for strategy in strategies:
            if not isinstance(strategy, Candidates):
                raise TypeError(f"CombinedCandidates takes strategies such as NgramCandidates(), got {strategy!r}")
        super().__init__("auto", policy, max_k=max(strategy.k for strategy in strategies))
        self.strategies = tuple(strategies)
        self.negligible_draft_cost = all(strategy.negligible_draft_cost for strategy in strategies)

    def target_requirements(self, model: PreTrainedModel) -> TargetRequirements:
        needs = [strategy.target_requirements(model) for strategy in self.strategies]
        return reduce(TargetRequirements.__or__, needs)

    def start(self, call: Call) -> DraftSession:
        return _CombinedSession(call, [(s.k, s.start(call)) for s in self.strategies])

    def profile_key(self) -> tuple[str | int | float | bool, ...]:
        """The kind is that of the member whose drafting takes time."""
        network = next((s for s in self.strategies if not s.negligible_draft_cost), self.strategies[0])
        return (network.profile_key()[0], "combined", *(part for s in self.strategies for part in s.profile_key()))

    def __repr__(self) -> str:
        return f"CombinedCandidates({list(self.strategies)}{self._show_policy()})"


class _CombinedSession(DraftSession):
    """The sessions of the members, and their drafts of the current step."""

    def __init__(self, call: Call, members: list[tuple[int, DraftSession]]):
        super().__init__(call)
        self._members = members
        self._drafts: list[DraftTree] = []
        # An early-exit target has run its first layers on the drafted chain; other nodes cannot join it.
        self._merges = not isinstance(call.target, EarlyExitTarget)

    def draft(self, budget: Sequence[int]) -> DraftTree:
        return self._combine([session.draft for _, session in self._members], budget)

    def draft_at_prefill(self, budget: Sequence[int]) -> DraftTree:
        return self._combine([session.draft_at_prefill for _, session in self._members], budget)

    def _combine(self, drafts: Sequence[Callable[[Sequence[int]], DraftTree]], budget: Sequence[int]) -> DraftTree:
        self._drafts = []
        for (k, _), draft in zip(self._members, drafts, strict=True):
            found = not self._merges and any(tree.nodes for tree in self._drafts)
            self._drafts.append(draft([0 if found else min(depth, k) for depth in budget]))
        members = zip(self._members, self._drafts, strict=True)
        self.passes = [tokens for (_, session), tree in members for tokens in _passes(session, tree)]
        return merge_trees(self._drafts)

    def observe(self, result: VerificationResult) -> None:
        for (_, session), tree in zip(self._members, self._drafts, strict=True):
            session.observe(result_for(result, tree))

    def end(self) -> None:
        for _, session in self._members:
            session.end()


def _passes(session: DraftSession, tree: DraftTree) -> Sequence[int]:
    """The forward passes of a member's last draft."""
    if session.passes is not None:
        return session.passes
    rows = sum(len(parents) > 0 for parents in tree.parents)
    return [rows] * max((max(depths(parents), default=0) for parents in tree.parents), default=0)


def result_for(result: VerificationResult, tree: DraftTree) -> VerificationResult:
    """The outcome as the session that proposed `tree` sees it: the nodes of its own tree along the emitted tokens."""
    tokens = tree.tokens.tolist()
    paths: list[list[int] | None] = []
    for row, path in enumerate(result.paths):
        if path is None:
            paths.append(None)
            continue
        node, emitted = -1, iter(result.tokens[row])
        nodes: list[int] = []
        wanted = next(emitted)
        for child, parent in enumerate(tree.parents[row]):
            if parent == node and tokens[row][child] == wanted and len(nodes) < len(path):
                node = child
                nodes.append(child)
                wanted = next(emitted)
        paths.append(nodes)
    return replace(result, paths=paths, accepted=[len(path or ()) for path in paths])
