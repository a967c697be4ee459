"""Joined drafting: calls whose target passes are common as rows of one draft session, so that they share its passes.

Each call, of a prompt or request, is decoded by a loop of its own, with a `JoinedRow` in place of the strategy's
session. Once all of them have planned how deep they draft, the common session drafts for all of them at once. Calls
join it with their first draft, and leave it when they end.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from hf_specgen.call import GenerationState
from hf_specgen.candidates.base import Candidates, DraftCall, DraftSession
from hf_specgen.candidates.combined import CombinedCandidates
from hf_specgen.depth import LatencyModel, PolicySession
from hf_specgen.targets.hidden_states import HiddenStateTarget
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult, VerificationSession

UNLIMITED = 2**31
"""Columns of a text: each request has a limit of its own."""


def joined(candidates: Candidates) -> tuple[Candidates, list[JoinedCandidates]]:
    """The strategy with its drafters that have a forward pass replaced by joined ones; and these."""
    if candidates.negligible_draft_cost:
        return candidates, []
    if not isinstance(candidates, CombinedCandidates):
        drafter = JoinedCandidates(candidates)
        return drafter, [drafter]
    members = [joined(member) for member in candidates.strategies]
    combined = copy.copy(candidates)
    combined.strategies = tuple(member for member, _ in members)
    return combined, [drafter for _, drafters in members for drafter in drafters]


class JoinedCandidates(Candidates):
    """A strategy whose calls draft together, as rows of one session, if it can do so; otherwise one after the other.

    Attributes:
        rows: the requests that take part.
        planned: how deep rows draft in the next draft.
        seconds, passes: of the last draft, if one was requested: its time, and the tokens of each pass.
    """

    def __init__(self, strategy: Candidates):
        self.k, self.policy, self.tree, self._strategy = strategy.k, strategy.policy, strategy.tree, strategy
        self.is_joined: bool | None = None  # until the first call
        self.seconds, self._drafted = 0.0, DraftTree.empty(0)
        self.passes: Sequence[int] = ()
        self._session: DraftSession | None = None
        self.rows: list[JoinedRow] = []
        self.planned: dict[JoinedRow, int] = {}

    def start(self, call: DraftCall) -> DraftSession:
        session = self._strategy.start(call)
        if self.is_joined is None:
            self.is_joined = session.rows_can_change
        call.state.drafts_together = self.is_joined
        return JoinedRow(call, self) if self.is_joined else session

    def plan(self, row: JoinedRow, depth: int) -> None:
        """Receive the maximum depth of a row in the next draft."""
        self.planned[row] = depth

    def draft(self) -> None:
        """Draft for all rows that have planned to, after the outcomes of the last step were passed on."""
        self._observe()
        self.seconds, self.passes = 0.0, ()
        if not self.planned:
            return
        begin = perf_counter()
        rows = [row for row in self.rows if row.is_active]
        kept, new = list(map(self.rows.index, rows)), [row for row in self.planned if row not in self.rows]
        changed, self.rows = bool(new) or len(kept) < len(self.rows), [*rows, *new]
        if self._session is None:
            self._session = self._start(new[0].call)
        elif changed:
            self._texts.set_rows(self.rows)
            self._session.keep_rows(kept, len(new))
        depths = [self.planned.get(row, 0) for row in self.rows]
        self._drafted = self._session.draft(depths)
        for place, row in enumerate(self.rows):
            nodes = len(self._drafted.parents[place])
            row.tree = self._tree_of(place, nodes) if depths[place] else DraftTree.empty(1)
            row.passes, row.has_joined = self._session.passes, True
        if any(depths):
            self.seconds, self.passes = perf_counter() - begin, self._session.passes or ()
        self.planned = {}

    def _tree_of(self, place: int, nodes: int) -> DraftTree:
        """The draft of one row."""
        tree = self._drafted
        probability = None if tree.probability is None else (tree.probability[place][:nodes],)
        return DraftTree.from_nodes([(tree.token_lists()[place][:nodes], tree.parents[place])], probability)

    def _start(self, call: DraftCall) -> DraftSession:
        """The common session, whose call has the texts and targets of the rows."""
        self._texts = _Texts(self.rows)
        call = replace(call, state=self._texts, target=_Targets(self), depth=_Depth(self))
        return self._strategy.start(replace(call, verification=_Verification(call, self)))

    def _observe(self) -> None:
        """Pass the outcomes of a step on to the common session, which ends once none of its rows is active."""
        results = [row.result for row in self.rows]
        if self._session is not None and any(results):
            self._session.observe(
                VerificationResult(
                    [None if result is None else result.paths[0] for result in results],
                    [[] if result is None else result.tokens[0] for result in results],
                    [0 if result is None else result.accepted[0] for result in results],
                )
            )
        for row in self.rows:
            row.result = None
        if not any(row.is_active for row in self.rows):
            self.close()

    def close(self) -> None:
        """End the common session."""
        if self._session is not None:
            self._session.end()
        self._session, self.rows = None, []


class JoinedRow(DraftSession):
    """The session of one request: a row of a common session.

    Attributes:
        tree: its draft.
        result: the outcome of the step, once there is one.
        is_active, has_joined: whether the request has not ended, and whether it is a row of the common session.
    """

    def __init__(self, call: DraftCall, drafter: JoinedCandidates):
        super().__init__(call)
        self._drafter, self.tree = drafter, DraftTree.empty(1)
        self.result: VerificationResult | None = None
        self.is_active, self.has_joined = True, False

    def plan(self, max_depths: Sequence[int]) -> None:
        self._drafter.plan(self, max_depths[0])

    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        """What `JoinedCandidates.draft` has drafted, as deep as planned; now, for a call that is decoded alone."""
        if self in self._drafter.planned:
            self._drafter.draft()
        return self.tree

    def observe(self, result: VerificationResult) -> None:
        """Keep the outcome until those of all requests are known."""
        if self.has_joined:
            self.result = result

    def end(self) -> None:
        self.is_active = False


class _Texts(GenerationState):
    """The texts of the requests, which the loop of each request appends to."""

    drafts_together = True

    def __init__(self, rows: Sequence[JoinedRow]):
        super().__init__(torch.zeros(len(rows), 1, dtype=torch.long), max_length=UNLIMITED)
        self.device = rows[0].call.state.device
        self.set_rows(rows)

    def set_rows(self, rows: Sequence[JoinedRow]) -> None:
        """Use the texts of these requests."""
        states = [row.call.state for row in rows]
        self.prompts = [state.prompts[0] for state in states]
        self.generated = [state.generated[0] for state in states]
        self.batch, self._stopped = len(rows), [False] * len(rows)


class _Targets(HiddenStateTarget):
    """What a drafter reads of the targets of the requests; their passes are packed steps."""

    batch = 0
    verifies_chains_only = False
    rows: list[int] = []

    def __init__(self, drafter: JoinedCandidates):
        self._drafter, first = drafter, drafter.rows[0].call.target
        assert first is not None
        self.device, self.verifies_chains_only = first.device, first.verifies_chains_only

    def committed_states(self, aux_layers: Sequence[int]) -> list[torch.Tensor]:
        """Those of the last step; none of a request that took no part in it."""
        states = []
        for row in self._drafter.rows:
            [found] = _target(row).committed_states(aux_layers)
            states.append(found if row.result is not None or not row.has_joined else found[:0])
        return states

    def states_of(self, aux_layers: Sequence[int]) -> torch.Tensor:
        return torch.cat([_target(row).states_of(aux_layers) for row in self._drafter.rows])


def _target(row: JoinedRow) -> HiddenStateTarget:
    assert isinstance(row.call.target, HiddenStateTarget)
    return row.call.target


class _Depth(PolicySession):
    """The latencies of whole steps, as the policies of the requests know them."""

    def __init__(self, drafter: JoinedCandidates):
        self._drafter = drafter
        depth = drafter.rows[0].call.depth
        self.remembers = depth is not None and depth.remembers

    @property
    def latency(self) -> LatencyModel | None:  # type: ignore[override]
        depth = self._drafter.rows[0].call.depth
        return None if depth is None else depth.known

    def depths(self, limits: Sequence[int]) -> list[int]:
        """Not used: each request has its own policy."""
        return list(limits)


class _Verification(VerificationSession):
    """Weighs the draft tokens of each request with the noise that it is sampled with."""

    def __init__(self, call: DraftCall, drafter: JoinedCandidates):
        super().__init__(call)
        self._drafter = drafter

    def draft_weights(
        self, scores: torch.Tensor, steps: Sequence[Sequence[int]], tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not self.call.do_sample:
            return super().draft_weights(scores, steps, tokens)
        sessions = [row.call.verification for row in self._drafter.rows]
        ids = [None] * len(sessions) if tokens is None else tokens.split(1)
        rows = zip(sessions, scores.split(1), steps, ids, strict=True)
        return torch.cat([one.draft_weights(part, [at], columns) for one, part, at, columns in rows if one is not None])

    def choose(self, *_: Any) -> torch.Tensor:
        """Not used: each request is verified by its own session."""
        raise NotImplementedError
