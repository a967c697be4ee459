"""Trying a draft now and then where none seems to pay, at next to no cost."""

from __future__ import annotations

from collections.abc import Sequence

from hf_specgen.adaptive.policy import Step

SHORTEST, LONGEST = 4, 16
SHARE = 0.015
MODEST = 0.25
"""A try that costs no more than this, in plain steps, is made two tokens deep and is never put off for long."""


class Probes:
    """Says when to try.

    The pause between tries doubles while they fail, from 4 to 16 steps. Besides, tries are paid for: what they cost
    more than they bring is a debt, counted in plain steps, and each plain step pays off 1.5% of a step. So tries take
    about that share of the time, whatever one of them costs. One that is accepted is repeated at once.

    Args:
        debt: to begin with, such as what it takes to read a prompt.

    Example:
        >>> probes = Probes()
        >>> [probes.depth([1.0, 1.1, 1.2]) for _ in range(6)]
        [0, 0, 0, 0, 2, 2]
    """

    def __init__(self, debt: float = 0.0) -> None:
        self._pause, self._since, self._debt, self._again = SHORTEST, 0, debt, False

    def depth(self, seconds: Sequence[float]) -> int:
        """How deep to draft in a step for which plain decoding seems best, by what a step of each depth costs."""
        self._since += 1
        self._debt -= SHARE
        due = self._since > self._pause and self._debt <= 0
        if not (due or self._again):
            return 0
        return 2 if len(seconds) > 2 and seconds[2] <= (1 + MODEST) * seconds[0] else 1

    def observe(self, step: Step, extra: float) -> None:
        """Learn how a step went; one that found nothing to draft, and cost nothing, leaves the try open.

        Args:
            step: that was a try.
            extra: what its width costs more than a plain step, in plain steps.
        """
        drafted = [row for row in step.rows if row is not None and row.drafted]
        if not drafted and not extra:
            return
        rows = sum(row is not None for row in step.rows)
        brought = sum(row.accepted for row in drafted) / rows
        self._debt = min(max(MODEST, extra), max(0.0, self._debt) + extra - brought)
        self._again = 2 * sum(row.accepted > 0 for row in drafted) > len(drafted)
        self._pause = SHORTEST if self._again else min(LONGEST, 2 * self._pause)
        self._since = 0
