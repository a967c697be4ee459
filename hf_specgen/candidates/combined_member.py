"""A member of a combination: its session, and its draft of the current step."""

from __future__ import annotations

from collections.abc import Sequence

from hf_specgen.candidates.base import Candidates, DraftSession
from hf_specgen.tree import DraftTree, depths


class Member:
    """One strategy in a call."""

    def __init__(self, strategy: Candidates, session: DraftSession, batch: int):
        self.k, self.has_passes, self.session = strategy.k, not strategy.negligible_draft_cost, session
        self.draft = DraftTree.empty(batch)
        self.expected_draft_seconds = 0.0
        """Of the current draft, by the latency model."""

    @property
    def passes(self) -> Sequence[int]:
        """Tokens of each forward pass of its last draft, over all rows.

        If the session does not count its passes, they are estimated: one for each level of the deepest tree, over one
        token of every row that has a draft.
        """
        if self.session.passes is not None:
            return self.session.passes
        rows = sum(len(parents) > 0 for parents in self.draft.parents)
        return [rows] * max((max(depths(parents), default=0) for parents in self.draft.parents), default=0)
