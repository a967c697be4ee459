"""Chains from any strategy, for targets that cannot verify trees."""

from __future__ import annotations

from collections.abc import Sequence

from hf_specgen.candidates.base import DraftSession
from hf_specgen.tree import DraftTree
from hf_specgen.verification.result import VerificationResult, result_for


class ChainSession(DraftSession):
    """Reduces the drafts of a session to the leftmost chain of each row.

    Args:
        session: of any strategy; it receives the outcome in terms of its own tree.
    """

    def __init__(self, session: DraftSession):
        super().__init__(session.call)
        self._session, self._tree = session, DraftTree.empty(session.call.state.batch)
        self.top_tokens = session.top_tokens

    def draft(self, budget: Sequence[int]) -> DraftTree:
        return self._leftmost_chain(self._session.draft(budget))

    def draft_at_prefill(self, budget: Sequence[int]) -> DraftTree:
        return self._leftmost_chain(self._session.draft_at_prefill(budget))

    def observe(self, result: VerificationResult) -> None:
        self._session.observe(result_for(result, self._tree))

    def end(self) -> None:
        self._session.end()

    def _leftmost_chain(self, tree: DraftTree) -> DraftTree:
        self._tree, self.passes = tree, self._session.passes
        return tree.leftmost_chain()
