"""A member of a combination: its session, its draft, and moving averages of the accepted tokens, tree size and draft
time of its steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_specgen.candidates.base import Candidates, DraftSession
from hf_specgen.tree import DraftTree, depths

RATE_UPDATE = 0.1
"""Weight of the newest step in the moving averages."""
EXPECTED_GAIN = 2.0
"""Prior: accepted draft tokens of a row in a step with the draft of a drafter with forward passes."""
EXPECTED_GAIN_STEPS = 4
"""Weight of the prior, in steps."""
SKIPPED_UPDATE = 0.02
"""Weight of the prior in the moving average after each step in which the drafter is left out."""


class Member:
    """One strategy in a call; the averages are kept for drafters with forward passes only."""

    def __init__(self, strategy: Candidates, session: DraftSession, batch: int):
        self.k, self.has_passes, self.session = strategy.k, not strategy.negligible_draft_cost, session
        self.draft = DraftTree.empty(batch)
        self.steps = 0
        """Steps with its draft, without the prefill."""
        self.nodes = self.seconds = 0.0
        """Averages over these steps: nodes of a row in the verified tree, seconds of its forward passes."""
        self.gain = self._expected_gain = EXPECTED_GAIN * batch
        """Average over these steps: accepted draft tokens over all rows."""
        self.expected_draft_seconds = 0.0
        """Of the current draft, by the latency model."""

    def measure(self, accepted: int, nodes: int) -> None:
        """Update the averages with a step that had its draft.

        Args:
            accepted: draft tokens of all members, over all rows.
            nodes: of a row in the verified tree.
        """
        self.steps += 1
        self.gain += max(RATE_UPDATE, 1 / (EXPECTED_GAIN_STEPS + self.steps)) * (accepted - self.gain)
        weight = max(RATE_UPDATE, 1 / self.steps)
        self.nodes += weight * (nodes - self.nodes)
        self.seconds += weight * (self.expected_draft_seconds - self.seconds)

    def skip(self) -> None:
        """Count a step without its passes: the average gain moves towards the prior."""
        self.gain += SKIPPED_UPDATE * (self._expected_gain - self.gain)

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
