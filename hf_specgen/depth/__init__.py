"""Policies that choose the draft depth: fixed, rule-based, and adaptive.

A draft of depth d costs time: the target verifies d more tokens in the step, and the drafter runs. It gains as many
tokens as are accepted before the first rejection. The best d depends on the text and on the machine; where acceptance
is low, or verification is expensive, it is 0. `AdaptiveDepth`, the policy behind `k="auto"`, decides in four steps:

1. **Acceptance** (`acceptance`): P(position i is accepted | position i - 1 was), by row, from the outcomes of the
   call's steps. Positions after a rejected token are censored: they count neither as accepted nor as rejected. Old
   outcomes decay exponentially; few outcomes are shrunk towards the previous position and the mean over rows. Earlier
   calls with the same target, strategy and temperature count as a few trials.
2. **Latency** (`latency`): seconds of a target step by tokens per row, rows and context, and of a drafter's pass.
   They are estimated from the steps of the first calls on a machine (`recorder`): medians by size, without the first
   measurement of each. After enough steps they are fixed (`learning`) and written to a profile file (`profiles`),
   whose key covers all that they depend on.
3. **Plan** (`planner`): the depths with the most expected tokens per second,

       tokens(d) / time(d),  tokens(d) = 1 + sum over i <= d of P(positions 1 to i are accepted),

   where a batch takes as long as its slowest row, so that rows are aggregated by their harmonic mean. Plans are
   renewed every few steps, and earlier after fully rejected drafts. Drafting has to be faster than plain decoding by a
   margin, with the drafter's own prefill included.
4. **Explore** (`controller`): where plain decoding is faster, each plain step adds 1.5% of its time, by the latency
   model, to an exploration budget; a trial draft is made once the budget covers its cost. So drafting starts again
   when the text becomes predictable, and the loss is bounded when it does not.

Wall time enters the latency model only, and only until that is fixed. From then on decisions depend on the texts of
this and earlier calls alone: two runs of a program make the same drafts at any load of the machine, and so get the
same rounding in bfloat16. (The tokens are those of plain `generate` in any case, up to that rounding.) A warning is
issued once if step times contradict the profile by more than a factor of two. Given a model or a profile file,
`AdaptiveDepth(latency=...)` uses only that: nothing is measured, remembered or written. That makes every single call
repeatable, and projections for other machines possible (`benchmarks/profiles/gpu_like.json`).

Example:
    >>> from hf_specgen.depth import AdaptiveDepth, CostCurve, DisableWhen, LatencyModel, Schedule
    >>> curve = CostCurve((1, 9), (0.010, 0.012), context=256, batch=1)
    >>> policy = AdaptiveDepth(LatencyModel.from_curves(curve, draft_token=0.001))
    >>> by_rule = DisableWhen(temperature_above=1.0, otherwise=Schedule({1: 8, 4: 4, 16: 0}))
"""

from hf_specgen.counters import StepRecord
from hf_specgen.depth.acceptance import AcceptanceEstimator
from hf_specgen.depth.controller import AdaptiveDepth, Controller
from hf_specgen.depth.cost import CostCurve
from hf_specgen.depth.latency import DraftLatency, LatencyModel, Slice
from hf_specgen.depth.planner import Plan, plan_depths
from hf_specgen.depth.policy import DraftingSpeed, FixedDepth, Policy, PolicySession
from hf_specgen.depth.schedules import DisableWhen, MovingWindow, OffAbove, OffForShort, Schedule

__all__ = [
    "AcceptanceEstimator",
    "AdaptiveDepth",
    "Controller",
    "CostCurve",
    "DisableWhen",
    "DraftLatency",
    "DraftingSpeed",
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
