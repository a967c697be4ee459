"""Adaptive draft depth, the policy of `k="auto"`: drafts while that is faster than plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch

from hf_specgen.call import Call, memory
from hf_specgen.call_statistics import StepRecord
from hf_specgen.depth.calibrate import DrafterLatencyEstimator, measured_curve, recalled_curve
from hf_specgen.depth.latency import ASSUMED, CostCurve, LatencyModel, StepLatency, assumed_latency, fastest
from hf_specgen.depth.policy import Policy, PolicySession
from hf_specgen.depth.step_times import TargetLatencyEstimator, learns_from_steps
from hf_specgen.targets.target import Target

# Times in units of T(1), the time of a plain step.
MAX_TIME_LOSS = 1.5  # what drafting may have lost in a call before it pauses; the text may suit it again later
MAX_TIME_GAIN = 10.0  # what drafting has gained that is set against later losses
TIME_LOSS_ALLOWANCE = 0.02  # what drafting may lose again for every plain step: at most 2% of the time
MAX_PREFILL = 0.08
"""Time that the drafter may take for the prompt, as a fraction of the call's plain steps; above it, it is not used."""
FORGETTING = 0.9  # factor by which the weight of earlier drafts in the acceptance rate decreases with every draft


@dataclass
class DraftingTimeLoss:
    """Time that drafting has lost, in units of T(1), less what it has gained and `TIME_LOSS_ALLOWANCE`."""

    relative_time: float = 0.0

    def add(self, loss: float) -> None:
        """Count a loss."""
        self.relative_time = max(self.relative_time + loss, -MAX_TIME_GAIN)

    def count(self, latency: StepLatency, rows: int, seconds: float, passes: Sequence[int], emitted: float) -> None:
        """Count a step with a draft: its time, less that of plain steps for as many tokens.

        `rows` and `seconds` are those of the target's pass, `passes` the tokens of each pass of the drafter, `emitted`
        the tokens of a row on average.
        """
        seconds += latency.draft.draft_seconds(passes)
        self.add(seconds / latency.target.seconds_of(rows) - emitted)

    def for_later_call(self) -> DraftingTimeLoss:
        """The loss without gains, since texts differ, at most `MAX_TIME_LOSS`: at first one step is paused at most.

        `Memory` calls it when it stores the loss and when it recalls it.
        """
        return DraftingTimeLoss(min(max(self.relative_time, 0.0), MAX_TIME_LOSS))


class AdaptiveDepth(Policy):
    """Drafts while that is faster than plain decoding; sets the depth of chains, strategies size trees themselves.

    A step with a draft loses its time, by the latency model, less the time of plain steps for the same tokens.
    Drafting pauses while the loss of the call is at least 1.5 T(1), the time of a plain step. The time of the drafter
    for its uncached tokens counts as a loss; each paused step reduces it by 0.02 T(1). So, by these latencies, no call
    is slower than plain decoding by more than 2%, 1.5 T(1) and one draft, beside the drafter's prefill; where that
    takes more than 8% of the plain steps of the call, only drafts without a forward pass are made. In a combination the
    drafters may lose 0.75 T(1) more, see `DrafterTimeLoss`. T(q) of the target and the time of drafting are measured
    once per model, rows and context (`hf_specgen.depth.calibrate`): on a CPU by the first steps, the first of which has
    no draft, nor have a few later ones and the first with at most half as many rows; on an accelerator in 8 to 12 T(1).
    All ranks of a tensor-parallel model use the first rank's.

    Args:
        latency: a latency model, or a file that `hf-specgen tune` wrote, to use instead; "assumed" for a fixed curve
            for the type of device, as also under `torch.use_deterministic_algorithms(True)`. Nothing is then measured,
            and nothing but the table of Token Recycling is carried over from earlier calls: equal calls make the same
            drafts, in every process.

    Raises:
        ValueError: for a file that is not a latency file.

    Example:
        >>> AdaptiveDepth()
        AdaptiveDepth()
    """

    def __init__(self, latency: LatencyModel | str | Path | None = None):
        super().__init__()
        self.is_assumed = latency == ASSUMED
        self.latency: LatencyModel | None = None
        if isinstance(latency, str | Path):
            if not self.is_assumed:
                self.latency = LatencyModel.load(latency)
        elif isinstance(latency, LatencyModel | None):
            self.latency = latency
        else:
            raise TypeError(f"latency must be a LatencyModel or a file of hf-specgen tune, got {latency!r}")

    def start(self, call: Call) -> AdaptiveSession:
        return AdaptiveSession(self, call)

    def measures_latency(self) -> bool:
        return self.latency is None and not (self.is_assumed or torch.are_deterministic_algorithms_enabled())

    def __repr__(self) -> str:
        latency = "latency='assumed'" if self.is_assumed else "" if self.latency is None else "given latency"
        return f"{type(self).__name__}({latency})"


