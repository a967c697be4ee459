"""Joined drafting: calls whose target passes are common as rows of one draft session, so that they share its passes.

Each call, of a prompt or request, is decoded by a loop of its own, with a `BatchedSession` in place of the strategy's
session. Once all of them have planned how deep they draft, the common session drafts for all of them at once. Calls
join it with their first draft, and leave it when they end.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, cast

import torch

from hf_specgen.call import Call, GenerationState
from hf_specgen.candidates.base import Candidates, DraftSession, checked_draft
from hf_specgen.candidates.combined import CombinedCandidates
from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.depth import FixedDepth
from hf_specgen.targets.hidden_states import HiddenStateTarget
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult, VerificationSession

NO_PART = VerificationResult([None], [[]], [0])
"""The outcome of a row that took no part in a step."""


def joined(candidates: Candidates) -> tuple[Candidates, list[BatchedDrafter]]:
    """A copy of a strategy whose sessions share the forward passes of its drafters; and these drafters."""
    if candidates.negligible_draft_cost:
        return candidates, []
    shared: Any = copy.copy(candidates)
    if isinstance(candidates, CombinedCandidates):
        members = [joined(member) for member in candidates.strategies]
        shared.strategies = tuple(member for member, _ in members)
        return shared, [drafter for _, drafters in members for drafter in drafters]
    drafter = BatchedDrafter(candidates)
    shared.start = drafter.start
    return shared, [drafter]


class BatchedDrafter:
    """Drafts for several calls together, as rows of one session of a strategy; if it cannot, each has its own session.

    Attributes:
        rows: the calls that take part.
        planned: how deep rows draft in the next draft.
        seconds, passes: of the last draft, if one was requested: its time, and the tokens of each pass.
    """

    def __init__(self, strategy: Candidates):
        self._strategy, self._session = strategy, cast(DraftSession | None, None)
        self.seconds, self.passes = 0.0, cast(Sequence[int], ())
        self.rows: list[BatchedSession] = []
        self.planned: dict[BatchedSession, int] = {}

    def start(self, batch: DraftBatch) -> DraftSession:
        """The session of a call; as `Candidates.start`."""
        session = self._strategy.start(batch)
        batch.state.drafts_together = session.rows_can_change
        return BatchedSession(batch, self) if session.rows_can_change else session

    def draft(self) -> None:
        """Draft for all rows that have planned to, after the outcomes of the last step were passed on."""
        self._observe()
        self.seconds, self.passes = 0.0, ()
        if not self.planned:
            return
        begin = perf_counter()
        kept = [place for place, row in enumerate(self.rows) if row.is_active]
        new = [row for row in self.planned if row not in self.rows]
        changed = bool(new) or len(kept) < len(self.rows)
        self.rows = [*(self.rows[place] for place in kept), *new]
        if self._session is None:
            self._session = self._start(new[0].batch)
        elif changed:
            self._texts.set_rows(self.rows)
            self._session.keep_rows(kept)
            if new:
                self._session.append_rows(len(new))
        self._depth.latency = self.rows[0].batch.latency
        depths = [self.planned.pop(row, 0) for row in self.rows]
        tree = checked_draft(self._session.draft(depths), self._session.batch.call)
        for row, tokens, parents, probability in zip(
            self.rows, tree.token_lists(), tree.parents, tree.probability or [()] * tree.batch, strict=True
        ):
            nodes = tokens[: len(parents)], parents
            row.tree = DraftTree.from_nodes([nodes], tree.probability and (probability[: len(parents)],))
            row.passes, row.has_joined = self._session.passes, True
        if any(depths):
            self.seconds, self.passes = perf_counter() - begin, self._session.passes or ()

    def _start(self, first: DraftBatch) -> DraftSession:
        """The common session, whose batch has the texts and targets of the rows."""
        self._texts = _Texts(self.rows)
        call = replace(first.call, state=self._texts)
        self._depth = FixedDepth().start(call)
        self._depth.remembers = first.carries_over
        self._depth.latency = first.latency
        return self._strategy.start(DraftBatch(call, _Targets(self), _Verification(call, self), self._depth))

    def _observe(self) -> None:
        """Pass the outcomes of a step on to the common session, which ends once none of its rows is active."""
        if self._session is not None and any(row.result is not None for row in self.rows):
            results = [row.result or NO_PART for row in self.rows]
            paths, tokens = [one.paths[0] for one in results], [one.tokens[0] for one in results]
            self._session.observe(VerificationResult(paths, tokens, [one.accepted[0] for one in results]))
        for row in self.rows:
            row.result = None
        if not any(row.is_active for row in self.rows):
            self.close()

    def close(self) -> None:
        """End the common session."""
        if self._session is not None:
            self._session.end()
        self._session, self.rows = None, []


class BatchedSession(DraftSession):
    """The session of one call: a row of a common session.

    Attributes:
        tree: its draft.
        result: the outcome of the step, once there is one.
        is_active, has_joined: whether the call has not ended, and whether it is a row of the common session.
    """

    def __init__(self, batch: DraftBatch, drafter: BatchedDrafter):
        super().__init__(batch)
        self._drafter = drafter
        self.tree = DraftTree.empty(1)
        self.result: VerificationResult | None = None
        self.is_active, self.has_joined = True, False

    def plan(self, max_depths: Sequence[int]) -> None:
        self._drafter.planned[self] = max_depths[0]

    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        """What `BatchedDrafter.draft` has drafted, as deep as planned; now, for a call that is decoded alone."""
        if self in self._drafter.planned:
            self._drafter.draft()
        return self.tree

    def observe(self, result: VerificationResult) -> None:
        """Keep the outcome until those of all calls are known."""
        if self.has_joined:
            self.result = result

    def end(self) -> None:
        self.is_active = False


class _Texts(GenerationState):
    """The texts of the calls, which the loop of each call appends to."""

    drafts_together = True

    def __init__(self, rows: Sequence[BatchedSession]):
        super().__init__(torch.zeros(len(rows), 1, dtype=torch.long))
        self.device = rows[0].batch.state.device
        self.set_rows(rows)

    def set_rows(self, rows: Sequence[BatchedSession]) -> None:
        """Use the texts of these calls."""
        states = [row.batch.state for row in rows]
        self.prompts = [state.prompts[0] for state in states]
        self.generated = [state.generated[0] for state in states]
        self.batch, self.stopped = len(rows), [False] * len(rows)


class _Targets(HiddenStateTarget):
    """What a drafter reads of the targets of the calls."""

    batch = 0
    verifies_chains_only = False
    rows: list[int] = []
    _graphs = None  # no pass of its own

    def __init__(self, drafter: BatchedDrafter):
        first = drafter.rows[0].batch
        self._drafter = drafter
        self.device = first.device
        self.verifies_chains_only = first.verifies_chains_only

    def committed_states(self, aux_layers: Sequence[int]) -> list[torch.Tensor]:
        """Those of the last step; none of a call that took no part in it."""
        states = []
        for row in self._drafter.rows:
            [found] = row.batch.committed_states(aux_layers)
            states.append(found if row.result is not None or not row.has_joined else found[:0])
        return states

    def states_of(self, aux_layers: Sequence[int]) -> torch.Tensor:
        return torch.cat([row.batch.last_states(aux_layers) for row in self._drafter.rows])


class _Verification(VerificationSession):
    """Draws the noise of the draft tokens of each row by the verification of its call."""

    def __init__(self, call: Call, drafter: BatchedDrafter):
        super().__init__(call)
        self._drafter = drafter

    def draft_noise(self, steps: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor | None:
        if not self.call.do_sample:
            return None
        rows = zip(self._drafter.rows, steps, strict=True)
        noise = [row.batch.draft_noise([at], device) for row, at in rows]
        return torch.cat(cast(list[torch.Tensor], noise))

    def choose(self, *_: Any) -> torch.Tensor:
        """Not used: each call is verified by its own session."""
        raise NotImplementedError
