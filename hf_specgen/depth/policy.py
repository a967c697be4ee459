"""The interface of a depth policy, the maximum draft depth of every row before each step; and policies by rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hf_specgen.call import Call, as_count, checked_count
from hf_specgen.call_statistics import StepRecord
from hf_specgen.depth.latency import LatencyModel, StepLatency
from hf_specgen.targets.target import Target

OR_OF_STRATEGY = ", or None for the strategy's k"


class PolicySession(ABC):
    """The state of a policy in one `generate` call."""

    latency: LatencyModel | None = None
    """The latencies of passes, which rows of other calls may share; None if the policy has none."""
    remembers: bool = False
    """Whether counts of earlier calls may be used; if not, equal calls make the same drafts."""

    def step_latency(self, rows: int, context: int) -> StepLatency | None:
        """The latencies of a step of `rows` rows of the call, for strategies that size their own trees.

        The longest row has `context` tokens. For passes shared with other calls it may be this call's part alone.
        """
        return None if self.latency is None else self.latency.at(rows, context)

    def prefilled(self, target: Target) -> None:
        """Called once, after the prefill: the place to measure the target's latency (`hf_specgen.depth.calibrate`)."""

    @abstractmethod
    def depths(self, limits: Sequence[int]) -> list[int]:
        """The maximum depth of each row's next draft, 0 for a plain step; the caller cuts it to k and to `limits`.

        Args:
            limits: `[rows]` draft tokens that each row can still use; 0 for a row that takes no part in this step.
        """

    def prefill_is_short(self) -> bool:
        """Whether the drafter's prefill is short beside the call; else only drafts without a pass can be faster."""
        return True

    def observe(self, step: StepRecord) -> None:
        """Learn from the outcome of a step."""


class Policy(ABC):
    """Chooses draft depths. Subclass it, and return from `start` a session with a `depths` method.

    A policy holds settings only, so calls and threads can share it. Give it to a strategy,
    `NgramCandidates(k=16, policy=...)`, or to one call, `generate(..., policy=...)`.

    Example:
        >>> class EveryOtherStep(Policy):
        ...     def start(self, call):
        ...         return EveryOtherStepSession()
        >>> class EveryOtherStepSession(PolicySession):
        ...     step = 0
        ...     def depths(self, limits):
        ...         return [8 * (self.step % 2)] * len(limits)
        ...     def observe(self, step):
        ...         self.step += 1
        >>> EveryOtherStep().start(call=None).depths([20, 20])
        [0, 0]
    """

    @abstractmethod
    def start(self, call: Call) -> PolicySession:
        """Return the session of a call."""

    def measures_latency(self) -> bool:
        """Whether sessions measure T(q); then `generate_batch` measures it for them, before it begins."""
        return False


class _SameDepth(PolicySession):
    """The same depth for all rows: a function of the rows that take part."""

    def __init__(self, depth: Callable[[int], int]):
        super().__init__()
        self._depth = depth

    def depths(self, limits: Sequence[int]) -> list[int]:
        return [self._depth(sum(limit > 0 for limit in limits))] * len(limits)


@dataclass(frozen=True)
class FixedDepth(Policy):
    """The same maximum depth in every step.

    Args:
        k: maximum depth; the strategy's own if None. 0 turns drafting off.
    """

    k: int | None = None

    def __post_init__(self) -> None:
        if self.k is not None:
            object.__setattr__(self, "k", checked_count("k", self.k, 0, "tokens", OR_OF_STRATEGY))

    def start(self, call: Call) -> PolicySession:
        depth = call.drafting.k if self.k is None else self.k
        return _SameDepth(lambda rows: depth)


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
        for name, schedule in (("by_batch", self.by_batch), ("by_context", self.by_context)):
            items = schedule.items() if isinstance(schedule, Mapping) else [(None, None)]
            counts = {as_count(size, 0): as_count(depth, 0) for size, depth in items}
            if None in counts or None in counts.values():
                raise ValueError(f"a schedule maps sizes to depths, such as {{1: 8, 4: 4, 16: 0}}, got {schedule!r}")
            object.__setattr__(self, name, counts)
        if not self.by_batch and not self.by_context:
            raise ValueError("a schedule needs by_batch or by_context, such as {1: 8, 4: 4, 16: 0}")

    def start(self, call: Call) -> PolicySession:
        def look_up(schedule: Mapping[int, int], size: int) -> int:
            reached = [first for first in schedule if first <= size]
            return schedule[max(reached)] if reached else call.drafting.k

        return _SameDepth(
            lambda rows: min(
                look_up(self.by_batch, rows + call.state.other_rows), look_up(self.by_context, call.context_length)
            )
        )


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

    def __post_init__(self) -> None:
        if self.temperature_above is None and self.new_tokens_below <= 0:
            raise ValueError("DisableWhen needs temperature_above or new_tokens_below, such as temperature_above=1.0")

    def start(self, call: Call) -> PolicySession:
        above = self.temperature_above is not None and call.temperature > self.temperature_above
        disabled = above or call.max_new_tokens < self.new_tokens_below
        return (FixedDepth(0) if disabled else self.otherwise).start(call)

    def measures_latency(self) -> bool:
        return self.otherwise.measures_latency()


class MovingWindow(Policy):
    """One token deeper while a row's acceptance rate exceeds `target + 0.1`, one less below `target - 0.1`.

    The rate is taken over the tokens that were verified: those after a rejected one do not count.

    Args:
        target: desired acceptance rate.
        window: number of steps with a draft over which the rate is taken.
        start: first depth, at least 1; the strategy's k if None.
    """

    def __init__(self, target: float = 0.6, window: int = 10, start: int | None = None):
        super().__init__()
        if not (isinstance(target, float) and 0 < target < 1):
            raise ValueError(f"target must be between 0 and 1, got {target!r}")
        self.target = target
        self.window = checked_count("window", window, 1, "steps")
        self.first_depth = None if start is None else checked_count("start", start, 1, "tokens", OR_OF_STRATEGY)

    def __repr__(self) -> str:
        return f"MovingWindow(target={self.target}, window={self.window}, start={self.first_depth})"

    def start(self, call: Call) -> PolicySession:
        return _WindowSession(self, call)


class _WindowSession(PolicySession):
    """The state of `MovingWindow` in one call: the depth and the recent outcomes of each row."""

    def __init__(self, policy: MovingWindow, call: Call):
        super().__init__()
        self._target = policy.target
        self._k = call.drafting.k
        batch = call.state.batch
        self._depths = [self._k if policy.first_depth is None else min(policy.first_depth, self._k)] * batch
        self._recent: list[deque[tuple[int, int]]] = [deque(maxlen=policy.window) for _ in range(batch)]

    def depths(self, limits: Sequence[int]) -> list[int]:
        return list(self._depths)

    def observe(self, step: StepRecord) -> None:
        for row, outcome in enumerate(step.rows):
            if outcome is not None and outcome.drafted:
                self._recent[row].append((outcome.accepted, min(outcome.depth, outcome.accepted + 1)))
                accepted, verified = map(sum, zip(*self._recent[row], strict=True))
                excess = accepted / verified - self._target
                change = (excess > 0.1) - (excess < -0.1)
                self._depths[row] = max(1, min(self._k, self._depths[row] + change))
