"""The interface of a depth policy: before each step, the maximum draft depth of every row; 0 is a plain step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hf_specgen.depth.latency import LatencyModel
from hf_specgen.statistics import RowStep

if TYPE_CHECKING:
    from hf_specgen.depth.call import Call


@dataclass(slots=True)
class StepRecord:
    """The outcome of one decoding step.

    Args:
        requested: `[rows]` maximum draft depth of each row, after it was cut to the row's room.
        rows: `[rows]` drafted, accepted and emitted tokens; None for a row that took no part.
        tokens_per_row: tokens of each row in the target's forward pass: the pending token, and the nodes of the
            largest draft (with padding, if there was any).
        seconds: wall time by part: "draft", "forward", "verify". No "forward" where drafts were verified together
            with the prompt.
        drafter_passes: tokens, over all rows, in each forward pass of the drafter. None if that is unknown: then one
            pass for each level of the deepest draft is assumed, with one token per row.
    """

    requested: Sequence[int]
    rows: Sequence[RowStep | None]
    tokens_per_row: int
    seconds: Mapping[str, float] = field(default_factory=dict)
    drafter_passes: Sequence[int] | None = None

    @property
    def batch(self) -> int:
        """Number of rows that took part."""
        return sum(row is not None for row in self.rows)

    @property
    def depth(self) -> int:
        """Depth of the deepest draft."""
        return max((row.depth for row in self.rows if row is not None), default=0)

    @property
    def passes(self) -> Sequence[int]:
        """Tokens in each forward pass of the drafter."""
        return [self.batch] * self.depth if self.drafter_passes is None else self.drafter_passes


class PolicySession(ABC):
    """The state of a policy in one `generate` call."""

    latency: LatencyModel | None = None
    """The latency model in use, for strategies that size their own trees; None if the policy has none."""

    @abstractmethod
    def depths(self, room: Sequence[int]) -> list[int]:
        """The maximum depth of each row's next draft; the decoding loop cuts it to the strategy's k and to `room`.

        Args:
            room: `[rows]` draft tokens that each row can still use; 0 for a row that takes no part in this step.
        """

    def observe(self, step: StepRecord) -> None:
        """Learn from the outcome of a step."""

    def expected_speedup(self, depths: Sequence[int]) -> float | None:
        """Expected speed of a step with drafts of these depths, relative to plain decoding; None if not estimated."""
        return None


class Policy(ABC):
    """Chooses draft depths. Subclass it, return a session from `start`, and write the session's `depths`.

    A policy holds settings only: it may be shared by calls and threads. Give it to a strategy,
    `NgramCandidates(k=16, policy=...)`, or to one call, `generate(..., policy=...)`.

    Example:
        >>> class WhileAccepted(Policy):
        ...     '''Drafts 8 tokens while the last step accepted any, and in every tenth step.'''
        ...     def start(self, call):
        ...         return WhileAcceptedSession()
        >>> class WhileAcceptedSession(PolicySession):
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
        """Begin a call."""


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
        return _FixedSession(call.candidates.k if self.k is None else self.k)


Fixed = FixedDepth


class _FixedSession(PolicySession):
    def __init__(self, k: int):
        self._k = k

    def depths(self, room: Sequence[int]) -> list[int]:
        return [self._k] * len(room)
