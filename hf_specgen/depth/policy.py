"""The interface of a depth policy: before each step, the maximum draft depth of every row; 0 is a plain step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from hf_specgen.call import Call
from hf_specgen.counters import StepRecord
from hf_specgen.depth.latency import LatencyModel
from hf_specgen.targets.target import Target


class PolicySession(ABC):
    """The state of a policy in one `generate` call."""

    latency: LatencyModel | None = None
    """The latency model in use, for strategies that size their own trees; None if the policy has none."""
    remembers: bool = False
    """Whether counts of earlier calls may be used; if not, equal calls make the same drafts."""

    def prefilled(self, target: Target) -> None:
        """Called once, after the prefill: the place to measure the target's latency (`hf_specgen.depth.calibrate`)."""

    @abstractmethod
    def depths(self, limits: Sequence[int]) -> list[int]:
        """The maximum depth of each row's next draft; the decoding loop cuts it to the strategy's k and to `limits`.

        Args:
            limits: `[rows]` draft tokens that each row can still use; 0 for a row that takes no part in this step.
        """

    def affords_prefill(self) -> bool:
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


@dataclass(frozen=True)
class FixedDepth(Policy):
    """The same maximum depth in every step.

    Args:
        k: maximum depth; the strategy's own if None. 0 turns drafting off.
    """

    k: int | None = None

    def __post_init__(self) -> None:
        if self.k is not None and self.k < 0:
            raise ValueError(f"k must be at least 0, got {self.k}")

    def start(self, call: Call) -> PolicySession:
        return _FixedSession(call.drafting.k if self.k is None else self.k)


class _FixedSession(PolicySession):
    def __init__(self, k: int):
        self._k = k

    def depths(self, limits: Sequence[int]) -> list[int]:
        return [self._k] * len(limits)
