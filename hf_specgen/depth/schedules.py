"""Rule-based policies: depth by batch size, context length or recent acceptance, and no drafts in some calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hf_specgen.call import Call
from hf_specgen.counters import StepRecord
from hf_specgen.depth.policy import FixedDepth, Policy, PolicySession


@dataclass(frozen=True)
class Schedule(Policy):
    """A depth by batch size, by context length, or both (then the smaller depth).

    Args:
        by_batch: depth from each number of rows on: `{1: 8, 4: 4, 16: 0}` drafts 8 tokens for 1 to 3 rows, 4 for 4 to
            15, and none from 16 on. Only rows that still generate count.
        by_context: depth from each number of tokens in the longest row on.
    """

    by_batch: Mapping[int, int] = field(default_factory=dict)
    by_context: Mapping[int, int] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        if not self.by_batch and not self.by_context:
            raise ValueError("a schedule needs by_batch or by_context, such as {1: 8, 4: 4, 16: 0}")
        for first, depth in [*self.by_batch.items(), *self.by_context.items()]:
            if first < 0 or depth < 0:
                raise ValueError(f"a schedule maps sizes to depths, none of them negative, got {first}: {depth}")

    def start(self, call: Call) -> PolicySession:
        return _ScheduleSession(self, call)


class _ScheduleSession(PolicySession):
    def __init__(self, schedule: Schedule, call: Call):
        self._schedule, self._call = schedule, call

    def depths(self, limits: Sequence[int]) -> list[int]:
        k, active = self._call.drafting.k, sum(free > 0 for free in limits)
        by_batch = _look_up(self._schedule.by_batch, active, k)
        return [min(by_batch, _look_up(self._schedule.by_context, self._call.context_length, k), k)] * len(limits)


def _look_up(schedule: Mapping[int, int], size: int, otherwise: int) -> int:
    reached = [first for first in schedule if first <= size]
    return schedule[max(reached)] if reached else otherwise


class MovingWindow(Policy):
    """One token deeper while a row's acceptance rate exceeds `target + 0.1`, one less below `target - 0.1`.

    The rate is taken over the tokens that were verified: those after a rejected one do not count.

    Args:
        target: desired acceptance rate.
        window: number of steps with a draft over which the rate is taken.
        start: first depth; the strategy's k if None.
    """

    def __init__(self, target: float = 0.6, window: int = 10, start: int | None = None):
        if not 0 < target < 1 or window < 1:
            raise ValueError(f"target must be between 0 and 1, and window at least 1, got {target} and {window}")
        self.target, self.window, self.first_depth = target, window, start

    def __repr__(self) -> str:
        return f"MovingWindow(target={self.target}, window={self.window}, start={self.first_depth})"

    def start(self, call: Call) -> PolicySession:
        return _WindowSession(self, call)


class _WindowSession(PolicySession):
    def __init__(self, policy: MovingWindow, call: Call):
        self._policy, self._k, batch = policy, call.drafting.k, call.state.batch
        first = self._k if policy.first_depth is None else min(policy.first_depth, self._k)
        self._depths = [first] * batch
        self._recent: list[deque[tuple[int, int]]] = [deque(maxlen=policy.window) for _ in range(batch)]

    def depths(self, limits: Sequence[int]) -> list[int]:
        return list(self._depths)

    def observe(self, step: StepRecord) -> None:
        for row, outcome in enumerate(step.rows):
            if outcome is None or not outcome.drafted:
                continue
            self._recent[row].append((outcome.accepted, min(outcome.depth, outcome.accepted + 1)))
            accepted, verified = (sum(counts) for counts in zip(*self._recent[row], strict=True))
            excess = accepted / verified - self._policy.target
            change = (excess > 0.1) - (excess < -0.1)
            self._depths[row] = max(1, min(self._k, self._depths[row] + change))


@dataclass(frozen=True)
class DisableWhen(Policy):
    """No drafts in some calls, another policy in all others.

    Args:
        temperature_above: calls that sample at a higher temperature draft nothing; None for no limit.
        new_tokens_below: calls that may generate fewer tokens draft nothing.
        otherwise: the policy of all other calls.
    """

    temperature_above: float | None = None
    new_tokens_below: int = 0
    otherwise: Policy = field(default_factory=FixedDepth)

    def start(self, call: Call) -> PolicySession:
        above = self.temperature_above is not None and call.temperature > self.temperature_above
        disabled = above or call.max_new_tokens < self.new_tokens_below
        return (FixedDepth(0) if disabled else self.otherwise).start(call)
