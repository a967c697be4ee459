"""What a step costs, by the depth of its draft: measured beforehand, or learnt from the steps themselves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from functools import lru_cache
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from hf_specgen.adaptive.chances import Array
from hf_specgen.adaptive.policy import State, Step
from hf_specgen.adaptive.ranks import agrees_with_others, from_first_rank

if TYPE_CHECKING:
    from hf_specgen.cost import CostCurve

KEPT = 7
PLAIN_STEPS = 2
NEWS = 0.05
VERIFY_SLOPE, DRAFT_SLOPE = 0.03, 0.1


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

    wants_plain_step = False
    knows_wide_steps = True

    def __init__(self, *curves: CostCurve, draft_token: float = 0.0, draft_step: float = 0.0):
        if not curves:
            raise ValueError("StepCosts needs at least one cost curve; measure one with measure_cost_curve(model)")
        for name, value in (("draft_token", draft_token), ("draft_step", draft_step)):
            if value < 0:
                raise ValueError(f"{name} must be at least 0, got {value}")
        self.curves, self.draft_token, self.draft_step = curves, draft_token, draft_step
        self._curve = curves[0]
        self._by_depth = lru_cache(maxsize=64)(self._compute)

    def prepare(self, state: State) -> None:
        """A step with this batch and context comes next."""
        if len(self.curves) > 1:
            self._curve = min(self.curves, key=lambda curve: _distance(state.batch, state.context, curve))

    def by_depth(self, k: int, breadth: float) -> Array:
        """`[k + 1]` seconds of a step by the depth of its draft, with `breadth` nodes per position."""
        return self._by_depth(self._curve, k, round(4 * breadth) / 4)

    def observe(self, step: Step) -> None:
        """Nothing is learnt."""

    def _compute(self, curve: CostCurve, k: int, breadth: float) -> Array:
        seconds = [curve(1 + breadth * depth) + self.draft_token * depth for depth in range(k + 1)]
        result = np.array(seconds)
        result[1:] += self.draft_step
        return result


class Table:
    """What steps of each width took, for one batch size and length of context.

    Where nothing was measured yet, the shape of `prior` (the table of a similar batch, or a guess) is scaled to what
    was. It begins optimistic: a width has to be tried before it can be known to be expensive.
    """

    def __init__(self, prior: Callable[[Array], Array]):
        self._prior = _snapshot(prior)
        self._before = prior if isinstance(prior, Table) else None
        self._times: dict[int, deque[float]] = {}
        self._unsure: set[int] = set()
        self.known: dict[int, float] = {}
        self.version = 0

    def add(self, width: int, seconds: float) -> None:
        """Enter a measurement. The first of a width, in which kernels are prepared, gives way to the second."""
        times = self._times.setdefault(width, deque(maxlen=KEPT))
        if not times:
            self._unsure.add(width)
        elif width in self._unsure:
            self._unsure.remove(width)
            times.clear()
        times.append(seconds)
        now, before = median(times), self.known.get(width, 0.0)
        if abs(now - before) > NEWS * before:
            self.known[width] = now
            self.version += 1

    @property
    def knows_plain_steps(self) -> bool:
        """Whether it is known what a plain step takes, if only from a table of a similar batch."""
        known = 1 in self._times and 1 not in self._unsure
        return known or (self._before is not None and self._before.knows_plain_steps)

    @property
    def knows_wide_steps(self) -> bool:
        """The same of steps with drafts."""
        return len(self.known) > 1 or (self._before is not None and self._before.knows_wide_steps)

    def __call__(self, widths: Array) -> Array:
        """Seconds (or, with nothing measured, a shape) for each of some increasing widths; never falling."""
        shape = self._prior(widths)
        if not self.known:
            return shape
        measured = np.array(sorted(self.known), dtype=float)
        ratios = np.array([self.known[int(width)] for width in measured]) / self._prior(measured)
        seconds = shape * np.interp(widths, measured, ratios)
        rising, falling = np.maximum.accumulate(seconds), np.minimum.accumulate(seconds[::-1])[::-1]
        return (rising + falling) / 2


class Place(NamedTuple):
    """Where a table holds; batches and contexts in powers of two."""

    strategy: str
    device: str
    dtype: str
    batch: int
    context: int


Tables = dict[Place, Table]
_tables: WeakKeyDictionary[Any, Tables] = WeakKeyDictionary()


class MeasuredCosts:
    """Costs learnt from the steps themselves, and kept for later calls with the same model.

    Args:
        tables: those of the model.
        state: of the first step.
    """

    def __init__(self, tables: Tables, state: State):
        self._tables, self._strategy, self._cheap = tables, state.strategy, state.cheap
        device, dtype = (str(getattr(state.model, name, "")) for name in ("device", "dtype"))
        self._device, self._dtype = device, dtype
        self._together = agrees_with_others(state.model)
        self._steps, self._publications, self._follows_draft = 0, 0, False
        self._size: tuple[int, int] = (0, 0)
        self._by_depth: tuple[Hashable, Array] | None = None

    @property
    def _version(self) -> Hashable:
        return (*self._size, self._publications, self._table.version)

    @property
    def wants_plain_step(self) -> bool:
        """Whether it is still unknown what a plain step takes."""
        return self._steps < PLAIN_STEPS and not self._table.knows_plain_steps

    @property
    def knows_wide_steps(self) -> bool:
        """Whether steps with drafts were measured."""
        return self._table.knows_wide_steps

    @property
    def _table(self) -> Table:
        return self._published if self._published is not None else self._own

    def prepare(self, state: State) -> None:
        """A step with this batch and context comes next."""
        size = (state.batch.bit_length(), state.context.bit_length())
        if size != self._size:
            self._size = size
            self._own = self._find(Place(self._strategy, self._device, self._dtype, *size))
            self._published: Table | None = None
        due = self._published is None or self._steps & (self._steps - 1) == 0 or self._steps % 64 == 0
        if self._together and due:
            self._published = _frozen(from_first_rank(dict(self._own.known)), self._cheap)
            self._publications += 1

    def by_depth(self, k: int, breadth: float) -> Array:
        """`[k + 1]` seconds of a step by the depth of its draft, with `breadth` nodes per position."""
        breadth = round(4 * breadth) / 4
        known = (self._version, k, breadth)
        if self._by_depth is None or self._by_depth[0] != known:
            self._by_depth = known, self._table(1 + breadth * np.arange(k + 1))
        return self._by_depth[1]

    def observe(self, step: Step) -> None:
        """Enter what a step took. A network's draft after plain steps reads their text first, and is not typical."""
        if "forward" not in step.seconds:
            return
        self._steps += 1
        if step.width == 1 or self._cheap or self._follows_draft:
            self._own.add(step.width, step.total_seconds)
        self._follows_draft = step.width > 1

    def _find(self, place: Place) -> Table:
        if place not in self._tables:
            alike = [other for other in self._tables if other[:3] == place[:3]]
            nearest = min(alike, key=lambda other: _places_apart(other, place), default=None)
            self._tables[place] = Table(_guess(self._cheap) if nearest is None else self._tables[nearest])
        return self._tables[place]


