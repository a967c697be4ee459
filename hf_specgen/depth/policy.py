"""The interface of a depth policy: before each step, the maximum draft depth of every row; 0 is a plain step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hf_specgen.call import Call
from hf_specgen.counters import StepRecord
from hf_specgen.depth.latency import LatencyModel


class DraftingSpeed(NamedTuple):
    """Sums over the steps for which drafts were requested.

    Args:
        steps: how many.
        tokens: that they emitted per row.
        cost: their time by the latency model, in plain steps.
    """

    steps: int = 0
    tokens: float = 0.0
    cost: float = 0.0

    def plus(self, other: DraftingSpeed) -> DraftingSpeed:
        """The sums over both."""
        return DraftingSpeed(self.steps + other.steps, self.tokens + other.tokens, self.cost + other.cost)


class PolicySession(ABC):
    """The state of a policy in one `generate` call."""

    latency: LatencyModel | None = None
    """The latency model in use, for strategies that size their own trees; None if the policy has none."""
    drafting_speed: DraftingSpeed | None = None
    """What drafting has gained and cost in this call, since latencies are final; None if the policy knows none."""
    remembers: bool = False
    """Whether counts of earlier calls may be used; if not, equal calls make the same drafts."""

    @abstractmethod
    def depths(self, room: Sequence[int]) -> list[int]:
        """The maximum depth of each row's next draft; the decoding loop cuts it to the strategy's k and to `room`.

        Args:
            room: `[rows]` draft tokens that each row can still use; 0 for a row that takes no part in this step.
        """

    def observe(self, step: StepRecord) -> None:
        """Learn from the outcome of a step."""


class Policy(ABC):
    """Chooses draft depths. Subclass it, and return from `start` a session with a `depths` method.

    A policy holds settings only, so calls and threads can share it. Give it to a strategy,
    `NgramCandidates(k=16, policy=...)`, or to one call, `generate(..., policy=...)`.

    Example:
        >>> class WhileAccepted(Policy):
        ...     def start(self, call):
        ...         return WhileAcceptedSession()
        >>> class WhileAcceptedSession(PolicySession):
        ...     '''Drafts 8 tokens while the last step accepted any, and in every tenth step.'''
        ...     step, accepted = 0, True
        ...     def depths(self, room):
        ...         return [8 if self.accepted or self.step % 10 == 0 else 0] * len(room)
        ...     def observe(self, step):
        ...         self.step += 1
        ...         self.accepted = any(row.accepted for row in step.rows if row is not None)
        >>> WhileAccepted().start(call=None).depths([20, 20])
        [8, 8]
    """

    @abstractmethod
    def start(self, call: Call) -> PolicySession:
        """Return the session of a call."""


@dataclass(frozen=True)
class FixedDepth(Policy):
    """The same maximum depth in every step.

    Args:
        k: maximum depth; the strategy's own if None. 0 turns drafting off.

    Raises:
        ValueError: if k is negative.

    Example:
        >>> FixedDepth(3)
        FixedDepth(k=3)
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

    def depths(self, room: Sequence[int]) -> list[int]:
        return [self._k] * len(room)
