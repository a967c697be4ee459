"""Trying a draft now and then where none seems to pay, at next to no cost."""

from __future__ import annotations

from hf_specgen.adaptive.policy import Step

SHORTEST, LONGEST = 4, 24
SHARE = 0.0125
MOST_DEBT = 0.3
DEPTH = 2


class Probes:
    """Says when to try.

    The pause between tries doubles while they fail, from 4 to 24 steps. Besides, tries are paid for: what they cost
    more than they bring is a debt, counted in plain steps, and each plain step pays off 1.25% of a step. So tries take
    about that share of the time, whatever one of them costs. One that is accepted is repeated at once.

    Example:
        >>> probes = Probes()
        >>> [probes.depth() for _ in range(6)]
        [0, 0, 0, 0, 2, 2]
    """

    def __init__(self) -> None:
        self._pause, self._since, self._debt, self._again = SHORTEST, 0, 0.0, False

    def depth(self) -> int:
        """How deep to draft in a step for which plain decoding seems best."""
        self._since += 1
        self._debt -= SHARE
        due = self._since > self._pause and self._debt <= 0
        return DEPTH if due or self._again else 0

    def observe(self, step: Step, extra: float) -> None:
        """Learn how a step went; one that found nothing to draft leaves the try open.

        Args:
            step: any step of the call.
            extra: what its width costs more than a plain step, in plain steps.
        """
        drafted = [row for row in step.rows if row is not None and row.drafted]
        if not drafted:
            return
        rows = sum(row is not None for row in step.rows)
        brought = sum(row.accepted for row in drafted) / rows
        self._debt = min(MOST_DEBT, max(0.0, self._debt) + extra - brought)
        self._again = 2 * sum(row.accepted > 0 for row in drafted) > len(drafted)
        self._pause = SHORTEST if self._again else min(LONGEST, 2 * self._pause)
        self._since = 0
