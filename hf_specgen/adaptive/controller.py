"""The policy behind `k="auto"`: it measures, and drafts as deep as brings the most tokens per second, 0 included."""

from __future__ import annotations

from collections.abc import Sequence

from hf_specgen.adaptive.chances import Chances
from hf_specgen.adaptive.costs import MeasuredCosts, StepCosts, shared_costs
from hf_specgen.adaptive.optimum import Plan, best_plan
from hf_specgen.adaptive.policy import Policy, State, Step
from hf_specgen.adaptive.probing import Probes
from hf_specgen.statistics import RowStep

LONGEST = 32
PRIOR, FADE, LEAN = 0.7, 0.9, 1.0


class Controller(Policy):
    """Chooses the depth of each row's draft from what was accepted so far and from what steps cost here.

    Three things are learnt in each call. How likely each position of a draft is to be accepted (`Chances`); from the
    same counts, how likely a strategy is to have a draft that long; and what a step of each width costs on this
    machine, which is kept for the next call with the same model, batch and length. A plain step is chosen where no draft
    pays, and then a draft is tried now and then, so rarely that it does not show in the time (`Probes`).

    Decisions depend on counts and on costs. With costs that were measured beforehand they are repeatable; with tensor
    parallelism all ranks use those of rank 0.

    Args:
        costs: measured beforehand; learnt during the calls if left out.
        margin: by how much drafting must be expected to be faster than plain steps.

    Raises:
        ValueError: for a negative margin.

    Example:
        >>> from hf_specgen import NgramCandidates
        >>> NgramCandidates(k=16, policy=Controller())  # the same as NgramCandidates(k="auto")
        NgramCandidates(k=16, min_ngram=1, max_ngram=8, branches=1, history=None, policy=Controller())
    """

    def __init__(self, costs: StepCosts | None = None, *, margin: float = 0.02):
        if margin < 0:
            raise ValueError(f"margin must be at least 0, got {margin}")
        self.given_costs, self.margin = costs, margin

    def begin(self, state: State) -> None:
        rows, self._k = len(state.room), min(state.k, LONGEST)
        drafted_prior = 0.9 if state.cheap else 1.0
        self._gained = Chances(rows, self._k, PRIOR * drafted_prior, FADE, LEAN)
        self._drafted = Chances(rows, self._k, drafted_prior, FADE, LEAN)
        self._costs: StepCosts | MeasuredCosts = self.given_costs or shared_costs(state)
        self._probes = Probes()
        self._breadth = 1.0
        self._plan: Plan | None = None
        self._planned_for: object = None

    def depths(self, state: State) -> list[int]:
        self._costs.prepare(state)
        if self._costs.wants_plain_step:
            return [0] * len(state.room)
        plan = self.plan(state)
        if plan.gain > 1 + self.margin:
            return plan.depths
        depth = self._probes.depth()
        return [min(depth, free) for free in state.room]

    def plan(self, state: State) -> Plan:
        """The depths that are best by what is known, and what is expected of them."""
        room = [min(free, self._k) for free in state.room]
        known = (room, self._costs.version)
        if self._plan is None or known != self._planned_for:
            seconds = self._costs.by_depth(state, self._k, self._breadth)
            self._plan = best_plan(self._gained.cumulative(), self._drafted.cumulative(), seconds, room)
            self._planned_for = known
        return self._plan

    def observe(self, state: State, step: Step) -> None:
        self._costs.observe(step)
        self._probes.observe(step, self._extra(state, step.depth))
        if any(step.asked):
            self.learn(step.asked, step.rows)

    def _extra(self, state: State, depth: int) -> float:
        """What a draft of this depth costs more than a plain step, in plain steps."""
        seconds = self._costs.by_depth(state, self._k, self._breadth)
        return float(seconds[min(depth, self._k)] / seconds[0]) - 1

    def learn(self, asked: Sequence[int], rows: Sequence[RowStep | None]) -> None:
        """Count what came of a draft."""
        gained, drafted = zip(*map(_trials, asked, rows), strict=True)
        self._gained.observe(*zip(*gained, strict=True))
        self._drafted.observe(*zip(*drafted, strict=True))
        nodes, depth = (max((getattr(row, name) for row in rows if row), default=0) for name in ("drafted", "depth"))
        if depth:
            self._breadth += 0.2 * (nodes / depth - self._breadth)
        self._plan = None

    def __repr__(self) -> str:
        return f"Controller({'' if self.given_costs is None else self.given_costs!r})"


def _trials(asked: int, row: RowStep | None) -> tuple[tuple[int, int], tuple[int, int]]:
    """(positions seen, positions that came off) of one row: first for gained, then for drafted.

    A row that emits no token of the target's own was cut off by its end: nothing behind its last guess was seen.
    """
    if row is None or asked == 0:
        return (0, 0), (0, 0)
    judged = row.accepted + (row.emitted > row.accepted)
    return (min(asked, judged), row.accepted), (min(asked, row.depth + 1), row.depth)
