"""What a step costs, by the depth of its draft: measured beforehand, or learnt from the steps themselves."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from hf_specgen.adaptive.chances import Array
from hf_specgen.adaptive.policy import State, Step
from hf_specgen.adaptive.ranks import agrees_with_others, from_first_rank
from hf_specgen.adaptive.tables import DraftTimes, Memory, Place, memory_of
from hf_specgen.adaptive.widths import fastest_widths, tile

if TYPE_CHECKING:
    from hf_specgen.cost import CostCurve

PLAIN_STEPS = 2
DOUBTED_AFTER = 64
MOST_NODES = 64
SHORT = 511
"""Texts up to this length cost alike."""
WIDTHS = np.arange(1.0, 161.0)
LONGEST = 32
"""The deepest draft that is thought about."""
WIDENED = 32
"""Wider steps are left as they are: padding would save little."""


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

    def prepare(self, state: State) -> None:
        """A step with this batch and context comes next."""
        if len(self.curves) > 1:
            self._curve = min(self.curves, key=lambda curve: _distance(state.batch, state.context, curve))

    def width(self, needed: int) -> int:
        """How wide to make a step of so many tokens in a row."""
        widths = self._of_curve(self._curve)[1]
        return widths[needed - 1] if needed <= len(widths) else needed

    def by_depth(self, nodes: Array) -> Array:
        """`[k + 1]` seconds of a step by the depth of its draft, which has `nodes` `[k + 1]`."""
        seconds = _at(self._of_curve(self._curve)[0], nodes)
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
        self._strategy, self._cheap = state.strategy, state.cheap
        self._device, self._dtype = (str(getattr(state.model, name, "")) for name in ("device", "dtype"))
        self._together = agrees_with_others(state.model)
        self._steps: list[Step | None] = []
        self._plain_steps, self._since_plain, self._unread = 0, 0, max(state.prompts)
        self._drafting: Array = np.zeros(LONGEST + 1)
        self._reading = 0.0
        self.prepare(state)

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
        return float(self._drafting[0])

    @property
    def catching_up(self) -> float:
        """Seconds that the next draft takes to read the prompt, if it is the first, and the text of plain steps."""
        return self._reading * (self._unread + len(self._steps))

    def prepare(self, state: State) -> None:
        """Steps with this batch and context come next; enter what the last ones took."""
        self._count_steps()
        self._rows = max(1, state.batch)
        samples, size = state.temperature > 0, max(SHORT, state.context).bit_length() // 2
        self._target = self.memory.target(Place(self._device, self._dtype, samples, size))
        self._draft: DraftTimes = self.memory.draft(self._strategy, self._rows, self._target)
        self._look_up()

    def _look_up(self) -> None:
        """Seconds by width, which of them to make wider, and which to make as they are for once."""
        target, rows, wide = self._target, self._rows, tile(self._rows)
        drafting = np.zeros(LONGEST + 1) if self._cheap else self._draft(np.arange(LONGEST + 1.0))
        measured = target.of(rows)(WIDTHS), drafting, self._draft.reading
        seconds, self._drafting, self._reading = from_first_rank(measured) if self._together else measured
        widths = fastest_widths(seconds[:WIDENED].tolist())
        wider = [width for width, made in enumerate(widths, 1) if made > width]
        known = [width for width in wider if target.knows(rows, width)]
        self._doubted = {width for width in known if target.steps_since(rows, width) > 4 * DOUBTED_AFTER}
        self._widths = {width: widths[width - 1] for width in known}
        for width, made in self._widths.items():
            seconds[width - 1] = seconds[made - 1]
        self._by_width = np.maximum(seconds, seconds[0])
        self._tiles = int(not target.knows(rows, wide) and seconds[wide - 1] < 2 * seconds[0])

    def width(self, needed: int) -> int:
        """How wide to make a step of so many tokens in a row.

        As wide as is fastest. What a tile takes is found out first, and now and then what the step itself takes.
        """
        if self._tiles and needed < tile(self._rows) and self._rows * needed > 1:
            self._tiles -= 1
            return tile(self._rows)
        if needed in self._doubted:
            self._doubted.remove(needed)
            return needed
        return self._widths.get(needed, needed)

    def by_depth(self, nodes: Array) -> Array:
        """`[k + 1]` seconds of a step by the depth of its draft, which has `nodes` `[k + 1]`; no draft is for free."""
        seconds = _at(self._by_width, nodes)
        seconds[1:] += self._drafting[1 : len(nodes)]
        return seconds

    def by_nodes(self) -> Array:
        """`[MOST_NODES + 1]` seconds of a step by the nodes of its draft, which has been made."""
        return self._by_width[: MOST_NODES + 1] + self.asking

    def observe(self, step: Step | None, was_plain: bool = False) -> None:
        """Note a step, None for one whose time another strategy enters; it counts when costs are next looked up."""
        self._steps.append(step)
        self._since_plain = 0 if was_plain else self._since_plain + 1

    def _count_steps(self) -> None:
        for step in self._steps:
            drafted = step is not None and any(step.asked)
            if step is not None and "forward" in step.seconds:
                self._enter(step, drafted)
            elif step is not None and "draft" in step.seconds and not self._cheap:  # verified with the prompt
                self._enter_draft(step.depth, step.seconds["draft"])
            self._unread = 0 if drafted else self._unread + 1
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
            self._draft.reading += 0.5 * (max(0.0, seconds - usual) / self._unread - self._draft.reading)


def _by_width(curve: CostCurve) -> tuple[Array, list[int]]:
    """Seconds of a step by what it needs to read, and the widths that are read instead."""
    seconds = np.array([curve(width) for width in WIDTHS])
    widths = fastest_widths(seconds.tolist())
    return seconds[np.array(widths) - 1], widths


def _at(by_width: Array, nodes: Array) -> Array:
    seconds: Array = np.interp(1 + nodes, WIDTHS, by_width)
    return seconds


def _distance(batch: int, context: int, curve: CostCurve) -> float:
    return 2 * abs(np.log2(max(batch, 1) / curve.batch)) + abs(np.log2(max(context, 1) / curve.context))
