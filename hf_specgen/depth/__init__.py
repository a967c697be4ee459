"""Policies that choose the draft depth: fixed, rule-based, and adaptive, which `k="auto"` stands for.

A draft costs time: the target verifies more tokens in the step, and the drafter runs. It gains as many tokens as are
accepted before the first rejection. The best depth depends on the text and on the machine, and may be 0.
"""

from hf_specgen.depth.adaptive import AdaptiveDepth as AdaptiveDepth
from hf_specgen.depth.latency import Bucket as Bucket
from hf_specgen.depth.latency import CostCurve as CostCurve
from hf_specgen.depth.latency import DraftLatency as DraftLatency
from hf_specgen.depth.latency import LatencyModel as LatencyModel
from hf_specgen.depth.policy import DisableWhen as DisableWhen
from hf_specgen.depth.policy import FixedDepth as FixedDepth
from hf_specgen.depth.policy import MovingWindow as MovingWindow
from hf_specgen.depth.policy import Policy as Policy
from hf_specgen.depth.policy import PolicySession as PolicySession
from hf_specgen.depth.policy import Schedule as Schedule
