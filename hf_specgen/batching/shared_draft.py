"""Shared drafting: several calls are the rows of one draft session, so that they share its forward passes.

Each call, of a prompt or request, has a `RowSession` in place of the strategy's session. Once all of them have planned
how deep they draft, the shared session drafts for all of them at once:

    call A  RowSession.plan(4) --+                                        +-- RowSession.draft: tree of A
    call B  RowSession.plan(4) --+-- SharedDraft.draft [4, 4, 2] ---------+-- RowSession.draft: tree of B
    call C  RowSession.plan(2) --+     one session with three rows        +-- RowSession.draft: tree of C

The shared session is any session of the strategy. It reads the rows through the interfaces of a `DraftBatch`:
`SharedRowState`, `SharedTargets` and `SharedSampling` here give it what the batch of each call has. Calls join it
when they first plan a draft, and leave it when they end: no drafter reads the prompt of a call that drafts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf
from time import perf_counter
from typing import cast

import torch

from hf_specgen.candidates.base import Candidates, DraftSession, StartSession, WrappedSession, checked_draft
from hf_specgen.candidates.combined import CombinedCandidates
from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.depth import FixedDepth, PolicySession
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult
from hf_specgen.verification.base import with_noise

NO_STEP = VerificationResult([None], [[]], [0], num_in_pass=[0])  # the outcome of a call that took no part in a step


def start_and_shared_drafts(candidates: Candidates) -> tuple[StartSession, list[SharedDraft]]:
    """The function that starts a call's draft session, and the `SharedDraft` objects that these sessions belong to.

    There is a `SharedDraft` for each drafter with a forward pass, none for strategies such as n-grams, whose calls
    draft alone.
    """
    if candidates.negligible_draft_cost:
        return candidates.start, []
    if isinstance(candidates, CombinedCandidates):
        members = [start_and_shared_drafts(member) for member in candidates.strategies]
        starts = [start for start, _ in members]
        shared_drafts = [shared_draft for _, shared_of_member in members for shared_draft in shared_of_member]
        return partial(candidates.start_members, starts=starts), shared_drafts
    shared_draft = SharedDraft(candidates)
    return shared_draft.start, [shared_draft]


class SharedDraft:
    """Drafts for several calls together, as rows of one session of a strategy.

    If rows cannot join and leave such a session, each call gets a session of its own, whose passes are counted here.
    """

    rows_can_change = False  # whether calls share a session; known once one has started

    def __init__(self, strategy: Candidates):
        self._strategy = strategy
        self._session: DraftSession | None = None
        self._row_state: SharedRowState
        self._policy: PolicySession
        self.rows: list[RowSession] = []  # of the calls that take part
        # The maximum depth of the next draft of each call; a call that is not in `rows` becomes a row then.
        self.planned: dict[RowSession, int] = {}
        # Of the last draft, if one was requested: its time if it is shared, and the tokens of each pass of all calls.
        self.seconds = 0.0
        self.tokens_per_pass: list[int] = []

    def start(self, batch: DraftBatch) -> DraftSession:
        """Start the session of a call; used in place of `Candidates.start`."""
        # Once a session has begun it is known whether the strategy refuses the call, and whether rows can change. If
        # they can, this session ends without a draft.
        session = self._strategy.start(batch)
        self.rows_can_change = session.rows_can_change
        if not session.rows_can_change:
            return WrappedSession(session, partial(self._record_passes, session))
        session.end()
        layers = self._strategy.target_requirements(batch.model).aux_hidden_state_layers
        return RowSession(batch, self, layers)

    def _record_passes(self, session: DraftSession, tree: DraftTree, max_depths: Sequence[int]) -> DraftTree:
        """Add the passes of a call's own session to those of the step; returns the draft unchanged."""
        if any(max_depths):
            self.tokens_per_pass += session.passes_of(tree)
        return tree

    def draft(self) -> None:
        """Pass the outcomes of the last step on to the shared session, then draft for all calls that have planned."""
        self._observe()
        self.seconds = 0.0
        self.tokens_per_pass = []
        if not self.planned:
            return
        begin = perf_counter()
        session = self._session_of_planned_rows()
        self._policy.latency = self.rows[0].batch.latency
        depths = [self.planned.pop(row, 0) for row in self.rows]
        tree = checked_draft(session.draft(depths), session.batch.call.drafting.name, len(self.rows))
        # The draft of each call is its row of the tree, without padding.
        drafts = zip(self.rows, tree.token_lists(), tree.parents, strict=True)
        for index, (row, tokens, parents) in enumerate(drafts):
            size = len(parents)
            probability = None if tree.probability is None else (tree.probability[index][:size],)
            row.tree = DraftTree.from_nodes([(tokens[:size], parents)], probability)
            row.tokens_per_pass = session.tokens_per_pass if depths[index] else ()
            row.mark_joined()
        if any(depths):  # else the draft is empty, and its time is not counted
            self.seconds = perf_counter() - begin
            self.tokens_per_pass = list(session.passes_of(tree))

    def _session_of_planned_rows(self) -> DraftSession:
        """Update the rows of the shared session, and return it: ended calls leave, new calls with a plan join."""
        kept = [index for index, row in enumerate(self.rows) if row.is_active]
        new = [row for row in self.planned if row not in self.rows]
        changed = bool(new) or len(kept) < len(self.rows)
        self.rows[:] = [*(self.rows[index] for index in kept), *new]  # in place: `SharedTargets` has this list
        if self._session is None:
            self._session = self._start_shared_session()
        elif changed:
            self._row_state.set_rows(self.rows)
            self._session.keep_rows(kept)
            if new:
                self._session.append_rows(len(new))
        return self._session

    def _start_shared_session(self) -> DraftSession:
        """Start a session of the strategy for the rows, with the settings of the first call, which all calls share."""
        first = self.rows[0].batch
        self._row_state = SharedRowState(self.rows)
        # Calls choose how deep they draft: the session needs the latencies alone, to size its trees.
        self._policy = FixedDepth().start(first.call)
        self._policy.remembers = first.carries_over  # whether counts of earlier calls may be used
        self._policy.latency = first.latency
        target = SharedTargets(self.rows)
        sampling = SharedSampling(self.rows)
        return self._strategy.start(DraftBatch(first.call, target, sampling, self._policy, self._row_state))

    def _observe(self) -> None:
        """Pass the outcomes of a step on to the shared session; end it if none of its rows is active."""
        if self._session is not None and any(row.result is not None for row in self.rows):
            results = [row.result or NO_STEP for row in self.rows]
            paths = [result.paths[0] for result in results]
            tokens = [result.tokens[0] for result in results]
            accepted = [result.accepted[0] for result in results]
            # Where it is unknown how many nodes of a draft the pass had, all count.
            drafted = [len(row.tree.parents[0]) for row in self.rows]
            num_in_pass = [sum(result.num_in_pass or [nodes]) for result, nodes in zip(results, drafted, strict=True)]
            self._session.observe(VerificationResult(paths, tokens, accepted, num_in_pass=num_in_pass))
        for row in self.rows:
            row.result = None
        if not any(row.is_active for row in self.rows):
            self.close()

    def close(self) -> None:
        """End the shared session."""
        if self._session is not None:
            self._session.end()
        self._session = None
        self.rows.clear()


