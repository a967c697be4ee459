"""Adaptive draft depth, the policy of `k="auto"`: drafts while that is faster than plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from hf_specgen.call import Call
from hf_specgen.counters import StepRecord
from hf_specgen.depth.calibrate import DrafterTimer, known_curve, target_curve
from hf_specgen.depth.latency import ANY_DRAFTER, Bucket, CostCurve, LatencyModel
from hf_specgen.depth.policy import Policy, PolicySession
from hf_specgen.memory import memory
from hf_specgen.targets.target import Target

MAX_CHAIN = 32
"""Deepest chain that is considered: with an acceptance of 0.9 a token, 3% of drafts reach beyond it."""
FORGETTING = 0.9
"""Factor by which the weight of earlier steps decreases with every step that drafts."""
FIRST_INTERVAL, MAX_INTERVAL = 8, 64
"""Plain steps after which drafting is tried again; doubled whenever that was not faster."""
MAX_LOSS = 0.02
"""Fraction of the time that rejected drafts may cost: where they cost little, intervals are shorter."""


class AdaptiveDepth(Policy):
    """Drafts while the steps with drafts are faster than plain ones, at the depth with the most tokens per second.

    The speed of drafting is the tokens of recent steps over their cost by the latency model: T(q) of the target and the
    drafter's passes, which are measured once per model (`hf_specgen.depth.calibrate`). Where it is not above that of
    plain decoding, drafting is tried again after 8, 16, 32, … plain steps, or fewer where a rejected draft costs
    little. All ranks of a tensor-parallel model use the first rank's latencies.

    Args:
        latency: a latency model, or a file that `hf-specgen tune` wrote, to use instead: nothing is then measured, and
            nothing is carried over from earlier calls, so that equal calls make the same drafts.
        margin: minimum speedup of drafting over plain decoding, minus 1.

    Raises:
        ValueError: for a negative margin, or a file that is not a latency file.

    Example:
        >>> AdaptiveDepth(margin=0.05)
        AdaptiveDepth(margin=0.05)
    """

    def __init__(self, latency: LatencyModel | str | Path | None = None, *, margin: float = 0.02):
        if margin < 0:
            raise ValueError(f"margin must be at least 0, got {margin}")
        self.latency = LatencyModel.load(latency) if isinstance(latency, str | Path) else latency
        self.margin = margin

    def start(self, call: Call) -> AdaptiveSession:
        return AdaptiveSession(self, call)

    def __repr__(self) -> str:
        latency = "" if self.latency is None else "given latency, "
        return f"{type(self).__name__}({latency}margin={self.margin})"


@dataclass
class DraftingSpeed:
    """Tokens per row of the recent steps with drafts, their cost over T(1), and the interval until the next trial."""

    tokens: float = 4.8
    cost: float = 4.0
    interval: int = FIRST_INTERVAL

    @property
    def speedup(self) -> float:
        """Tokens per plain step."""
        return self.tokens / self.cost

    def add(self, tokens: float, cost: float) -> None:
        """Count a step."""
        self.tokens, self.cost = FORGETTING * self.tokens + tokens, FORGETTING * self.cost + cost

    def copy(self) -> DraftingSpeed:
        """The same speed, with the weight of the prior: texts differ from call to call."""
        return DraftingSpeed(4.0 * self.speedup, 4.0)


class AdaptiveSession(PolicySession):
    """The state of `AdaptiveDepth` in one call."""

    def __init__(self, policy: AdaptiveDepth, call: Call):
        self._call, self._margin = call, policy.margin
        drafting = call.drafting
        self.remembers = policy.latency is None and call.remembers
        self._key = ("speed", drafting.key, call.temperature)
        self._model = call.model if self.remembers else None
        self._speed = memory.recall(self._model, self._key, DraftingSpeed)
        self._timer: DrafterTimer | None = None
        self._plain_steps = 0  # still to be made before drafting is tried again
        self._is_trial = False
        self._accepted, self._verified, self._nodes_per_level = 1.4, 2.0, 1.0
        if policy.latency is not None:
            self.latency = policy.latency.select(str(drafting.key[0]), drafting.negligible_cost)
            return
        self._use(known_curve(call))
        if drafting.negligible_cost:
            self._speed = DraftingSpeed(max(self._speed.tokens, DraftingSpeed.tokens))
        elif self._speed.speedup <= 1 + self._margin:
            self._plain_steps = self._speed.interval

    def prefilled(self, target: Target) -> None:
        if self.latency is None:
            self._use(target_curve(self._call, target))

    def _use(self, curve: CostCurve | None) -> None:
        if curve is not None:
            self._timer = DrafterTimer(self._call, curve)
            self.latency = LatencyModel((Bucket(curve, {ANY_DRAFTER: self._timer.latency()}),))

    def depths(self, limits: Sequence[int]) -> list[int]:
        """The same depth for all rows; 0 where plain decoding has been faster, or while latencies are unknown."""
        rows = sum(limit > 0 for limit in limits)
        if self.latency is None or not rows:
            return [0] * len(limits)
        if self._plain_steps > 0:
            self._plain_steps -= 1
            self._is_trial = self._plain_steps == 0
            return [0] * len(limits)
        depth = self._call.drafting.k if self._call.drafting.sizes_trees else self._fastest_chain(rows, max(limits))
        return [min(depth, limit) for limit in limits]

    def _fastest_chain(self, rows: int, limit: int) -> int:
        """The depth with the most expected tokens per second, at least 1, if each token is accepted equally often."""
        assert self.latency is not None
        target, drafter = self.latency.at(rows, self._call.context_length)
        acceptance, draft_pass = self._accepted / self._verified, drafter.seconds_of(rows)
        best, best_rate, tokens = 1, 0.0, 1.0
        for depth in range(1, min(self._call.drafting.k, limit, MAX_CHAIN) + 1):
            tokens += acceptance**depth
            seconds = target.seconds_of(rows * (1 + self._nodes_per_level * depth)) + depth * draft_pass
            if tokens / seconds > best_rate:
                best, best_rate = depth, tokens / seconds
        return best

    def observe(self, step: StepRecord) -> None:
        """Count the speed and the acceptance of a step with drafts; turn drafting off if it is not faster."""
        rows = [row for row in step.rows if row is not None]
        drafted = [row for row in rows if row.drafted]
        if self.latency is None or not any(step.requested) or not (drafted or step.passes):
            return
        if self._timer is not None and self._timer.observe(step):
            self.latency = LatencyModel((Bucket(self.latency.buckets[0].target, {ANY_DRAFTER: self._timer.latency()}),))
        target, drafter = self.latency.at(step.batch, self._call.context_length)
        seconds = target.seconds_of(step.batch * step.tokens_per_row) + drafter.draft(step.passes)
        self._add(sum(row.emitted for row in rows) / len(rows), seconds / target.seconds_of(step.batch))
        if drafted:
            self._accepted = FORGETTING * self._accepted + sum(row.accepted for row in drafted)
            self._verified = FORGETTING * self._verified + sum(min(row.depth, row.accepted + 1) for row in drafted)
            self._nodes_per_level = max(row.drafted for row in drafted) / step.depth

    def _add(self, tokens: float, cost: float) -> None:
        speed = self._speed
        if self._is_trial and tokens > (1 + self._margin) * cost:
            self._speed = speed = DraftingSpeed()
        speed.add(tokens, cost)
        if speed.speedup <= 1 + self._margin:
            if self._is_trial:
                speed.interval = min(2 * speed.interval, MAX_INTERVAL)
            loss = max(0.0, (1 + self._margin) * cost - tokens)
            self._plain_steps = min(speed.interval, ceil(loss / MAX_LOSS))
        self._is_trial = False
        memory.store(self._model, self._key, speed)
