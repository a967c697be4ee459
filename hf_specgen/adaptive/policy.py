"""What a policy is: it says before each step how many tokens each row may draft, 0 for a plain decoding step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_specgen.statistics import RowStep, Statistics


@dataclass
class State:
    """What is known before a step.

    Args:
        k: the strategy's own greatest depth.
        room: how many draft tokens each row can still use; 0 for a row that takes no part in this step.
        prompts, generated: tokens of each row's prompt, and generated so far.
        statistics: every step so far, by row.
        temperature: of the call; 0 if it does not sample.
        max_new_tokens: how many tokens the call may generate, as far as that is known.
        model: the target, None where there is none (in simulations).
        strategy: names the strategy and its settings; costs are remembered under it.
        cheap: whether a draft costs next to nothing, as with n-grams.
        adaptive_tree: whether the strategy makes each draft as large as pays, so that only whether to draft is decided.
    """

    k: int
    room: list[int]
    prompts: list[int]
    generated: list[int]
    statistics: Statistics
    temperature: float = 0.0
    max_new_tokens: float = float("inf")
    model: PreTrainedModel | None = None
    strategy: str = ""
    negligible_draft_cost: bool = True
    adaptive_tree: bool = False

    @property
    def batch(self) -> int:
        """How many rows take part."""
        return sum(room > 0 for room in self.room)

    @property
    def context(self) -> int:
        """Tokens in the longest row."""
        return max(prompt + new for prompt, new in zip(self.prompts, self.generated, strict=True))


@dataclass(slots=True)
class Step:
    """What came of a step.

    Args:
        asked: how many tokens each row was allowed to draft.
        rows: drafted, accepted and emitted tokens of each row; None for a row that took no part.
        width: tokens of each row in the target's forward pass: one, the draft nodes of the largest row, and padding
            if that makes it faster.
        seconds: wall time of this step in `draft`, `forward` and `verify`; without `forward` where a draft was
            verified together with the prompt, which takes as long as the prompt is.
    """

    asked: Sequence[int]
    rows: Sequence[RowStep | None]
    width: int
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        """The depth of the deepest draft."""
        return max((row.depth for row in self.rows if row is not None), default=0)

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())


class Policy(ABC):
    """Decides how deep to draft. Subclass it and write `depths`, and `begin` and `observe` if you need them.

    Give it to a strategy, `NgramCandidates(k=16, policy=…)`, or to one call, `generate(…, policy=…)`. Every call works
    on its own shallow copy: what `begin` sets up belongs to that call.

    Example:
        >>> class OnlyCode(Policy):
        ...     '''Drafts while the last steps brought something; tries again every 20 steps.'''
        ...     def depths(self, state):
        ...         def depth(row):
        ...             steps = state.statistics.rows[row]
        ...             pays = any(step.accepted for step in steps[-5:])
        ...             return state.k if pays or len(steps) % 20 < 5 else 0
        ...         return [depth(row) for row in range(len(state.room))]
    """

    def begin(self, state: State) -> None:
        """A call starts; `state` is that of its first step."""

    @abstractmethod
    def depths(self, state: State) -> list[int]:
        """The greatest depth of each row's next draft. More than `state.k` or `state.room` is cut down to it."""

    def seconds_by_nodes(self) -> NDArray[np.floating[Any]] | None:
        """What a step takes by the nodes of its draft, from 0 on, for strategies that size drafts themselves."""
        return None

    def width(self, state: State, needed: int) -> int:
        """How many tokens of each row the target should read where `needed` are there: more if that is faster here."""
        return needed

    def observe(self, state: State, step: Step) -> None:
        """Learn what came of a step; `state` is the one that `depths` saw, but for its statistics."""


class Fixed(Policy):
    """Always the same depth: the strategy's own, or `k`.

    Raises:
        ValueError: if k is negative.

    Example:
        >>> Fixed(3)
        Fixed(3)
    """

    def __init__(self, k: int | None = None):
        if k is not None and k < 0:
            raise ValueError(f"k must be at least 0, got {k}")
        self.k = k

    def depths(self, state: State) -> list[int]:
        return [state.k if self.k is None else self.k] * len(state.room)

    def __repr__(self) -> str:
        return "Fixed()" if self.k is None else f"Fixed({self.k})"