def shared_costs(state: State) -> MeasuredCosts:
    """The costs of this model, as far as earlier calls have learnt them."""
    if state.model is None:
        return MeasuredCosts({}, state)
    return MeasuredCosts(_tables.setdefault(state.model, {}), state)


def _guess(cheap: bool) -> Callable[[Array], Array]:
    slope = VERIFY_SLOPE + (0.0 if cheap else DRAFT_SLOPE)
    return lambda widths: 1 + slope * (np.asarray(widths, dtype=float) - 1)


def _snapshot(curve: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A curve as it is now; beyond its widest point it goes on as it did there."""
    widths = np.array([1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64], dtype=float)
    values = curve(widths)
    slope = (values[-1] - values[-2]) / (widths[-1] - widths[-2])
    return lambda wanted: np.interp(wanted, widths, values) + slope * np.maximum(0, wanted - widths[-1])


def _frozen(known: dict[int, float], cheap: bool) -> Table:
    table = Table(_guess(cheap))
    for width, seconds in known.items():
        table.add(width, seconds)
        table.add(width, seconds)
    return table


def _places_apart(a: Place, b: Place) -> int:
    return 2 * abs(a.batch - b.batch) + abs(a.context - b.context)


def _distance(batch: int, context: int, curve: CostCurve) -> float:
    return 2 * abs(np.log2(max(batch, 1) / curve.batch)) + abs(np.log2(max(context, 1) / curve.context))
