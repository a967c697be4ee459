"""Adaptive draft depth, the policy behind `k="auto"`: acceptance x latency -> plan -> explore."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_specgen.depth.acceptance import AcceptanceEstimator
from hf_specgen.depth.exploration import ExplorationBudget
from hf_specgen.depth.latency import LatencyModel, slice_of
from hf_specgen.depth.memory import Profile, Remembered, acceptance_memory, profile_of
from hf_specgen.depth.planner import Plan, plan_depths
from hf_specgen.depth.policy import Policy, PolicySession, StepRecord
from hf_specgen.depth.ranks import from_first_rank, is_first_rank, lockstep_group
from hf_specgen.depth.recorder import ProfileCheck
from hf_specgen.depth.schedules import context_length

if TYPE_CHECKING:
    from hf_specgen.state import Call
    from hf_specgen.statistics import RowStep

MAX_DRAFT_DEPTH = 32
"""Deepest draft that is considered: acceptance of 0.9 a token leaves 3% for a deeper position."""
REPLAN_EVERY = 8
"""Steps between plans: a plan takes about 0.1 ms, and a few drafts change little. A fully rejected draft renews it."""
REMEMBERED_TRIALS = 8.0
"""Weight, in trials, of acceptance in earlier calls; half of it across temperatures. Texts differ between calls."""
PROPOSED_PRIOR = 0.9
"""Probability that a strategy without a network has a draft token, before any draft: n-grams often have none."""
SIZE_UPDATE = 0.3
"""Weight of the newest draft in the mean size of drafts."""


class AdaptiveDepth(Policy):
    """Chooses the depths that promise the most tokens per second, 0 where drafting does not pay.

    It combines an estimate of acceptance from the call's own steps with a latency model of the machine. Without a given
    model, latencies are learnt from the first calls with this target and strategy, and then kept in a profile file
    (`hf_specgen.depth.profiles`). Once they are known, decisions depend on the texts alone, not on how long steps take.
    Ranks of a tensor-parallel model decide by the first rank's latencies.

    Args:
        latency: decides alone if given, as a model or a profile file: nothing is measured, and nothing is carried over
            from earlier calls, so that equal calls draft alike.
        margin: by how much drafting must be expected to be faster than plain decoding.

    Raises:
        ValueError: for a negative margin, or a file that is no profile.

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

    def __init__(self, policy: AdaptiveDepth, call: Call):
        self._call, self._candidates, self._margin = call, call.candidates, policy.margin
        self._key, self._k = call.candidates.profile_key(), min(call.candidates.k, MAX_DRAFT_DEPTH)
        proposed = PROPOSED_PRIOR if call.candidates.negligible_draft_cost else 1.0
        self._acceptance = AcceptanceEstimator(call.state.batch, self._k, proposed)
        self._exploration, self._check = ExplorationBudget(), ProfileCheck()
        self._profile: Profile | None = None
        self._group: Any = None
        self._fixed, self._wants_plain_step = True, False
        if policy.latency is not None:
            self.latency = policy.latency.select(str(self._key[0]), call.candidates.negligible_draft_cost)
        else:
            self._profile, self._group = profile_of(call), lockstep_group(call.model)
            self._recall()
        self._place: tuple[int, int] | None = None
        self._active: list[bool] = []
        self._plan = Plan([], 0.0, 1.0)
        self._plan_age = self._drafts = 0
        self._renew, self._exploring = True, False
        self._new: list[StepRecord] = []
        self._unread = max(map(len, call.state.prompts))
        self._tree_size = np.array([4.0, 4.0, 1.0])
        self._nodes_per_level = 1.0

    def depths(self, room: Sequence[int]) -> list[int]:
        """The plan's depths where drafting pays; 0 elsewhere, but for a trial now and then."""
        active = [free > 0 for free in room]
        self._exploring = False
        if not any(active):
            return [0] * len(room)
        self._look_up_latency(sum(active))
        if self._wants_plain_step:
            return [0] * len(room)
        if self._renew or active != self._active or self._plan_age >= REPLAN_EVERY:
            self._make_plan(room, active)
        self._plan_age += 1
        prefill = self._prefill_cost * self._unread
        if self._plan.speedup > 1 + self._margin + prefill / max(room):
            return [min(depth, free) for depth, free in zip(self._plan.depths, room, strict=True)]
        depth = self._exploration.depth(self._cost, prefill)
        self._exploring = depth > 0
        depth = self._k if depth and self._candidates.adaptive_tree else depth
        return [min(depth, free) for free in room]

    def observe(self, step: StepRecord) -> None:
        """Count acceptance; times only enter the latency model, as long as that is being learnt."""
        self._learn_latency(step)
        if not any(step.requested):
            self._unread += 1
            return
        if self._exploring:
            self._exploration.observe(step, self._extra_cost(step))
        self._unread = 0
        self._drafts += 1
        self._new.append(step)
        drafted = [row for row in step.rows if row is not None and row.drafted]
        rejected = bool(drafted) and not any(row.accepted for row in drafted)
        self._renew = self._renew or rejected or self._drafts < REPLAN_EVERY
        if drafted:
            self._measure_size(step, drafted)

    def expected_speedup(self, depths: Sequence[int]) -> float | None:
        """Over plain decoding, if drafts of these depths were found."""
        accepted, proposed = self._acceptance.accepted(), self._acceptance.proposed()
        given_proposed = np.minimum(1.0, accepted / np.maximum(proposed, 1e-6))
        tokens = [1 + given_proposed[row, :depth].sum() for row, depth in enumerate(depths) if self._active[row]]
        cost = self._cost[min(max(depths), self._k)] + self._empty_draft_cost
        return float(len(tokens) / np.reciprocal(tokens).sum() / cost)

    def _look_up_latency(self, rows: int) -> None:
        place = slice_of(rows, context_length(self._call))
        if place == self._place and self._fixed:
            return
        if self._profile is not None:
            view = from_first_rank(self._profile.view(place), self._group)
            self.latency, self._fixed, self._wants_plain_step = view
        self._place, self._step, self._renew = place, self.latency.at(*place), True

    def _learn_latency(self, step: StepRecord) -> None:
        if self._profile is None or self._place is None or not is_first_rank(self._group):
            return
        if not self._fixed:
            self._profile.add(step, self._place, self._unread)
        else:
            self._profile.report(self._check.add(step, self._step, self._unread))

    def _make_plan(self, room: Sequence[int], active: list[bool]) -> None:
        self._acceptance.observe(self._new)
        if self._new and self._profile is not None:
            self._remember()
        self._new.clear()
        paid, rows = self._plan.speedup > 1 + self._margin, sum(active)
        self._price(rows)
        plan = plan_depths(
            self._acceptance.accepted(), self._acceptance.proposed(), self._cost, room, self._empty_draft_cost
        )
        if self._candidates.adaptive_tree:
            plan = plan._replace(depths=[self._k if depth else 0 for depth in plan.depths])
        self._plan, self._plan_age, self._active, self._renew = plan, 0, active, False
        if paid and not plan.speedup > 1 + self._margin:
            self._exploration.restart()

    def _price(self, rows: int) -> None:
        """Costs in plain steps: `[k + 1]` of a step by depth, of asking for a draft, of reading an unread token."""
        depths, drafter = np.arange(self._k + 1.0), self._step.drafter
        plain = float(self._step.target.by_tokens(rows))
        if self._candidates.adaptive_tree:
            nodes, passes, width = self._tree_size
            drafted = float(self._step.target.by_tokens(rows * (1 + nodes))) + passes * drafter.by_tokens(rows * width)
            seconds = np.where(depths > 0, drafted, plain)
        else:
            target = self._step.target.by_tokens(rows * (1 + self._nodes_per_level * depths))
            seconds = target + depths * drafter.by_tokens(rows)
        self._cost = np.maximum(seconds / plain, 1.0)
        self._empty_draft_cost = drafter.overhead / plain
        self._prefill_cost = rows * drafter.prefill / plain

    def _measure_size(self, step: StepRecord, drafted: Sequence[RowStep]) -> None:
        """Follow the size of drafts: nodes by level for chains with branches, nodes and passes for adaptive trees."""
        nodes, passes = max(row.drafted for row in drafted), step.passes
        self._nodes_per_level += SIZE_UPDATE * (nodes / step.depth - self._nodes_per_level)
        width = sum(passes) / max(1, len(passes)) / step.batch
        self._tree_size += SIZE_UPDATE * (np.array([nodes, len(passes), width]) - self._tree_size)

    def _extra_cost(self, step: StepRecord) -> float:
        """What a step with a draft took beyond a plain one, in plain steps, by the latency model."""
        plain, batch = float(self._step.target.by_tokens(step.batch)), step.batch
        target = float(self._step.target.by_tokens(batch * step.tokens_per_row))
        drafting = self._step.drafter.draft(step.passes) + batch * self._step.drafter.prefill * self._unread
        return max(0.0, (target + drafting) / plain - 1)

    def _recall(self) -> None:
        """Start from acceptance in earlier calls."""
        model, temperature = self._call.model, self._call.temperature
        known = acceptance_memory.recall(model, self._key, temperature)
        if known is not None:
            remembered, nearest = known
            same = nearest == temperature
            self._acceptance.restore(remembered.acceptance, REMEMBERED_TRIALS if same else REMEMBERED_TRIALS / 2)
            self._exploration.balance = remembered.balance if same else 0.0

    def _remember(self) -> None:
        remembered = Remembered(self._acceptance.snapshot(), self._exploration.balance)
        acceptance_memory.store(self._call.model, self._key, self._call.temperature, remembered)
