"""How deep to draft."""

from hf_specgen.depth.acceptance import AcceptanceEstimator
from hf_specgen.depth.controller import AdaptiveDepth, Controller
from hf_specgen.depth.cost import CostCurve
from hf_specgen.depth.latency import LatencyModel
from hf_specgen.depth.policy import FixedDepth, Policy, PolicySession, StepRecord
from hf_specgen.depth.schedules import DisableWhen, MovingWindow, OffAbove, OffForShort, Schedule