class RowSession(DraftSession):
    """The session of one call, whose batch has one row: a row of a shared session, from its first draft on.

    `layers` are those whose hidden states the strategy reads.
    """

    def __init__(self, batch: DraftBatch, shared: SharedDraft, layers: Sequence[int]):
        super().__init__(batch)
        self.tokens_per_pass = ()
        self._shared = shared
        # By layer the states of the steps before the call joins; None if it never joins, as it is too short for the
        # drafter's prefill: later in the call, and beside more rows, it costs even more.
        self._earlier_states: dict[int, list[torch.Tensor]] | None = None
        if batch.prefill_is_short():
            self._earlier_states = {layer: [] for layer in layers}
        self.tree = DraftTree.empty(1)
        self.result: VerificationResult | None = None  # of the last step, until `SharedDraft.draft` passes it on
        self.is_active = True  # whether the call has not ended
        self.has_joined = False  # whether the call is a row of the shared session, which has drafted since

    def new_states(self, aux_layers: Sequence[int]) -> torch.Tensor:
        """The states of some layers that the shared session has not received.

        These are the states of the prompt and of all steps before the call joins; then those of the last step, if its
        outcome has not been passed on; otherwise none.
        """
        [states] = self.batch.committed_states(aux_layers)
        if self.has_joined:
            return states if self.result is not None else states[:0]
        assert self._earlier_states is not None, "a call without states does not join"
        by_layer = [self._earlier_states[layer] for layer in aux_layers]
        earlier = [torch.cat(states_of_step, dim=-1) for states_of_step in zip(*by_layer, strict=True)]
        return torch.cat([*earlier, states])

    def plan(self, max_depths: Sequence[int]) -> None:
        """Receive the depth of the next draft; until the first one, keep the hidden states of every step."""
        if self._earlier_states is None:
            return
        if self.has_joined or max_depths[0]:
            self._shared.planned[self] = max_depths[0]
        else:
            for layer, states in self._earlier_states.items():
                states += self.batch.committed_states([layer])

    def mark_joined(self) -> None:
        """Record that the call is a row of the shared session, and drop the states that this session has received."""
        self.has_joined = True
        self._earlier_states = {}

    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        """Return the tree that `SharedDraft.draft` has made for this call, at the planned depth.

        If nothing has called that, since the call is decoded alone by `DecodingLoop.decode`, call it now.
        """
        if self in self._shared.planned:
            self._shared.draft()
        return self.tree

    def observe(self, result: VerificationResult) -> None:
        """Keep the outcome until `SharedDraft.draft` passes the outcomes of all calls on."""
        if self.has_joined:
            self.result = result

    def end(self) -> None:
        self.is_active = False
        self._shared.planned.pop(self, None)
        self._earlier_states = None


