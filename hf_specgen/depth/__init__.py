"""Policies that choose the draft depth: fixed, rule-based, and adaptive, which `k="auto"` stands for.

A draft costs time: the target verifies more tokens in the step, and the drafter runs. It gains as many tokens as are
accepted before the first rejection. The best depth depends on the text and on the machine, and may be 0.
"""

from hf_specgen.counters import StepRecord
from hf_specgen.depth.adaptive import AdaptiveDepth
from hf_specgen.depth.latency import Bucket, CostCurve, DraftLatency, LatencyModel
from hf_specgen.depth.policy import FixedDepth, Policy, PolicySession
from hf_specgen.depth.schedules import DisableWhen, MovingWindow, Schedule

__all__ = [
    "AdaptiveDepth",
    "Bucket",
    "CostCurve",
    "DisableWhen",
    "DraftLatency",
    "FixedDepth",
    "LatencyModel",
    "MovingWindow",
    "Policy",
    "PolicySession",
    "Schedule",
    "StepRecord",
]
