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

    The pause between tries doubles while they fail, from 4 to 16 steps. Besides, tries are paid for: each plain step
    earns 1.5% of a step, what tries cost more than they bring is taken off, and none is made on credit. So they take
    about that share of the time, whatever one of them costs. One that is accepted is repeated at once.

    Args:
        earned: to begin with, in plain steps; by earlier calls.

    Example:
        >>> probes = Probes()
        >>> [probes.depth([1.0, 1.1, 1.2]) for _ in range(6)]
        [0, 0, 0, 0, 2, 2]
    """

    def __init__(self, earned: float = 0.0) -> None:
        self.earned = earned
        self.renew()

    def renew(self) -> None:
        """Drafting has just ceased to pay: begin with the shortest pause."""
        self._pause, self._since, self._again = SHORTEST, 0, False

    def depth(self, seconds: Sequence[float], price: float = 0.0) -> int:
        """How deep to draft in a step for which plain decoding seems best.

        Args:
            seconds: what a step of each depth costs.
            price: what has to be done before, such as reading the prompt, in plain steps.
        """
        self._since += 1
        self.earned = min(self.earned + SHARE, 2 * max(price, MODEST))
        due = self._since > self._pause and self.earned >= price
        if not (due or self._again):
            return 0
        return 2 if len(seconds) > 2 and seconds[2] <= (1 + MODEST) * seconds[0] else 1

    def observe(self, step: Step, extra: float) -> None:
        """Learn how a step went; one that found nothing to draft, and cost nothing, leaves the try open.

        Args:
            step: that was a try.
            extra: what it cost more than a plain step, in plain steps.
        """
        drafted = [row for row in step.rows if row is not None and row.drafted]
        if not drafted and not extra:
            return
        rows = sum(row is not None for row in step.rows)
        brought = sum(row.accepted for row in drafted) / rows
        self.earned = max(self.earned - extra + brought, -max(MODEST, extra))
        self._again = 2 * sum(row.accepted > 0 for row in drafted) > len(drafted)
        self._pause = SHORTEST if self._again else min(LONGEST, 2 * self._pause)
        self._since = 0
