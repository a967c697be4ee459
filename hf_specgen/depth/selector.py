"""Chooses, step by step, which of several strategies drafts, and how deep: the policy of `AutoCandidates`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hf_specgen.depth.latency import LatencyModel
from hf_specgen.depth.policy import Policy, PolicySession, StepRecord
from hf_specgen.statistics import RowStep

if TYPE_CHECKING:
    from hf_specgen.depth.call import Call, CandidatesSettings

OTHER_NETWORK_EVERY = 64
"""One step in so many tries a network that is not the best one: about the share of time that exploration may take."""


@dataclass(frozen=True)
class StrategySelector(Policy):
    """A bandit over strategies: each keeps its own policy, whose estimates decide between them.

    Strategies without a network (n-grams) are asked first. Their draft is taken if a higher speed is expected of it
    than of the best network, which is asked otherwise.

    Args:
        strategies: settings of each strategy, and its policy. One that does not estimate speed counts as plain decoding.
    """

    strategies: Sequence[tuple[CandidatesSettings, Policy]]

    def start(self, call: Call) -> SelectorSession:
        return SelectorSession(self, call)


class SelectorSession(PolicySession):
    """The state of `StrategySelector` in one call; strategies are named by their index."""

    def __init__(self, policy: StrategySelector, call: Call):
        self._candidates = [candidates for candidates, _ in policy.strategies]
        self._sessions = [one.start(_CallOf(call, candidates)) for candidates, one in policy.strategies]
        self._networks = [i for i, one in enumerate(self._candidates) if not one.negligible_draft_cost]
        self._depths: list[list[int]] = []
        self._network: int | None = None
        self._speedup = 1.0
        self._step = 0

    @property
    def latency(self) -> LatencyModel | None:  # type: ignore[override]
        """The latency model of the network that drafts, or else of the first strategy."""
        return self._sessions[self._network or 0].latency

    def depths(self, room: Sequence[int]) -> list[int]:
        """For each row the deepest of what the strategies may draft; `order` says which are asked for it."""
        self._step += 1
        self.chosen: int | None = None
        self._empty: set[int] = set()
        self._depths = [
            [min(depth, free, one.k) for depth, free in zip(session.depths(room), room, strict=True)]
            for one, session in zip(self._candidates, self._sessions, strict=True)
        ]
        self._choose_network()
        return [max(depths) for depths in zip(*(self._depths[index] for index in self.order()), [0] * len(room))]

    def order(self) -> list[int]:
        """The strategies to ask in this step, until the draft of one is taken."""
        free = [i for i, one in enumerate(self._candidates) if one.negligible_draft_cost and any(self._depths[i])]
        return free if self._network is None else [*free, self._network]

    def depths_of(self, index: int) -> list[int]:
        """How deep a strategy may draft in this step."""
        return self._depths[index]

    def takes(self, index: int, depths: Sequence[int]) -> bool:
        """Whether a strategy's draft of these depths is used; to be called once for each one asked."""
        if not any(depths):
            self._empty.add(index)
            return False
        if index != self._network and self._network is not None:
            if (self._sessions[index].expected_speedup(depths) or 1.0) < self._speedup:
                return False
        self.chosen = index
        return True

    def observe(self, step: StepRecord) -> None:
        """Report the step to each strategy's session: as its own draft, as an empty one, or as a step without it."""
        target_seconds = {part: seconds for part, seconds in step.seconds.items() if part != "draft"}
        for index, session in enumerate(self._sessions):
            if index == self.chosen:
                session.observe(replace(step, requested=self._depths[index]))
            elif index in self._empty:
                empty = [None if row is None else RowStep(0, 0, 0, 1) for row in step.rows]
                session.observe(StepRecord(self._depths[index], empty, 1))
            else:
                session.observe(replace(step, requested=[0] * len(step.rows), seconds=target_seconds))

    def _choose_network(self) -> None:
        """The network with the highest expected speedup; now and then the next one."""
        speedups = {
            i: self._sessions[i].expected_speedup(self._depths[i]) for i in self._networks if any(self._depths[i])
        }
        best = max(speedups, key=lambda index: speedups[index] or 1.0, default=None)
        self._network, self._speedup = best, 1.0 if best is None else speedups[best] or 1.0
        if best is not None and len(speedups) > 1 and self._step % OTHER_NETWORK_EVERY == 0:
            others = [index for index in speedups if index != best]
            self._network = others[self._step // OTHER_NETWORK_EVERY % len(others)]
            self._speedup = float("inf")  # a trial is not given up for an n-gram draft


class _CallOf:
    """A call as one of its strategies sees it."""

    def __init__(self, call: Call, candidates: CandidatesSettings):
        self._call, self.candidates = call, candidates

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)
