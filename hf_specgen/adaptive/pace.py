"""Between the decoding loop and a policy: what it is shown, and how its answer becomes the budget of each row."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Protocol

from hf_specgen.adaptive.policy import Policy, State, Step
from hf_specgen.tree import DraftTree

if TYPE_CHECKING:
    from hf_specgen.statistics import RowStep

PARTS = ("draft", "forward", "verify")


class StepHook(Protocol):
    """Something that is told of every step, such as a `SpeculationMonitor`."""

    def begin(self, state: State) -> None: ...

    def step(self, state: State, step: Step) -> None: ...

    def end(self, state: State) -> None: ...


class Pace:
    """The policy of one call at work.

    Args:
        policy: of the strategy or of the call; a copy of it is used.
        state: what the policy is shown, kept up to date here.
        generated: the text of each row, which the loop extends.
        monitor: told of every step.
    """

    def __init__(self, policy: Policy, state: State, generated: list[list[int]], monitor: StepHook | None = None):
        self.policy, self._state, self._generated, self._monitor = copy.copy(policy), state, generated, monitor
        self._asked: list[int] = []
        self._width = 1
        self._before = dict.fromkeys(PARTS, 0.0)
        self.policy.begin(state)
        if monitor is not None:
            monitor.begin(state)

    def budget(self, room: list[int]) -> list[int]:
        """How many tokens each row may draft now, at most those that it has room for.

        Raises:
            ValueError: if the policy answers for another number of rows.
        """
        state = self._state
        state.room, state.generated = room, [len(tokens) for tokens in self._generated]
        depths = self.policy.depths(state)
        if len(depths) != len(room):
            raise ValueError(f"{self.policy!r} gave {len(depths)} depths for {len(room)} rows; give one for each row")
        self._asked = [max(0, min(depth, free, state.k)) for depth, free in zip(depths, room, strict=True)]
        return self._asked

    def widened(self, tree: DraftTree) -> DraftTree:
        """The draft with as much padding as makes the step fast."""
        needed = 1 + tree.nodes
        self._width = max(needed, self.policy.width(self._state, needed))
        return tree if self._width == needed else tree.widened(self._width - 1)

    def observe(self, tree: DraftTree, rows: list[RowStep | None], seconds: dict[str, float]) -> None:
        """Tell the policy what came of it.

        Args:
            tree: the draft.
            rows: what each row made of it.
            seconds: of the call so far, by part.
        """
        spent, before = {}, self._before
        for part in PARTS:
            if seconds[part] > before[part]:
                spent[part] = seconds[part] - before[part]
                before[part] = seconds[part]
        step = Step(self._asked, rows, max(self._width, 1 + tree.nodes), spent)
        self.policy.observe(self._state, step)
        if self._monitor is not None:
            self._monitor.step(self._state, step)

    def end(self) -> None:
        """The call is over."""
        if self._monitor is not None:
            self._monitor.end(self._state)
