"""A simulated call in which acceptance and latencies are known, for tests of depth policies.

Runs a policy and returns tokens per second; fixed depths run the same way, on the same random numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_specgen.counters import RowStep
from hf_specgen.depth import CostCurve, LatencyModel, Policy, StepRecord

PROMPT = 100
Acceptance = Callable[[int, int, int], float]
"""(step, row, position from 0) -> probability that the position is accepted, given those before it."""


class Target:
    """Stands in for the target model: latencies and acceptance are remembered by this object."""


@dataclass
class Candidates:
    """Settings of a simulated strategy."""

    k: int = 16
    negligible_draft_cost: bool = True
    adaptive_tree: bool = False
    kind: str = "draft_model"

    def profile_key(self) -> tuple[Any, ...]:
        return self.kind, self.k


@dataclass
class Text:
    """The tokens of each row, in place of a `GenerationState`."""

    prompts: list[list[int]]
    generated: list[list[int]]

    @property
    def batch(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True)
class Call:
    """What a policy reads of a call."""

    state: Text
    candidates: Candidates
    model: Any = None
    temperature: float = 0.0
    max_new_tokens: float = float("inf")
    config: Any = None
    statistics: Any = None
    compiled: bool = False
    packed: bool = False


def make_call(rows: int = 1, prompt: int = PROMPT, **settings: Any) -> Call:
    """A call whose rows have prompts of this length and one generated token."""
    text = Text([[0] * prompt for _ in range(rows)], [[0] for _ in range(rows)])
    return Call(text, settings.pop("candidates", None) or Candidates(), **settings)


@dataclass
class Simulation:
    """`rows` texts that are generated for a number of steps.

    Args:
        acceptance: of each position.
        curve: latency of the target; `draft_token` seconds for each level of a draft.
        lengths: (step, row) -> maximum length of the strategy's draft, as with n-grams; None for no limit.
        noise: each target pass takes 1 to 1 + noise times as long.
        slowdown: (step) -> factor on all times.
        prefill: seconds in which the drafter reads a token of the prompt or of plain steps.
        seed: of the random numbers.
        model, temperature: of the call.
    """

    acceptance: Acceptance
    curve: CostCurve
    candidates: Candidates = field(default_factory=Candidates)
    rows: int = 1
    draft_token: float = 0.0
    lengths: Callable[[int, int], int] | None = None
    noise: float = 0.0
    slowdown: Callable[[int], float] = lambda step: 1.0
    prefill: float = 0.0
    seed: int = 0
    model: Any = None
    temperature: float = 0.0
    requested: list[list[int]] = field(default_factory=list)
    """Depths of the last run, by step."""

    @property
    def latency(self) -> LatencyModel:
        """The true latencies, but for the prefill."""
        return LatencyModel.from_curves(self.curve, draft_token=self.draft_token)

    def run(self, policy: Policy, steps: int) -> float:
        """Tokens per second over all steps."""
        chance, jitter = random.Random(self.seed), random.Random(self.seed + 1)
        call = make_call(self.rows, candidates=self.candidates, model=self.model, temperature=self.temperature)
        session = policy.start(call)
        tokens, total, unread = 0, 0.0, PROMPT
        forward_seconds = self._forward_seconds()
        self.requested = []
        for step in range(steps):
            depths = [min(depth, self.candidates.k) for depth in session.depths([10**6] * self.rows)]
            self.requested.append(depths)
            drafted = [
                min(depth, self.lengths(step, row) if self.lengths else depth) for row, depth in enumerate(depths)
            ]
            accepted = [min(depth, self._acceptable(chance, step, row)) for row, depth in enumerate(drafted)]
            deepest = max(drafted)
            draft = self.draft_token * deepest + self.prefill * unread * any(drafted)
            unread = 0 if any(drafted) else unread + 1
            forward = forward_seconds[deepest] * (1 + self.noise * jitter.random())
            seconds = {"draft": draft * self.slowdown(step), "forward": forward * self.slowdown(step), "verify": 0.0}
            rows = [RowStep(depth, depth, n, n + 1) for depth, n in zip(drafted, accepted, strict=True)]
            for row, outcome in enumerate(rows):
                call.state.generated[row].extend([0] * outcome.emitted)
                tokens += outcome.emitted
            total += sum(seconds.values())
            session.observe(StepRecord(depths, rows, 1 + deepest, seconds))
        return tokens / total

    def fixed(self, steps: int, depths: Sequence[int] | None = None) -> dict[int, float]:
        """Tokens per second of fixed depths: what `run` returns for `FixedDepth(k)`, from one draw of all numbers.

        Only where neither a prefill nor a limit of lengths makes a step depend on those before it.
        """
        assert not self.prefill and self.lengths is None
        chance, jitter = random.Random(self.seed), random.Random(self.seed + 1)
        acceptable = [[self._acceptable(chance, step, row) for row in range(self.rows)] for step in range(steps)]
        slower = [self.slowdown(step) for step in range(steps)]
        forward = sum((1 + self.noise * jitter.random()) * factor for factor in slower)
        forward_seconds, rates = self._forward_seconds(), {}
        for k in depths or range(self.candidates.k + 1):
            tokens = sum(1 + min(k, found) for step in acceptable for found in step)
            rates[k] = tokens / (forward_seconds[k] * forward + self.draft_token * k * sum(slower))
        return rates

    def _forward_seconds(self) -> list[float]:
        """Seconds of a target pass, by the depth of the deepest draft."""
        return [float(self.curve.by_tokens(self.rows * (1 + depth))) for depth in range(self.candidates.k + 1)]

    def _acceptable(self, chance: random.Random, step: int, row: int) -> int:
        """How many tokens of the deepest draft would be accepted."""
        # One draw for every position, so that all policies meet the same random numbers until they differ.
        draws = [chance.random() for _ in range(self.candidates.k)]
        positions = range(self.candidates.k)
        return next((n for n in positions if draws[n] >= self.acceptance(step, row, n)), self.candidates.k)
