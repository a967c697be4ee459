"""How deep to draft: policies, from a fixed depth to the one that estimates, plans and explores.

A draft of depth d costs time: the target's step gets longer, since it verifies d more tokens, and the drafter runs.
It gains as many tokens as are accepted before the first rejection. The best d depends on the text and on the machine;
where drafts are seldom accepted, or tokens are expensive, it is 0. `AdaptiveDepth`, the policy behind `k="auto"`,
decides in four steps:

1. **Acceptance** (`acceptance`): P(position i is accepted | position i - 1 was), by row, from the outcomes of the
   call's steps. Positions behind a rejected token were not judged and count neither way. Old outcomes are forgotten;
   few outcomes are shrunk towards the previous position and the mean over rows. What was accepted in earlier calls
   with the same target, strategy and temperature counts as a few trials.
2. **Latency** (`latency`): seconds of a target step by tokens per row, rows and context, and of a drafter's pass.
   They are learnt from the steps of the first calls on a machine (`learning`): medians by size, the first of each
   dropped. Once enough is known, they are fixed and written to a profile file (`profiles`), whose key covers all that
   they depend on.
3. **Plan** (`planner`): the depths with the most expected tokens per second,

       tokens(d) / time(d),  tokens(d) = 1 + sum over i <= d of P(positions 1 to i are accepted),

   where a batch takes as long as its slowest row, so that rows are aggregated by their harmonic mean. Plans are
   renewed every few steps, and after a draft that was fully rejected. Drafting has to be faster than plain decoding
   by a margin, and pays for the drafter's own prefill.
4. **Explore** (`controller`): where drafting does not pay, each plain step saves 1.5% of its time, by the latency
   model, until a trial can be paid for. So a text that turns predictable is noticed, and one that never does loses
   little.

Wall time enters the latency model only, and only until that is fixed. From then on decisions depend on the texts
alone: two runs of a program draft alike at any load of the machine, and so round alike in bfloat16. (The tokens are
those of plain `generate` in any case, up to that rounding.) Steps whose times contradict the profile by more than a
factor of two are reported once. Given a model or a profile file, `AdaptiveDepth(latency=...)` decides by that alone:
nothing is measured, remembered or written. That makes every single call repeatable, and projections for other
machines possible (`benchmarks/profiles/gpu_like.json`).

Example:
    >>> from hf_specgen.depth import AdaptiveDepth, CostCurve, DisableWhen, LatencyModel, Schedule
    >>> curve = CostCurve((1, 9), (0.010, 0.012), context=256, batch=1)
    >>> policy = AdaptiveDepth(LatencyModel.from_curves(curve, draft_token=0.001))
    >>> by_rule = DisableWhen(temperature_above=1.0, otherwise=Schedule({1: 8, 4: 4, 16: 0}))
"""

from hf_specgen.depth.acceptance import AcceptanceEstimator
from hf_specgen.depth.controller import AdaptiveDepth, Controller
from hf_specgen.depth.cost import CostCurve
from hf_specgen.depth.latency import DraftLatency, LatencyModel, Slice
from hf_specgen.depth.planner import Plan, plan_depths
from hf_specgen.depth.policy import Fixed, FixedDepth, Policy, PolicySession, StepRecord
from hf_specgen.depth.schedules import DisableWhen, MovingWindow, OffAbove, OffForShort, Schedule

__all__ = [
    "AcceptanceEstimator",
    "AdaptiveDepth",
    "Controller",
    "CostCurve",
    "DisableWhen",
    "DraftLatency",
    "Fixed",
    "FixedDepth",
    "LatencyModel",
    "MovingWindow",
    "OffAbove",
    "OffForShort",
    "Plan",
    "Policy",
    "PolicySession",
    "Schedule",
    "Slice",
    "StepRecord",
    "plan_depths",
]
