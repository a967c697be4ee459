"""A member of combined strategies in one call: its session, its draft, and what steps with its draft yield and take."""

from __future__ import annotations

from collections.abc import Sequence

from hf_specgen.candidates.base import Candidates, DraftSession
from hf_specgen.tree import DraftTree, depths

RATE_UPDATE = 0.1
"""Weight of the newest step in the mean of what steps with a network's draft yield and take."""
EXPECTED_GAIN, EXPECTED_GAIN_STEPS, SKIPPED_UPDATE = 2.0, 4, 0.02
"""Accepted draft tokens of a row with a network's draft before any was measured, the weight of this prior in steps, and
its weight in the mean after each step in which the network is left out."""


class Member:
    """One strategy in a call: its session, its draft of the current step, and what steps with its drafts yield."""

    def __init__(self, strategy: Candidates, session: DraftSession, batch: int):
        self.k, self.has_passes, self.session = strategy.k, not strategy.negligible_draft_cost, session
        self.draft = DraftTree.empty(batch)
        self.steps = 0
        """Steps with its draft, without the prefill."""
        self.nodes = self.seconds = 0.0
        self.gain = self._expected_gain = EXPECTED_GAIN * batch
        """Of these steps, on average: accepted draft tokens over all rows, nodes of a row, seconds of its passes."""
        self.spent = 0.0
        """Expected seconds of the passes of the present draft."""

    def measure(self, accepted: int, nodes: int) -> None:
        """Update the means with a step that had its draft.

        Args:
            accepted: draft tokens of all members, over all rows.
            nodes: of a row in the verified tree.
        """
        self.steps += 1
        self.gain += max(RATE_UPDATE, 1 / (EXPECTED_GAIN_STEPS + self.steps)) * (accepted - self.gain)
        share = max(RATE_UPDATE, 1 / self.steps)
        self.nodes += share * (nodes - self.nodes)
        self.seconds += share * (self.spent - self.seconds)

    def skip(self) -> None:
        """Count a step without its passes: the mean gain moves towards the prior."""
        self.gain += SKIPPED_UPDATE * (self._expected_gain - self.gain)

    @property
    def passes(self) -> Sequence[int]:
        """The forward passes of its last draft."""
        if self.session.passes is not None:
            return self.session.passes
        rows = sum(len(parents) > 0 for parents in self.draft.parents)
        return [rows] * max((max(depths(parents), default=0) for parents in self.draft.parents), default=0)
