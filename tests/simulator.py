"""A target and a draft of which everything is known: acceptance by position and the cost of every step.

Runs a policy against them and says how fast it was, and how fast every fixed depth would have been.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from hf_specgen.adaptive import Fixed, Policy, State
from hf_specgen.adaptive.pace import Pace
from hf_specgen.evaluation.cost import CostCurve
from hf_specgen.statistics import RowStep, Statistics
from hf_specgen.tree import DraftTree

PROMPT = 100
Alpha = Callable[[int, int, int], float]
"""(step, row, position from 0) -> chance that the position is accepted, given those before it."""


class Simulation:
    """`rows` texts that are written for `steps` steps.

    Args:
        alpha: chance of acceptance.
        curve: cost of the target; `draft_token` seconds for each position that is drafted.
        lengths: (step, row) -> how long a draft the strategy has at most, as with n-grams.
        noise: each step's time is multiplied by 1 to 1 + noise.
    """

    def __init__(
        self,
        alpha: Alpha,
        curve: CostCurve,
        *,
        k: int = 16,
        rows: int = 1,
        draft_token: float = 0.0,
        lengths: Callable[[int, int], int] | None = None,
        noise: float = 0.0,
        seed: int = 0,
        negligible_draft_cost: bool = True,
    ):
        self.alpha, self.curve, self.k, self.rows, self.draft_token = alpha, curve, k, rows, draft_token
        self.lengths, self.noise, self.seed, self.negligible_draft_cost = lengths, noise, seed, negligible_draft_cost
        self.reading = 0.0
        """Seconds in which a draft reads a token of the prompt or of plain steps."""
        self.temperature = 0.0
        self.depths: list[list[int]] = []
        self.model: Any = None

    def run(self, policy: Policy, steps: int) -> float:
        """Tokens per second over all steps; the depths that were asked for are in `depths` afterwards."""
        chance, jitter = random.Random(self.seed), random.Random(self.seed + 1)
        texts: list[list[int]] = [[0] for _ in range(self.rows)]
        statistics = Statistics([[] for _ in range(self.rows)])
        state = State(
            self.k,
            [0] * self.rows,
            [PROMPT] * self.rows,
            [1] * self.rows,
            statistics,
            temperature=self.temperature,
            model=self.model,
            negligible_draft_cost=self.negligible_draft_cost,
        )
        pace = Pace(policy, state, texts)
        seconds = dict.fromkeys(("draft", "forward", "verify"), 0.0)
        tokens, unread = 0, PROMPT
        self.depths = []
        for step in range(steps):
            asked = pace.budget([10**6] * self.rows)
            self.depths.append(asked)
            drafted = [
                min(depth, self.lengths(step, row)) if self.lengths else depth for row, depth in enumerate(asked)
            ]
            accepted = [self._accepted(chance, step, row, depth) for row, depth in enumerate(drafted)]
            seconds["draft"] += self.draft_token * max(drafted) + self.reading * unread * any(drafted)
            unread = 0 if any(drafted) else unread + 1
            seconds["forward"] += self.curve(1 + max(drafted)) * (1 + self.noise * jitter.random())
            rows: list[RowStep | None] = [
                RowStep(depth, depth, n, n + 1) for depth, n in zip(drafted, accepted, strict=True)
            ]
            for row, made in enumerate(rows):
                assert made is not None
                statistics.rows[row].append(made)
                texts[row] += [0] * made.emitted
                tokens += made.emitted
            pace.observe(DraftTree.chains([[0] * depth for depth in drafted]), rows, seconds)
        return tokens / sum(seconds.values())

    def _accepted(self, chance: random.Random, step: int, row: int, depth: int) -> int:
        for position in range(self.k):
            # Drawn for every position, so that all policies meet the same luck.
            if position >= depth or chance.random() >= self.alpha(step, row, position):
                return position
        return depth

    def fixed(self, steps: int, depths: Sequence[int] | None = None) -> dict[int, float]:
        """Tokens per second of fixed depths."""
        return {k: self.run(Fixed(k), steps) for k in depths or range(self.k + 1)}