class SharedRowState:
    """The `RowState` of several calls, whose steps append to them.

    No row has ended here: the row of a call that ends leaves before the next draft.
    """

    drafts_together = True
    max_new_tokens = inf  # as calls join at any time, nothing limits how long the session runs

    def __init__(self, rows: Sequence[RowSession]):
        self.set_rows(rows)

    def set_rows(self, rows: Sequence[RowSession]) -> None:
        """Use the texts of these calls."""
        texts = [row.batch.state for row in rows]
        self.batch = len(rows)
        self.prompts = [text.prompts[0] for text in texts]
        self.generated = [text.generated[0] for text in texts]
        self._texts = texts

    @property
    def context_length(self) -> int:
        return max(text.context_length for text in self._texts)

    def has_ended(self, row: int) -> bool:
        return False

    def last_token(self, row: int) -> int:
        return self._texts[row].last_token(0)

    def pending(self) -> list[int]:
        return [text.last_token(0) for text in self._texts]


class SharedTargets:
    """The `TargetView` of the targets of several calls, a list that changes as they join and leave."""

    def __init__(self, rows: Sequence[RowSession]):
        first = rows[0].batch
        self.device = first.device
        self.verifies_chains_only = first.verifies_chains_only
        self._rows = rows

    @property
    def rows(self) -> list[int]:
        return list(range(len(self._rows)))

    def pass_shape(self, tokens: int) -> tuple[int, int]:
        """0 rows, which means unknown: the drafter then takes the number of rows that draft.

        How many rows the target's pass has is known only once all calls have planned.
        """
        return 0, tokens

    def last_states(self, aux_layers: Sequence[int]) -> torch.Tensor:
        return torch.cat([row.batch.last_states(aux_layers) for row in self._rows])

    def committed_states(self, aux_layers: Sequence[int]) -> list[torch.Tensor]:
        """The new states of each call; none of a call that took no part in the step."""
        return [row.new_states(aux_layers) for row in self._rows]


class SharedSampling:
    """The `DraftSampling` of the same rows as `SharedTargets`: each is sampled with the noise of its call."""

    predicted_tokens = ()  # unknown

    def __init__(self, rows: Sequence[RowSession]):
        first = rows[0].batch
        self._rows = rows
        self._do_sample = first.do_sample
        self.wants_q = first.wants_q
        self.score_processors = first.score_processors
        self.uses_draft_noise_only = first.uses_draft_noise_only

    def draft_scores(
        self, scores: torch.Tensor, token_indices: Sequence[Sequence[int]], tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        return with_noise(scores, self.draft_noise(token_indices, scores.device), tokens)

    def draft_noise(self, token_indices: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor | None:
        if not self._do_sample:
            return None
        rows = zip(self._rows, token_indices, strict=True)
        noise = [row.batch.draft_noise([indices], device) for row, indices in rows]
        return torch.cat(cast(list[torch.Tensor], noise))
