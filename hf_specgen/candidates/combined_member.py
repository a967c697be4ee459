"""A member of a combination: its session, and its draft of the current step."""

from __future__ import annotations

from collections.abc import Sequence

from hf_specgen.candidates.base import Candidates, DraftSession
from hf_specgen.candidates.network_gain import NetworkGain, accepted_tokens, expected_tokens
from hf_specgen.depth.latency import StepLatency
from hf_specgen.tree import DraftTree, depths
from hf_specgen.verification.result import VerificationResult


class Member:
    """One strategy in a call.

    Args:
        strategy: the strategy.
        session: of the call.
        batch: number of rows.
        gain: of its network in earlier calls.
    """

    def __init__(self, strategy: Candidates, session: DraftSession, batch: int, gain: NetworkGain):
        self.k, self.has_passes, self.session = strategy.k, not strategy.negligible_draft_cost, session
        self.gain = gain
        self.draft = DraftTree.empty(batch)
        self.expected_draft_seconds = 0.0
        """Of the current draft, by the latency model."""
        self._without: DraftTree | None = None
        self._drafts = True

    def has_gain(self, without: DraftTree, latency: StepLatency) -> bool:
        """Whether its network drafts in this step.

        Args:
            without: the draft of the members without a network.
            latency: of the step.
        """
        rows = max(1, sum(len(parents) > 0 for parents in without.parents))
        target, one_pass = latency.target.seconds_of(rows * (1 + without.nodes)), latency.drafter.draft([rows])
        self._without = without
        self._drafts = self.gain.drafts(expected_tokens(without), target, one_pass)
        return self._drafts

    def count_gain(self, result: VerificationResult) -> None:
        """Count what its network has added to the draft of the others, if they were compared in this step."""
        without, self._without = self._without, None
        if without is not None:
            took_part = max(1, sum(path is not None for path in result.paths))
            accepted = accepted_tokens(without, result)
            further = sum(result.accepted) / took_part - accepted if self._drafts else None
            self.gain.observe(accepted, further, self.expected_draft_seconds)

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
