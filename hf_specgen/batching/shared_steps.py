"""Steps that several calls take together: what `generate_many` and continuous batching have in common.

Each prompt or request has the `DecodingSteps` of a call of its own with one row, so that its tokens do not depend on
the others. A shared step of the calls A, B and C:

    SharedSteps.join       the calls count one time loss, each from its first step on
    SharedSteps.begin      the latency of a step with the rows that decode
    SharedSteps.plan       A, B, C plan how deep they draft
    SharedSteps.draft      drafters with a forward pass draft for A, B and C in the same passes
                           A, B, C take their drafts
    the caller             cuts the drafts to the fastest size, and runs the target on A, B and C in one pass
                           A, B, C verify their drafts
    SharedSteps.count_loss whether drafting was faster than plain steps, for all of them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

import numpy as np

from hf_specgen.batching.shared_draft import start_and_shared_drafts
from hf_specgen.candidates.base import DraftSession
from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.decoding import DecodingSteps
from hf_specgen.depth.adaptive import AdaptiveSession, DraftingTimeLoss
from hf_specgen.depth.latency import StepLatency, fastest_count
from hf_specgen.settings import Settings
from hf_specgen.tree import DraftTree


class SharedSteps:
    """Plans and drafts the steps of calls, and counts the time loss of their drafts.

    Every call begins with `settings`, whose sessions draft together. A call that shares its steps then joins; any
    other is decoded alone.
    """

    def __init__(self, settings: Settings):
        self._loss = DraftingTimeLoss()
        self._start_session, self._shared_sessions = start_and_shared_drafts(settings.candidates)
        self.settings = replace(settings, start=self._start)
        # For the rows and context of the present step; None if it was not measured, or no row decodes.
        self.latency: StepLatency | None = None
        self._rows = 0
        self._has_draft = False

    def _start(self, batch: DraftBatch) -> DraftSession:
        """Start the session of a call. Its state `drafts_together` if each drafter has one session for all calls."""
        session = self._start_session(batch)
        sharing = [shared.rows_can_change for shared in self._shared_sessions]
        batch.call.state.drafts_together = bool(sharing) and all(sharing)
        return session

    def join(self, call: DecodingSteps) -> None:
        """Let a call count its time loss with the calls that have joined before, so that all pause drafting together.

        Called before the first step of the call.
        """
        if isinstance(call.policy, AdaptiveSession):
            call.policy.join_shared_passes(self._loss)

    def begin(self, calls: Sequence[DecodingSteps], rows: int) -> None:
        """Begin a step of these calls, `rows` of which decode; the others are in their prefill."""
        # The latencies of any call: a request that the strategy refuses has none.
        latencies = next((call.policy.latency for call in calls if call.policy.latency is not None), None)
        context = max(call.state.context_length for call in calls)
        self.latency = None if latencies is None or not rows else latencies.at(rows, context)
        self._rows = rows

    def plan(self, call: DecodingSteps, may_draft: bool = True) -> None:
        """Plan how deep a call drafts."""
        call.state.other_rows = max(0, self._rows - 1)
        call.plan_step(may_draft)

    def draft(self, calls: Sequence[DecodingSteps]) -> None:
        """Make the drafts of shared sessions for calls that have planned; each then takes its own by `draft_step`."""
        self._has_draft = any(any(call.max_depths) for call in calls)
        for shared in self._shared_sessions:
            shared.draft()
        seconds = sum(shared.seconds for shared in self._shared_sessions)
        for call in calls:
            call.timer.add("draft", seconds)  # each call waits for the whole draft

    def passes_of(self, calls: Sequence[DecodingSteps]) -> Sequence[int]:
        """Tokens of each pass of the drafters in a step that these calls have ended.

        Those of shared sessions count once; drafters with a session for each call have made all of theirs.
        """
        if self._shared_sessions:
            return [tokens for shared in self._shared_sessions for tokens in shared.tokens_per_pass]
        records = [call.statistics.batch_steps[-1] for call in calls if call.statistics.batch_steps]
        return [tokens for record in records for tokens in record.tokens_per_pass]

    def count_loss(self, seconds: float, emitted: int, passes: Sequence[int]) -> None:
        """Count the time loss of a step of calls that have joined, if latencies are known and one has planned a draft.

        Args:
            seconds: predicted for the target's pass, without those for prompts in it.
            emitted: tokens of all rows.
            passes: see `passes_of`.
        """
        if self.latency is not None and self._has_draft:
            self._loss.count(self.latency, self._rows, seconds, passes, emitted / self._rows)

    def close(self) -> None:
        """End the shared draft sessions."""
        for shared in self._shared_sessions:
            shared.close()


def cut_to_fastest_size(trees: list[DraftTree], latency: StepLatency | None) -> list[DraftTree]:
    """The trees, each cut to the same largest number of nodes: that with the most expected tokens per second.

    The pass computes as many tokens for every row as the largest draft has. Without the cut n-grams have 0.94 of the
    projected speed.
    """
    if latency is None or not all(tree.probability for tree in trees if tree.nodes):
        return trees
    rows = len(trees)
    probabilities = [tree.probability[0] for tree in trees if tree.probability]
    gains = [sum(by_row) for by_row in zip_longest(*probabilities, fillvalue=0.0)]  # the sum over rows for node 0, 1, …
    seconds = np.array([latency.target.seconds_of(rows * (1 + nodes)) for nodes in range(1 + len(gains))])
    nodes = fastest_count(gains, rows, seconds)
    return [tree.first_nodes(nodes) for tree in trees]
