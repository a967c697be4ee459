"""Adaptive draft depth, the policy of `k="auto"`: plans depths from acceptance and latency, and explores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_specgen.counters import StepRecord
from hf_specgen.depth.acceptance import AcceptanceEstimator, ObservedSpeed, recall, remember
from hf_specgen.depth.latency import LatencyModel, slice_of
from hf_specgen.depth.learning import Profile, profile_of
from hf_specgen.depth.planner import Plan, plan_depths
from hf_specgen.depth.policy import DraftingSpeed, Policy, PolicySession
from hf_specgen.depth.ranks import from_first_rank, is_first_rank, lockstep_group
from hf_specgen.depth.schedules import context_length

if TYPE_CHECKING:
    from hf_specgen.call import Call

MAX_DRAFT_DEPTH = 32
"""Deepest draft that is considered: with an acceptance of 0.9 a token, 3% of drafts reach beyond it."""
REPLAN_EVERY = 8
"""Steps between plans, which take about 0.1 ms; the first drafts, and accepted trials, renew the plan at once."""
REJECTED_DRAFT_WEIGHT = 4
"""Steps that a fully rejected draft counts for: two of them renew the plan."""
REMEMBERED_TRIALS = 8.0
"""Maximum weight, in trials, of the acceptance in earlier calls: texts differ from call to call."""
PROPOSED_PRIOR = 0.9
"""Probability that a strategy without a network has a draft token, before any draft: n-grams often have none."""
EXPLORATION_SHARE = 0.015
"""Share of the time spent on trial drafts where plain decoding is faster: less than the margin."""
MAX_EXPLORATION = 0.25
"""Maximum exploration budget, in plain steps, unless a trial costs more; it fills up within 17 steps."""
MAX_EXPLORATION_DEBT = 0.5
"""Budget in plain steps that a failed trial overdraws at most, so that the next one comes within about 50 steps."""
ADVANCE_STEPS = 64
"""Steps whose budget may be spent on the first trial of a call, which includes the drafter's prefill."""
MIN_TRIAL_COST = 0.05
"""Minimum cost of a trial, in plain steps: a measured curve may show no cost at all for draft tokens."""
SIZE_UPDATE = 0.3
"""Weight of the newest draft in the moving average of draft sizes."""


class AdaptiveDepth(Policy):
    """Chooses the depths with the most expected tokens per second; 0 where plain decoding is faster.

    It combines an estimate of acceptance from the call's own steps with a latency model of the machine. Without a given
    model, latencies are learnt from the first calls with this target and strategy, and then kept in a profile file
    (`hf_specgen.depth.profiles`). Once they are known, decisions depend on the texts of this and earlier calls alone,
    not on how long steps take. All ranks of a tensor-parallel model use the first rank's latencies.

    Args:
        latency: a latency model or a profile file to use instead: nothing is then measured, and nothing is carried over
            from earlier calls, so that equal calls make the same drafts.
        margin: minimum expected speedup of drafting over plain decoding, minus 1.

    Raises:
        ValueError: for a negative margin, or a file that is not a profile.

    Example:
        >>> from hf_specgen.depth import CostCurve
        >>> curve = CostCurve((1, 9), (0.010, 0.012), context=256, batch=1)
        >>> AdaptiveDepth(LatencyModel.from_curves(curve, draft_token=0.001), margin=0.05)
        AdaptiveDepth(given latency, margin=0.05)
    """

    def __init__(self, latency: LatencyModel | str | Path | None = None, *, margin: float = 0.02):
        if margin < 0:
            raise ValueError(f"margin must be at least 0, got {margin}")
        self.latency = LatencyModel.load(latency) if isinstance(latency, str | Path) else latency
        self.margin = margin

    def start(self, call: Call) -> AdaptiveSession:
        return AdaptiveSession(self, call)

    def __repr__(self) -> str:
        given = "" if self.latency is None else "given latency, "
        return f"{type(self).__name__}({given}margin={self.margin})"


Controller = AdaptiveDepth


