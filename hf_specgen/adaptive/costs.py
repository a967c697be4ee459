"""What a step costs, by the depth of its draft: measured beforehand, or learnt from the steps themselves."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from hf_specgen.adaptive.chances import Array
from hf_specgen.adaptive.draft_times import DraftTimes
from hf_specgen.adaptive.policy import State, Step
from hf_specgen.adaptive.prices import MOST_NODES, WIDTHS, Prices, interpolated
from hf_specgen.adaptive.ranks import agrees_with_others
from hf_specgen.adaptive.tables import Memory, Place, memory_of
from hf_specgen.adaptive.widths import fastest_widths

if TYPE_CHECKING:
    from hf_specgen.evaluation.cost import CostCurve

PLAIN_STEPS = 2
DOUBTED_AFTER = 64
SHORT = 511
"""Texts up to this length cost alike."""


class StepCosts:
    """Costs that were measured beforehand: decisions that rest on them are repeatable.

    Args:
        curves: T(q) of the target, e.g. of `measure_cost_curve`; of several, the one is used whose batch and context
            are nearest.
        draft_token: seconds to draft one token (for all rows at once); 0 for n-grams.
        draft_step: seconds that a step pays as soon as it drafts at all.

    Raises:
        ValueError: without a curve, or for a negative time.
    """

    wants_plain_step = doubts_plain_steps = False
    knows_wide_steps = True
    asking = catching_up = 0.0
    holds = float("inf")
    memory = None

    def __init__(self, *curves: CostCurve, draft_token: float = 0.0, draft_step: float = 0.0):
        if not curves:
            raise ValueError("StepCosts needs at least one cost curve; measure one with measure_cost_curve(model)")
        for name, value in (("draft_token", draft_token), ("draft_step", draft_step)):
            if value < 0:
                raise ValueError(f"{name} must be at least 0, got {value}")
        self.curves, self.draft_token, self.draft_step = curves, draft_token, draft_step
        self._curve = curves[0]
        self._of_curve = lru_cache(maxsize=len(curves))(_by_width)

    def follow(self, state: State) -> bool:
        """A step with this batch and context comes next; True if that changes what it costs."""
        nearest = min(self.curves, key=lambda curve: _distance(state.batch, state.context, curve))
        changed, self._curve = nearest is not self._curve, nearest
        return changed

    def width(self, needed: int) -> int:
        """How wide to make a step of so many tokens in a row."""
        widths = self._of_curve(self._curve)[1]
        return widths[needed - 1] if needed <= len(widths) else needed

    def by_depth(self, nodes: Array) -> Array:
        """`[k + 1]` seconds of a step by the depth of its draft, which has `nodes` `[k + 1]`."""
        seconds = interpolated(self._of_curve(self._curve)[0], nodes)
        seconds[1:] += self.draft_step + self.draft_token * np.arange(1, len(nodes))
        return seconds

    def by_nodes(self) -> Array:
        """`[MOST_NODES + 1]` seconds of a step by the nodes of its draft."""
        return self._of_curve(self._curve)[0][: MOST_NODES + 1]

    def observe(self, step: Step | None, was_plain: bool = False) -> None:
        """Nothing is learnt."""


class MeasuredCosts:
    """Costs learnt from the steps themselves, and kept for later calls with the same model.

    Args:
        state: of the first step.
    """

    def __init__(self, state: State):
        self.memory: Memory = memory_of(state.model)
        self._strategy, self._cheap = state.strategy, state.negligible_draft_cost
        self._device, self._dtype = (str(getattr(state.model, name, "")) for name in ("device", "dtype"))
        self._together = agrees_with_others(state.model)
        self._steps: list[Step | None] = []
        self._plain_steps, self._since_plain, self._unread = 0, 0, max(state.prompts)
        self._place: tuple[Place, int, str] | None = None
        self._prices: Prices
        self.follow(state)

    @property
    def wants_plain_step(self) -> bool:
        """Whether it is still unknown what a plain step takes."""
        return self._plain_steps < PLAIN_STEPS and not self._target.knows_plain_steps(self._rows)

    @property
    def doubts_plain_steps(self) -> bool:
        """Whether there was none for so long that what it takes may have changed."""
        return self._since_plain >= DOUBTED_AFTER

    @property
    def knows_wide_steps(self) -> bool:
        """Whether steps with drafts were measured."""
        return self._target.knows_wide_steps

    @property
    def asking(self) -> float:
        """Seconds that a draft takes that was asked for in vain."""
        return self._prices.asking

    @property
    def catching_up(self) -> float:
        """Seconds that the next draft takes to read the prompt, if it is the first, and the text of plain steps."""
        return self._prices.reading * (self._unread + len(self._steps))

    @property
    def holds(self) -> int:
        """For how many more steps prices are as they are."""
        return self._prices.last - self._prices.age

    def follow(self, state: State) -> bool:
        """Steps with this batch and context come next; True if prices have changed for that or by what was measured."""
        samples, size = state.temperature > 0, max(SHORT, state.context).bit_length() // 2
        rows = max(1, state.batch)
        place = Place(self._device, self._dtype, samples, size), rows, self._strategy
        holds = place == self._place and self._prices.age + len(self._steps) < self._prices.last
        if holds and not self.wants_plain_step:
            return False
        self._count_steps()
        if place != self._place:
            self._place, self._rows = place, rows
            self._target = self.memory.target(place[0])
            self._draft: DraftTimes = self.memory.draft(self._strategy, rows, self._target)
        known = self.memory.prices.get(place)
        if known is None or known.age >= known.last:
            draft = None if self._cheap else self._draft
            known = self.memory.prices[place] = Prices(self._target, rows, draft, self._together, known)
        self._prices = known
        return True

    def width(self, needed: int) -> int:
        """How wide to make a step of so many tokens in a row."""
        return self._prices.width(needed)

    def by_depth(self, nodes: Array) -> Array:
        """`[k + 1]` seconds of a step by the depth of its draft, which has `nodes` `[k + 1]`; no draft is for free."""
        return self._prices.by_depth(nodes)

    def by_nodes(self) -> Array:
        """`[MOST_NODES + 1]` seconds of a step by the nodes of its draft, which has been made."""
        return self._prices.by_nodes()

    def observe(self, step: Step | None, was_plain: bool = False) -> None:
        """Note a step, None for one whose time another strategy enters; it counts when prices are next looked up."""
        self._steps.append(step)
        self._since_plain = 0 if was_plain else self._since_plain + 1

    def _count_steps(self) -> None:
        if not self._steps:
            return
        for step in self._steps:
            drafted = step is not None and any(step.asked)
            if step is not None and "forward" in step.seconds:
                self._enter(step, drafted)
            elif step is not None and "draft" in step.seconds and not self._cheap:  # verified with the prompt
                self._enter_draft(step.depth, step.seconds["draft"])
            self._unread = 0 if drafted else self._unread + 1
        self._prices.age += len(self._steps)
        self._steps.clear()

    def _enter(self, step: Step, drafted: bool) -> None:
        rows, seconds = sum(row is not None for row in step.rows), step.total_seconds
        if not self._cheap:
            draft = step.seconds.get("draft", 0.0)
            seconds -= draft
            if drafted:
                self._enter_draft(step.depth, draft)
        self._target.add(rows, step.width, seconds)
        self._plain_steps += step.width == 1

    def _enter_draft(self, depth: int, seconds: float) -> None:
        if self._unread == 0:
            self._draft.add(depth, seconds)
        else:
            usual = float(self._draft(np.array([float(depth)]))[0])
            self._draft.add_reading(self._unread, seconds - usual)


def _by_width(curve: CostCurve) -> tuple[Array, list[int]]:
    """Seconds of a step by what it needs to read, and the widths that are read instead."""
    seconds = np.array([curve(width) for width in WIDTHS])
    widths = fastest_widths(seconds.tolist())
    return seconds[np.array(widths) - 1], widths


def _distance(batch: int, context: int, curve: CostCurve) -> float:
    return 2 * abs(np.log2(max(batch, 1) / curve.batch)) + abs(np.log2(max(context, 1) / curve.context))
