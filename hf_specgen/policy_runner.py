"""Runs the policy of a call: asks it for draft depths before each step, and reports every step to it."""

from __future__ import annotations

from collections.abc import Sequence

from hf_specgen.depth import PolicySession, StepRecord
from hf_specgen.depth.schedules import context_length
from hf_specgen.monitoring.monitor import MonitorSession
from hf_specgen.state import Call
from hf_specgen.steps import RowStep, StepPasses
from hf_specgen.targets.base import Target
from hf_specgen.targets.cache_layer import MAX_PREFILL_DRAFT
from hf_specgen.targets.own_cache import MAX_DRAFT_SLOTS
from hf_specgen.timer import StepTimer
from hf_specgen.tree import DraftTree

UNLIMITED = 2**31
"""Draft tokens of a row that no position table limits."""


class PolicyRunner:
    """Limits the depths of a policy to k and to the room of each row; reports steps to the policy and to a monitor.

    Args:
        call: the call; the forward passes of each step are added to its statistics.
        target: limits how far a row can be drafted.
        session: the policy's session.
        monitor: the monitor's session, if any; receives every step too.
        timer: of the call.
    """

    def __init__(
        self, call: Call, target: Target, session: PolicySession, monitor: MonitorSession | None, timer: StepTimer
    ):
        self._call, self._target, self._timer = call, target, timer
        self._session, self._monitor = session, monitor
        self._requested: list[int] = []

    def budget(self, drafting: Sequence[bool]) -> list[int]:
        """The maximum draft depth of each row in this step.

        Args:
            drafting: whether there may be a draft for the row.

        Raises:
            ValueError: if the policy returns another number of rows.
        """
        room = self._room(drafting)
        depths = self._session.depths(room)
        if len(depths) != len(room):
            raise ValueError(
                f"{self._session!r} returned {len(depths)} depths for {len(room)} rows; return one per row"
            )
        k = self._call.candidates.k
        self._requested = [max(0, min(depth, free, k)) for depth, free in zip(depths, room, strict=True)]
        return self._requested

    def _room(self, drafting: Sequence[bool]) -> list[int]:
        """How many draft tokens each row can use: one less than it has tokens left, since the bonus token follows them.

        Draft tokens also stay within `target.last_position`, unless the row itself has passed it, and within the slots
        that the target can attend to.
        """
        state, target = self._call.state, self._target
        columns = state.prompt_length + max(map(len, state.generated))
        if columns + MAX_DRAFT_SLOTS > target.slot_limit:
            return [0] * state.batch
        room = []
        for row, tokens in enumerate(state.generated):
            if not drafting[row]:
                room.append(0)
                continue
            pending = target.first_positions[row] + len(tokens) - 1
            positions = target.last_position - pending if pending <= target.last_position else UNLIMITED
            draft_limit = positions if tokens else min(positions, MAX_PREFILL_DRAFT)
            room.append(int(max(0, min(state.remaining(row) - 1, draft_limit))))
        return room

    def observe(self, tree: DraftTree, rows: list[RowStep | None], drafter_passes: Sequence[int] | None) -> None:
        """Report a step, and count its forward passes.

        Args:
            tree: the draft.
            rows: the outcome for each row.
            drafter_passes: tokens in each forward pass of the drafter; None if unknown.
        """
        step = StepRecord(self._requested, rows, 1 + tree.nodes, self._timer.step_seconds(), drafter_passes)
        self._session.observe(step)
        if self._monitor is not None:
            self._monitor.observe(step)
        drafter, batch = tuple(step.passes) if any(step.requested) else None, step.batch
        passes = StepPasses(batch, context_length(self._call), batch * step.tokens_per_row, drafter)
        self._call.statistics.passes.append(passes)
