"""How deep to draft: policies, from a fixed depth to the controller that measures and decides."""

from hf_specgen.adaptive.chooser import Chooser
from hf_specgen.adaptive.controller import Controller
from hf_specgen.adaptive.costs import MeasuredCosts, StepCosts
from hf_specgen.adaptive.policy import Fixed, Policy, State, Step
from hf_specgen.adaptive.rules import MovingWindow, OffAbove, OffForShort, Schedule

__all__ = [
    "Chooser",
    "Controller",
    "Fixed",
    "MeasuredCosts",
    "MovingWindow",
    "OffAbove",
    "OffForShort",
    "Policy",
    "Schedule",
    "State",
    "Step",
    "StepCosts",
]
