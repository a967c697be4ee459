"""Which of several strategies drafts in this step, and how deep: the policy of `AutoCandidates`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hf_specgen.adaptive.chances import Array
from hf_specgen.adaptive.controller import Controller
from hf_specgen.adaptive.policy import Policy, State, Step
from hf_specgen.statistics import RowStep


@dataclass
class Arm:
    """One of the strategies.

    Args:
        controller: its own, with its own estimates.
        state: what that is shown.
        cheap: whether it may be asked in vain.
        depths: what it may draft now.
    """

    controller: Controller
    state: State
    negligible_draft_cost: bool
    depths: list[int]

    @property
    def wanted(self) -> bool:
        return any(self.depths)


class Chooser(Policy):
    """A controller for each strategy, and the choice between them.

    Cheap strategies (n-grams) are asked first. Their draft is taken if more is expected of it than of the best of the
    others, a network, which is asked otherwise. Networks that are not the best are tried now and then, like a strategy
    that does not pay.

    Args:
        settings: for each strategy its name, its greatest depth, whether it is cheap, whether it sizes its drafts
            itself, and its controller.
    """

    def __init__(self, settings: Sequence[tuple[str, int, bool, bool, Controller]]):
        self._settings = settings

    def begin(self, state: State) -> None:
        self.arms: list[Arm] = []
        for name, k, cheap, adaptive_tree, controller in self._settings:
            own = replace(state, k=k, strategy=name, negligible_draft_cost=cheap, adaptive_tree=adaptive_tree)
            arm = Arm(Controller(controller.given_costs, margin=controller.margin), own, cheap, [])
            arm.controller.begin(own)
            self.arms.append(arm)
        self._network: int | None = None
        self._network_rate = 0.0
        self.chosen: int | None = None
        """Which strategy drafted in this step."""
        self.in_vain: list[int] = []
        """Those that were asked and had nothing to say."""

    def depths(self, state: State) -> list[int]:
        self.chosen, self.in_vain = None, []
        zeros = [0] * len(state.room)
        rates: dict[int, float] = {}
        waits = False
        for index, arm in enumerate(self.arms):
            arm.state.room, arm.state.generated = state.room, state.generated
            plan = arm.controller.plan(arm.state)
            arm.depths = zeros
            if plan is None:
                waits = True
            elif arm.controller.pays(plan):
                arm.depths = plan.depths
                rates[index] = plan.rate
        if waits:
            for arm in self.arms:
                arm.depths = zeros
            return zeros
        self._choose_network(rates)
        for arm in self.arms:
            if arm.negligible_draft_cost and not arm.wanted:
                arm.depths = arm.controller.probe(arm.state)
        return [max(depths) for depths in zip(*(arm.depths for arm in self.arms), strict=True)]

    def asked(self) -> list[int]:
        """The strategies to ask, in order: the cheap ones, then a network if one pays."""
        cheap = [index for index, arm in enumerate(self.arms) if arm.negligible_draft_cost and arm.wanted]
        return cheap if self._network is None else [*cheap, self._network]

    def accepts(self, index: int, depths: Sequence[int]) -> bool:
        """Whether to take a draft of these depths, or to go on to the network; told once for each one asked."""
        if not any(depths):
            self.in_vain.append(index)
            return False
        goes_on = self.arms[index].negligible_draft_cost and self._network is not None
        if goes_on and self.arms[index].controller.rate(self.arms[index].state, depths) < self._network_rate:
            return False
        self.chosen = index
        return True

    def seconds_by_nodes(self) -> Array:
        return self.arms[self._network or 0].controller.seconds_by_nodes()

    def width(self, state: State, needed: int) -> int:
        return self.arms[self.chosen or 0].controller.width(state, needed)

    def observe(self, state: State, step: Step) -> None:
        timed = self.chosen or 0  # one of them enters the time of the target
        for index, arm in enumerate(self.arms):
            if index == self.chosen:
                arm.controller.observe(arm.state, replace(step, asked=arm.depths))
            elif index in self.in_vain:
                nothing = [None if row is None else RowStep(0, 0, 0, 1) for row in step.rows]
                seconds = step.seconds if index == timed else {}
                arm.controller.observe(arm.state, Step(arm.depths, nothing, step.width, seconds))
            elif index == timed:
                arm.controller.observe(arm.state, replace(step, asked=[0] * len(step.rows)))
            else:
                arm.controller.passed_over(not any(step.asked))

    def _choose_network(self, rates: dict[int, float]) -> None:
        """The best of the networks, or one whose turn it is to be tried again; only that one keeps its depths."""
        networks = [index for index, arm in enumerate(self.arms) if not arm.negligible_draft_cost]
        best = max((index for index in networks if index in rates), key=lambda index: rates[index], default=None)
        self._network, self._network_rate = best, 0.0 if best is None else rates[best]
        for index in networks:
            if index == best:
                continue
            arm = self.arms[index]
            probe = arm.controller.probe(arm.state)
            if any(probe) and self._network == best:
                arm.depths = arm.depths if arm.wanted else probe
                self._network = index
                self._network_rate = float("inf")  # a try is not given up for n-grams
            else:
                arm.depths = [0] * len(probe)
        if best is not None and self._network != best:
            self.arms[best].depths = [0] * len(self.arms[best].depths)

    def __repr__(self) -> str:
        return f"Chooser({', '.join(name for name, *_ in self._settings)})"
