"""The policy behind `k="auto"`: it measures, and drafts as deep as brings the most tokens per second, 0 included."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_specgen.adaptive.chances import Array, BatchChances, Chances
from hf_specgen.adaptive.costs import MeasuredCosts, StepCosts
from hf_specgen.adaptive.optimum import Plan, best_depth, best_depths
from hf_specgen.adaptive.policy import Policy, State, Step
from hf_specgen.adaptive.prices import LONGEST
from hf_specgen.adaptive.probing import Probes
from hf_specgen.statistics import RowStep

PRIOR, FADE, LEAN = 0.7, 0.95, 2.0
REMEMBERED = 8.0
"""As many trials does weigh what was accepted in the call before; half of them if that had another temperature."""
USUALLY_WRONG = 0.2
OFTEN_WITHOUT_DRAFT = 0.9
SLOW_START, AFFORDABLE = 3, 1.4
"""Until the first guess is accepted: the greatest depth where costs are unknown, the greatest cost where they are."""
EVERY_STEP, LATER, SELDOM = 4, 12, 3
"""The first drafts are counted one by one, later ones twelve at a time, tries three at a time: that is quicker."""
IN_VAIN = 4
"""But a draft of which nothing is accepted weighs as many as that, so that bad news does not wait."""
PLAN_LASTS = 32
"""So many steps at most a plan holds where no drafts are made that would tell more."""
BEYOND_DOUBT = 2.0
"""While drafting seems faster by less than that, a plain step is made now and then to see whether it is."""
TRIED_AT_LEAST = 2
"""So many are made before they are given up, if they seemed to pay at first: one may have been bad luck."""


class Controller(Policy):
    """Chooses the depth of each row's draft from what was accepted so far and from what steps cost here.

    Three things are learnt in each call. How likely each position of a draft is to be accepted (`Chances`); from the
    same counts, how likely a strategy is to have a draft that long; and what a step of each width costs on this
    machine, which is kept for later calls with the same model, batch and length. A plain step is chosen where no draft
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
        first = OFTEN_WITHOUT_DRAFT if state.negligible_draft_cost else 1.0
        self._gained = _chances(rows, self._k, PRIOR * first)
        self._drafted = _chances(rows, self._k, first)
        self._costs: StepCosts | MeasuredCosts = self.given_costs or MeasuredCosts(state)
        self._probes = Probes()
        self._adaptive_tree = state.adaptive_tree
        self._breadth, self._size = 1.0, 4.0
        self._news: list[tuple[Sequence[int], Sequence[RowStep | None]]] = []
        self._counted, self._age, self._wait, self._steady = 0, 0, 1, EVERY_STEP
        self._weight, self._shape, self._lasts = 0, 0.0, 0.0
        self._plan: Plan | None = None
        self._tries, self._entry = False, 0.0
        self._by_nodes: Array | None = None
        self._seconds, self._asking = [1.0] * (self._k + 1), 0.0
        self._always_full, self._something_accepted, self._hopeful = not state.negligible_draft_cost, False, True
        self._remember(state.strategy, state.temperature)

    def _remember(self, strategy: str, temperature: float) -> None:
        """Begin with what was accepted in the call before, and leave word for the next."""
        memory = self._costs.memory
        if memory is None:
            return
        nearest = memory.nearest_temperature(strategy, temperature)
        if nearest is not None:
            *chances, probes = memory.counts[strategy, nearest]
            gained, drafted = (chance.counts() for chance in chances)
            trials = REMEMBERED if nearest == temperature else REMEMBERED / 2
            self._gained.begin_with(gained, trials)
            self._drafted.begin_with(drafted, trials)
            self._something_accepted = gained[1][0] > USUALLY_WRONG * gained[0][0]
            self._always_full = self._always_full and drafted[0] == drafted[1]
            self._probes = Probes(probes.earned if nearest == temperature else 0.0)
        memory.counts[strategy, temperature] = self._gained, self._drafted, self._probes

    def depths(self, state: State) -> list[int]:
        plan = self.plan(state)
        if plan is None:
            return [0] * len(state.room)
        return plan.depths if self.pays(plan) else self.probe(state)

    def pays(self, plan: Plan) -> bool:
        """Whether drafting is expected to be faster than plain steps, what it takes to begin with it included."""
        return plan.gain > 1 + self.margin + self._entry

    def probe(self, state: State) -> list[int]:
        """Depths for a step in which this strategy does not seem best; seldom other than 0."""
        if self._hopeful and self._counted < TRIED_AT_LEAST:
            depth = min(SLOW_START - 1, self._first_depth())
        else:
            depth = self._probes.depth(self._seconds, self._catching_up())
        if depth and self._adaptive_tree:
            depth = self._k
        self._tries = depth > 0
        return [depth] * len(state.room)

    def plan(self, state: State) -> Plan | None:
        """The depths that are best by what is known; None if it is not known, or no more, what plain steps take."""
        self._age += 1
        self._tries = False
        if self._plan is None or self._weight >= self._wait or self._age >= self._lasts:
            self._make_plan(state)
        plan = self._plan
        if plan is not None and self._costs.doubts_plain_steps and self.pays(plan) and plan.gain < BEYOND_DOUBT:
            return None
        return plan

    def _make_plan(self, state: State) -> None:
        if self._news:
            self._count_news()
        self._look_up_costs(state)
        self._age, self._lasts = 0, min(PLAN_LASTS, self._costs.holds)
        if self._costs.wants_plain_step:
            self._plan = None
            return
        limit = self._k if self._something_accepted else self._first_depth()
        is_first = self._plan is None
        paid = self._plan is not None and self.pays(self._plan)
        self._plan = self._best([min(free, limit) for free in state.room])
        self._entry = 0.0 if paid else self._catching_up() / max(1, *state.room)
        pays = self.pays(self._plan)
        if is_first:
            self._hopeful = not self._costs.knows_wide_steps or pays
        if paid and not pays:
            self._probes.renew()
        elif pays and not paid:
            self._steady = self._counted + EVERY_STEP
        self._wait = 1 if self._counted < self._steady else LATER if pays else SELDOM

    def _look_up_costs(self, state: State) -> None:
        shape = self._size if self._adaptive_tree else self._breadth
        if self._costs.follow(state) or shape != self._shape:
            self._seconds = self._costs.by_depth(self._nodes()).tolist()
            self._asking, self._by_nodes = self._costs.asking, None
            self._shape = shape

    def _catching_up(self) -> float:
        """What the next draft takes to read what it has not read, in plain steps."""
        return self._costs.catching_up / self._seconds[0]

    def _nodes(self) -> Array:
        """`[k + 1]` how many nodes a draft of each depth has."""
        depths = np.arange(self._k + 1, dtype=float)
        return np.where(depths > 0, self._size, 0.0) if self._adaptive_tree else self._breadth * depths

    def _first_depth(self) -> int:
        """How deep to draft before anything is known of the text."""
        if self._adaptive_tree:
            return self._k
        if not self._costs.knows_wide_steps:
            return SLOW_START
        return max(1, sum(second <= AFFORDABLE * self._seconds[0] for second in self._seconds) - 1)

    def _best(self, room: list[int]) -> Plan:
        if isinstance(self._gained, Chances) and isinstance(self._drafted, Chances):
            drafted = [1.0] * self._k if self._always_full else self._drafted.cumulative()
            return best_depth(self._gained.cumulative(), drafted, self._seconds, room[0], self._asking)
        reached = None if self._always_full else np.asarray(self._drafted.cumulative())
        return best_depths(np.asarray(self._gained.cumulative()), reached, np.array(self._seconds), room)

    def rate(self, state: State, depths: Sequence[int]) -> float:
        """Expected tokens per second of a step in which drafts of these depths were found."""
        gained, drafted = (np.atleast_2d(chances.cumulative()) for chances in (self._gained, self._drafted))
        right = np.minimum(1, gained / np.maximum(drafted, 1e-6)).cumsum(axis=1)  # given that it was drafted
        tokens = sum(float(right[row, min(depth, self._k) - 1]) for row, depth in enumerate(depths) if depth)
        return (tokens + state.batch) / self._seconds[min(max(depths), self._k)]

    def seconds_by_nodes(self) -> Array:
        if self._by_nodes is None:
            self._by_nodes = self._costs.by_nodes()
        return self._by_nodes

    def width(self, state: State, needed: int) -> int:
        return self._costs.width(needed)

    def passed_over(self, was_plain: bool) -> None:
        """Another strategy drafted in this step, or none did."""
        self._costs.observe(None, was_plain)

    def observe(self, state: State, step: Step) -> None:
        drafted = any(step.asked)
        self._costs.observe(step, not drafted)
        if not drafted:
            return
        self._news.append((step.asked, step.rows))
        brought = [row.accepted for row in step.rows if row is not None and row.drafted]
        in_vain = brought and not any(brought) and not self._tries
        self._weight += IN_VAIN if in_vain else 1
        if self._tries:
            extra = self._seconds[min(step.depth, self._k)] - self._seconds[0] + self._costs.catching_up
            self._probes.observe(step, (extra if step.depth else self._costs.asking) / self._seconds[0])

    def _count_news(self) -> None:
        """Count what came of the last drafts."""
        trials = [_trials(*pair) for asked, rows in self._news for pair in zip(asked, rows, strict=True)]
        asked, judged, accepted, reached, depths = zip(*trials, strict=True)  # each [steps * rows]
        self._gained.observe(asked, judged, accepted)
        self._always_full = self._always_full and depths == asked
        if not self._always_full:
            self._drafted.observe(asked, reached, depths)
        for _, rows in self._news:
            nodes = max([row.drafted for row in rows if row is not None])
            if nodes:
                deepest = max([row.depth for row in rows if row is not None])
                self._breadth += 0.3 * (nodes / deepest - self._breadth)
                self._size += 0.3 * (nodes - self._size)
        self._something_accepted = self._something_accepted or any(accepted)
        self._counted += len(self._news)
        self._weight = 0
        self._news.clear()

    def __repr__(self) -> str:
        return "Controller()" if self.given_costs is None else f"Controller({self.given_costs!r})"


def _chances(rows: int, k: int, prior: float) -> Chances | BatchChances:
    if rows == 1:
        return Chances(k, prior, FADE, LEAN)
    return BatchChances(rows, k, prior, FADE, LEAN)


def _trials(asked: int, row: RowStep | None) -> tuple[int, int, int, int, int]:
    """Positions asked for; seen and come off, first as *gained*, then as *drafted*.

    A row that emits no token of the target's own was cut off by its end: nothing behind its last guess was seen.
    """
    if row is None or asked == 0:
        return 0, 0, 0, 0, 0
    judged = row.accepted + (row.emitted > row.accepted)
    return asked, min(asked, judged), row.accepted, min(asked, row.depth + 1), row.depth