class AdaptiveSession(PolicySession):
    """The state of `AdaptiveDepth` in one call."""

    latency: LatencyModel
    drafting_speed: DraftingSpeed

    def __init__(self, policy: AdaptiveDepth, call: Call):
        self._call, self._candidates, self._margin = call, call.drafting, policy.margin
        key, negligible_cost = call.drafting.key, call.drafting.negligible_cost
        self._key, self._k = (key, call.temperature), min(call.drafting.k, MAX_DRAFT_DEPTH)
        self._acceptance = AcceptanceEstimator(call.state.batch, self._k, PROPOSED_PRIOR if negligible_cost else 1.0)
        self._speed, self.drafting_speed = ObservedSpeed(), DraftingSpeed()
        self._profile: Profile | None = None
        self._group: Any = None
        self._fixed, self._wants_plain_step, self._exploring, self._exploration = True, False, False, 0.0
        self.remembers = policy.latency is None
        if policy.latency is not None:
            self.latency = policy.latency.select(str(key[0]), negligible_cost)
        else:
            self._profile, self._group = profile_of(call), lockstep_group(call.model)
            snapshot = recall(call.model, self._key)
            if snapshot is not None:
                self._acceptance.restore(snapshot, REMEMBERED_TRIALS)
                self._speed.restore(snapshot.speed)
                self._exploration = snapshot.exploration
        self._slice_key = (0, 0)  # rows and context, as rounded by `slice_of`; zeros before any row may draft
        self._plan, self._active, self._renew = Plan([], 0.0, 1.0), [False], True
        self._plan_age = self._drafts = 0
        self._new: list[StepRecord] = []  # steps that `_acceptance` has not counted yet
        self._unread = max(map(len, call.state.prompts))  # tokens of the longest row that the drafter has not processed
        self._nodes_per_level = 1.0

    def depths(self, room: Sequence[int]) -> list[int]:
        """The plan's depths if they are expected to be faster than plain steps, else those of `_explore`."""
        active = [free > 0 for free in room]
        self._exploring = False
        if not any(active):
            return [0] * len(room)
        self._look_up_latency(sum(active))
        if self._wants_plain_step:
            return [0] * len(room)
        if self._renew or active != self._active or (self._new and self._plan_age >= REPLAN_EVERY):
            self._make_plan(room, active)
        self._plan_age += 1
        depths, prefill = self._plan.depths, self._prefill_cost * self._unread
        speedup = self._speed.speedup if self._candidates.sizes_trees else self._plan.speedup
        # Expected time of the remaining tokens, relative to plain steps, with the drafter's prefill.
        if 1 / speedup + prefill / max(room) >= 1 / (1 + self._margin):
            depths = [self._explore(prefill, max(room))] * len(room)
        return [min(depth, free) for depth, free in zip(depths, room, strict=True)]

    def _explore(self, prefill: float, room: int) -> int:
        """Depth of a step where plain decoding should be faster: 0 unless the budget covers a trial draft.

        A trial is one level deep; a strategy that sizes its trees itself proposes nothing that is not expected to be
        faster, so its trial is an ordinary draft, which costs a pass of the drafter at least.
        """
        adaptive = self._candidates.sizes_trees
        cost = self._pass_cost if adaptive else float(self._cost[1]) - 1
        cost = max(MIN_TRIAL_COST, cost + self._empty_draft_cost) + prefill
        self._exploration = min(self._exploration + EXPLORATION_SHARE, max(cost, MAX_EXPLORATION))
        if self._unread % REPLAN_EVERY == 0:
            self._remember()
        # The first trial is made early, where there is most to gain, on the budget of the steps to come.
        advance = 0.0 if self._drafts else EXPLORATION_SHARE * min(room, ADVANCE_STEPS)
        self._exploring = self._exploration + advance >= cost
        return int(self._exploring) * (self._candidates.k if adaptive else 1)

    def observe(self, step: StepRecord) -> None:
        """Count acceptance, and pass the step's times to the latency model while that is being learnt."""
        if self._profile is not None and any(self._slice_key) and is_first_rank(self._group):
            self._profile.add(step, self._slice_key, self._unread)
        if not any(step.requested):
            self._speed.add_plain()
            self._unread += max((row.emitted for row in step.rows if row is not None), default=0)
            return
        drafted = [row for row in step.rows if row is not None and row.drafted]
        accepted = sum(row.accepted for row in drafted)
        if self._exploring:
            self._exploration += accepted / max(1, step.batch) - self._trial_cost(step, bool(drafted))
            self._exploration = max(self._exploration, -MAX_EXPLORATION_DEBT)
        self._count_speed(step)
        if drafted:
            breadth = max(row.drafted for row in drafted) / step.depth
            self._nodes_per_level += SIZE_UPDATE * (breadth - self._nodes_per_level)
        self._unread, self._drafts = 0, self._drafts + 1
        self._new.append(step)
        if self._needs_no_plan(self._active):
            return
        self._renew = self._renew or (self._exploring and accepted > 0) or self._drafts < REPLAN_EVERY
        self._plan_age += REJECTED_DRAFT_WEIGHT - 1 if drafted and not accepted and not self._exploring else 0

    def _count_speed(self, step: StepRecord) -> None:
        tokens = sum(row.emitted for row in step.rows if row is not None) / max(1, step.batch)
        cost = self._cost_of(step)
        self._speed.add(tokens, cost)
        if self._fixed:
            self.drafting_speed = self.drafting_speed.plus(DraftingSpeed(1, tokens, cost))

    def _look_up_latency(self, rows: int) -> None:
        """Update the latencies when the number of rows or the context changes, and in every step while learning."""
        key = slice_of(rows, context_length(self._call))
        if key == self._slice_key and self._fixed:
            return
        if self._profile is not None:
            view = from_first_rank(self._profile.view(key), self._group)
            self.latency, self._fixed, self._wants_plain_step = view
        self._slice_key, self._latency, self._renew = key, self.latency.at(*key), True

    def _make_plan(self, room: Sequence[int], active: list[bool]) -> None:
        if self._new:
            self._acceptance.observe(self._new)
            self._new.clear()
            self._remember()
        self._update_costs(sum(active))
        if self._needs_no_plan(active):
            plan = Plan(list(map(int, active)), 0.0, 1.0)
        else:
            accepted, proposed = self._acceptance.accepted(), self._acceptance.proposed()
            plan = plan_depths(accepted, proposed, self._cost, room, self._empty_draft_cost)
        if self._candidates.sizes_trees:  # it sizes its trees itself
            chosen = plan.depths if any(plan.depths) else active
            plan = plan._replace(depths=[self._candidates.k if drafts else 0 for drafts in chosen])
        self._plan, self._plan_age, self._active, self._renew = plan, 0, active, False

    def _needs_no_plan(self, active: Sequence[bool]) -> bool:
        """Whether a single row drafts, with a strategy that sizes its tree in every step."""
        return self._candidates.sizes_trees and sum(active) == 1

    def _remember(self) -> None:
        if self._profile is not None:
            counts = self._acceptance.snapshot()
            kept = counts._replace(exploration=self._exploration, speed=self._speed.snapshot())
            remember(self._call.model, self._key, kept)

    def _update_costs(self, rows: int) -> None:
        """Costs in plain steps: of a step by depth `[k + 1]`, of an empty draft, of the drafter's prefill per token."""
        target, drafter = self._latency
        depths, plain = np.arange(self._k + 1.0), target.seconds_of(rows)
        seconds = target.by_tokens(rows * (1 + self._nodes_per_level * depths)) + depths * drafter.seconds_of(rows)
        self._cost = np.maximum(seconds / plain, 1.0)
        self._pass_cost = drafter.seconds_of(rows) / plain
        self._empty_draft_cost = drafter.overhead / plain
        self._prefill_cost = rows * drafter.prefill / plain

    def _trial_cost(self, step: StepRecord, drafted: bool) -> float:
        cost = self._cost_of(step) - 1
        return (max(MIN_TRIAL_COST, cost) if drafted else cost) + self._prefill_cost * self._unread

    def _cost_of(self, step: StepRecord) -> float:
        """Latency of a step by the latency model, in plain steps."""
        target, drafter = self._latency
        seconds = target.seconds_of(step.batch * step.tokens_per_row) + drafter.draft(step.passes)
        return max(1.0, seconds / target.seconds_of(step.batch))
