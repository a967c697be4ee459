"""Simple policies, for those who know when speculation pays."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping

from hf_specgen.adaptive.policy import Fixed, Policy, State, Step


class Schedule(Policy):
    """A depth by batch size, by context length, or both (then the smaller one).

    Args:
        by_batch: from how many rows on which depth holds: `{1: 8, 4: 4, 16: 2, 32: 0}` drafts 8 tokens for 1 to 3 rows,
            4 for 4 to 15, and nothing from 32 on. Only rows that still generate count.
        by_context: the same by the tokens in the longest row.

    Raises:
        ValueError: if both are empty, or a number is negative.

    Example:
        >>> Schedule({1: 8, 4: 4, 16: 2, 32: 0})
        Schedule(by_batch={1: 8, 4: 4, 16: 2, 32: 0}, by_context={})
    """

    def __init__(self, by_batch: Mapping[int, int] | None = None, *, by_context: Mapping[int, int] | None = None):
        self.by_batch, self.by_context = dict(by_batch or {}), dict(by_context or {})
        if not self.by_batch and not self.by_context:
            raise ValueError("a schedule needs by_batch or by_context, such as {1: 8, 4: 4, 16: 0}")
        for first, depth in [*self.by_batch.items(), *self.by_context.items()]:
            if first < 0 or depth < 0:
                raise ValueError(f"a schedule maps sizes to depths, none of them negative, got {first}: {depth}")

    def depths(self, state: State) -> list[int]:
        depth = min(
            _look_up(self.by_batch, state.batch, state.k), _look_up(self.by_context, state.context, state.k), state.k
        )
        return [depth] * len(state.room)

    def __repr__(self) -> str:
        return f"Schedule(by_batch={self.by_batch}, by_context={self.by_context})"


class MovingWindow(Policy):
    """One token deeper while more than `target + 0.1` of the last guesses were accepted, one less below `target - 0.1`.

    Counts, for each row, what the target looked at: guesses behind a rejected one were not judged.

    Args:
        target: wanted share of accepted guesses.
        window: how many steps are looked back on.
        start: the first depth; the strategy's own if left out.

    Raises:
        ValueError: if the target is not between 0 and 1 or the window not positive.

    Example:
        >>> MovingWindow(target=0.7)
        MovingWindow(target=0.7, window=10, start=None)
    """

    margin = 0.1

    def __init__(self, target: float = 0.6, window: int = 10, start: int | None = None):
        if not 0 < target < 1:
            raise ValueError(f"target must be between 0 and 1, got {target}")
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        self.target, self.window, self.start = target, window, start

    def begin(self, state: State) -> None:
        self._depths = [state.k if self.start is None else min(self.start, state.k)] * len(state.room)
        self._steps = [0] * len(state.room)

    def depths(self, state: State) -> list[int]:
        for row, steps in enumerate(state.statistics.rows):
            if len(steps) > self._steps[row]:
                self._steps[row] = len(steps)
                self._depths[row] = self._next(self._depths[row], row, state)
        return list(self._depths)

    def _next(self, depth: int, row: int, state: State) -> int:
        steps = [step for step in state.statistics.rows[row][-self.window :] if step.drafted]
        judged = sum(min(step.depth, step.accepted + 1) for step in steps)
        if not judged:
            return depth
        share = sum(step.accepted for step in steps) / judged
        change = (share > self.target + self.margin) - (share < self.target - self.margin)
        return max(1, min(state.k, depth + change))

    def __repr__(self) -> str:
        return f"MovingWindow(target={self.target}, window={self.window}, start={self.start})"


class _Off(Policy):
    """No drafts at all in some calls, another policy in the rest."""

    def __init__(self, otherwise: Policy | None):
        self.otherwise = otherwise or Fixed()

    @abstractmethod
    def is_off(self, state: State) -> bool:
        """Whether this call drafts nothing."""

    def begin(self, state: State) -> None:
        self._chosen = Fixed(0) if self.is_off(state) else copy.copy(self.otherwise)
        self._chosen.begin(state)

    def depths(self, state: State) -> list[int]:
        return self._chosen.depths(state)

    def width(self, state: State, needed: int) -> int:
        return self._chosen.width(state, needed)

    def observe(self, state: State, step: Step) -> None:
        self._chosen.observe(state, step)


class OffAbove(_Off):
    """No drafts in calls that sample above a temperature.

    Args:
        temperature: the highest at which is drafted.
        otherwise: the policy of the other calls; a fixed depth if left out.

    Example:
        >>> OffAbove(1.0)
        OffAbove(1.0, otherwise=Fixed())
    """

    def __init__(self, temperature: float, otherwise: Policy | None = None):
        super().__init__(otherwise)
        self.temperature = temperature

    def is_off(self, state: State) -> bool:
        return state.temperature > self.temperature

    def __repr__(self) -> str:
        return f"OffAbove({self.temperature}, otherwise={self.otherwise!r})"


class OffForShort(_Off):
    """No drafts in calls that may generate few tokens: a strategy has to find its pace first.

    Args:
        tokens: calls of fewer new tokens than this draft nothing.
        otherwise: the policy of the other calls; a fixed depth if left out.

    Example:
        >>> OffForShort(16)
        OffForShort(16, otherwise=Fixed())
    """

    def __init__(self, tokens: int, otherwise: Policy | None = None):
        super().__init__(otherwise)
        self.tokens = tokens

    def is_off(self, state: State) -> bool:
        return state.max_new_tokens < self.tokens

    def __repr__(self) -> str:
        return f"OffForShort({self.tokens}, otherwise={self.otherwise!r})"


def _look_up(schedule: Mapping[int, int], size: int, otherwise: int) -> int:
    reached = [first for first in schedule if first <= size]
    return schedule[max(reached)] if reached else otherwise
