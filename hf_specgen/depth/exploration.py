"""Trying a draft now and then where drafting does not seem to pay, at a bounded cost."""

from __future__ import annotations

from hf_specgen.depth.cost import Array
from hf_specgen.depth.policy import StepRecord

EXPLORATION_SHARE = 0.015
"""Share of time that may be lost to exploration: a tenth of the margin at which users notice, 1 draft in 70 steps."""
SHORTEST_PAUSE, LONGEST_PAUSE = 4, 16
"""Steps between trials: doubled while they fail, so that a text that turns predictable is noticed within 16 steps."""
CHEAP_TRIAL = 0.25
"""A trial that costs at most this, in plain steps, drafts two tokens, which tell more than one."""


class ExplorationBudget:
    """Says when to try a draft, by counts and by the latency model.

    Each plain step earns a share of its time. A trial needs as much in hand as reading the prompt costs; what it costs
    beyond the tokens that it gains is taken off, and is earned back before the next one. A trial that is accepted is
    repeated at once.

    Args:
        balance: to begin with, in plain steps: what earlier calls left.

    Example:
        >>> import numpy as np
        >>> budget = ExplorationBudget()
        >>> [budget.depth(np.array([1.0, 1.1, 1.2])) for _ in range(6)]
        [0, 0, 0, 0, 2, 2]
    """

    def __init__(self, balance: float = 0.0):
        self.balance = balance
        self.restart()

    def restart(self) -> None:
        """Drafting has just ceased to pay: begin with the shortest pause."""
        self._pause, self._since, self._repeat = SHORTEST_PAUSE, 0, False

    def depth(self, cost: Array, prefill: float = 0.0) -> int:
        """Depth of a step for which plain decoding seems best; 0 unless a trial is due.

        Args:
            cost: `[k + 1]` time of a step by the depth of its draft, in plain steps.
            prefill: time in which the drafter reads what it has not read, in plain steps.
        """
        self._since += 1
        self.balance = min(self.balance + EXPLORATION_SHARE, 2 * max(prefill, CHEAP_TRIAL))
        if not self._repeat and (self._since <= self._pause or self.balance < prefill):
            return 0
        return 2 if len(cost) > 2 and cost[2] <= 1 + CHEAP_TRIAL else 1

    def observe(self, step: StepRecord, cost: float) -> None:
        """Learn from a trial.

        Args:
            cost: what it cost more than a plain step, in plain steps. A trial that was free and found nothing to draft
                leaves the next step free for another.
        """
        drafts = [row for row in step.rows if row is not None and row.drafted]
        if not drafts and cost <= 0:
            return
        gained = sum(row.accepted for row in drafts) / max(1, step.batch)
        self.balance = max(self.balance - cost + gained, -max(CHEAP_TRIAL, cost))
        self._repeat = 2 * sum(row.accepted > 0 for row in drafts) > len(drafts)
        self._pause = SHORTEST_PAUSE if self._repeat else min(2 * self._pause, LONGEST_PAUSE)
        self._since = 0