class WithTargetCurve(Policy):
    """A policy whose sessions of `AdaptiveDepth` get a T(q), in calls that cannot measure it; others stay as they are.

    Args:
        policy: as the user gave it.
        curve: T(q) of the target.
    """

    def __init__(self, policy: Policy, curve: CostCurve | None):
        super().__init__()
        self._policy = policy
        self._curve = curve

    def start(self, call: Call) -> PolicySession:
        session = self._policy.start(call)
        if isinstance(session, AdaptiveSession):
            session.use_target_curve(self._curve)
        return session


class AdaptiveSession(PolicySession):
    """The state of `AdaptiveDepth` in one call."""

    def __init__(self, policy: AdaptiveDepth, call: Call):
        super().__init__()
        self._call = call
        drafting = call.drafting
        # Set by `join_shared_passes`: whether several calls have one loss; whether latencies are those of this call's
        # rows alone.
        self._has_shared_loss = False
        self._ignores_other_rows = False
        self._is_measured = policy.measures_latency()
        self.remembers = self._is_measured and call.settings.memory
        self._model = call.model if self.remembers else None
        self._key = ("time loss", drafting.key, call.temperature)
        self._loss = memory.recall(self._model, self._key, DraftingTimeLoss)
        self._drafter_estimator: DrafterLatencyEstimator | None = None
        self._target_estimator: TargetLatencyEstimator | None = None
        # Draft tokens of recent drafts that were accepted, and that were tested: these and the first rejected one of
        # each row. The prior is two tested tokens at an acceptance rate of 0.7.
        self._accepted = 1.4
        self._tested = 2.0
        self._nodes_per_level = 1.0
        self._uncached = call.context_length
        self._has_drafted = False
        if self._is_measured and learns_from_steps(call.model):
            self._target_estimator = TargetLatencyEstimator(call)
            self._use_curves(*self._target_estimator.curves)
        elif self._is_measured:
            self._use_measured_curve(recalled_curve(call))
        else:
            latency = policy.latency or assumed_latency(call.state.device)
            self.latency = latency.for_drafter(str(drafting.key[0]), drafting.negligible_draft_cost)

    def join_shared_passes(self, loss: DraftingTimeLoss) -> None:
        """Take part in passes that other calls share; called before the first step.

        `loss` is the mean of these calls, counted by `SharedSteps`.
        """
        self._loss = loss
        self._has_shared_loss = True
        # Drafts are cut to the common limit later, so that each call drafts as if alone.
        self._ignores_other_rows = self._call.drafting.negligible_draft_cost
        if self._target_estimator is not None:
            self._use_no_step_times()
            self._use_measured_curve(recalled_curve(self._call))

    def use_target_curve(self, curve: CostCurve | None) -> None:
        """Use this T(q) in place of one that the steps time; without one nothing is drafted."""
        if self._is_measured:
            self._use_no_step_times()
            self._use_measured_curve(curve)

    def _use_no_step_times(self) -> None:
        """Forget the T(q) that steps time: in passes that several calls share, those of one call time no sizes."""
        self.latency = self._drafter_estimator = self._target_estimator = None

    def step_latency(self, rows: int, context: int) -> StepLatency | None:
        state = self._call.state
        other_rows = 0 if self._ignores_other_rows else state.other_rows
        step = None if self.latency is None else self.latency.at(rows + other_rows, context)
        return step.per_row(rows + other_rows, state.drafts_together) if step and other_rows else step

    def prefilled(self, target: Target) -> None:
        if self.latency is None and self._target_estimator is None:
            self._use_measured_curve(measured_curve(self._call, target))

    def _use_measured_curve(self, curve: CostCurve | None) -> None:
        """Use a T(q) that was measured, if there is one, with a new estimate of the time of drafting."""
        if curve is not None:
            self._drafter_estimator = None
            self._use_curves(curve)

    def _use_curves(self, *curves: CostCurve) -> None:
        """Use these T(q), each at another number of rows, and the estimated time of drafting."""
        if not curves:
            return
        if self._drafter_estimator is None:
            self._drafter_estimator = DrafterLatencyEstimator(self._call, *curves)
        else:
            self._drafter_estimator.curves = curves
        self.latency = self._drafter_estimator.latency()

    def _latency_of_step(self, rows: int) -> StepLatency:
        """The latencies of a step of `rows` rows, once latencies are known."""
        return cast(StepLatency, self.step_latency(rows, self._call.context_length))

    def depths(self, limits: Sequence[int]) -> list[int]:
        """The same depth for all rows; 0 while drafting pauses, or while latencies are unknown."""
        rows = sum(limit > 0 for limit in limits)
        needs_plain_step = self._target_estimator is not None and self._target_estimator.needs_plain_step
        if self.latency is None or needs_plain_step or not rows:
            return [0] * len(limits)
        if self._pauses(rows):
            self._uncached += 1
            calls = 1 + self._call.state.other_rows if self._has_shared_loss else 1  # each of which does this in a step
            self._loss.add(-TIME_LOSS_ALLOWANCE / calls)
            return [0] * len(limits)
        depth = self._call.drafting.k if self._call.drafting.adaptive_tree else self._fastest_depth(rows, max(limits))
        return [min(depth, limit) for limit in limits]

    def prefill_is_short(self) -> bool:
        is_known = self.latency is not None and (self._drafter_estimator is None or self._drafter_estimator.is_known)
        return (
            not is_known
            or self._relative_uncached_time(self._call.state.batch) <= MAX_PREFILL * self._call.max_new_tokens
        )

    def _relative_uncached_time(self, rows: int) -> float:
        """Time of the drafter for tokens that it has not processed yet, in units of T(1)."""
        target, drafter = self._latency_of_step(rows)
        seconds = drafter.pass_seconds(rows * (1 + self._uncached)) - drafter.pass_seconds(rows)
        return seconds / target.seconds_of(rows)

    def _pauses(self, rows: int) -> bool:
        """Whether drafting has lost too much, counting the drafter's uncached tokens, or its prefill is too slow."""
        lost = self._loss.relative_time
        has_free_drafts = self._call.drafting.has_negligible_cost_drafts
        if self._has_drafted and not has_free_drafts:
            lost += self._relative_uncached_time(rows)
        return lost >= MAX_TIME_LOSS or not (has_free_drafts or self._has_drafted or self.prefill_is_short())

    def _fastest_depth(self, rows: int, limit: int) -> int:
        """The depth with the most expected tokens per second, at least 1, at one acceptance rate and tree width."""
        target, drafter = self._latency_of_step(rows)
        state = self._call.state
        # Rows of other calls that are in the drafter's passes too.
        other_rows = state.other_rows if state.drafts_together and not self._ignores_other_rows else 0
        depths = np.arange(1, min(self._call.drafting.k, limit) + 1)
        nodes = self._nodes_per_level * depths
        with np.errstate(under="ignore"):
            tokens = 1 + np.cumsum((self._accepted / self._tested) ** depths)
        seconds = np.array([target.seconds_of(rows * (1 + count)) for count in nodes])
        return 1 + fastest(tokens, seconds + drafter.overhead + depths * drafter.pass_seconds(rows + other_rows))

    def observe(self, step: StepRecord) -> None:
        """Use the times of a step; count the loss and the acceptance of one with a draft."""
        # T(q), where steps time it.
        if self._target_estimator is not None and self._target_estimator.observe(step):
            self._use_curves(*self._target_estimator.curves)
        if self.latency is None or not step.has_draft:
            return
        rows = [row for row in step.rows if row is not None]
        drafted = [row for row in rows if row.drafted]
        if drafted or step.tokens_per_pass:  # the drafter has processed the text
            self._uncached = 0
            self._has_drafted = True
        # The time of drafting, by the first drafts; and whether a T(q) that was measured is too long.
        if self._drafter_estimator is not None:
            if self._target_estimator is None:
                self._drafter_estimator.forget_slow_curve(step)
            if self._drafter_estimator.observe(step):
                self.latency = self._drafter_estimator.latency()
        if self._has_shared_loss:
            self._loss.add(-step.excluded_time_loss / (1 + self._call.state.other_rows))
        else:
            latency = self._latency_of_step(step.pass_rows)
            emitted = sum(row.emitted for row in rows) / max(1, len(rows))
            seconds = latency.target.seconds_of(step.pass_rows * step.tokens_per_row)
            self._loss.count(latency, step.pass_rows, seconds, step.tokens_per_pass, emitted)
            self._loss.add(-step.excluded_time_loss)
            memory.store(self._model, self._key, self._loss)
        if drafted:
            self._accepted = FORGETTING * self._accepted + sum(row.accepted for row in drafted)
            self._tested = FORGETTING * self._tested + sum(min(row.depth, row.accepted + 1) for row in drafted)
            self._nodes_per_level = max(row.drafted for row in drafted) / step.depth
