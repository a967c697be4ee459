"""Exactly lossless speculative decoding inside `model.generate()`.

Example:
    >>> from hf_specgen import NgramCandidates
    >>> # model.generate(**inputs, candidate_generator=NgramCandidates(k=5))
"""

from hf_specgen.candidates import (
    Candidates,
    CombinedCandidates,
    DraftModelCandidates,
    DraftSession,
    LayerSkipCandidates,
    MedusaCandidates,
    NgramCandidates,
    NgramHistory,
)
from hf_specgen.decoding import SpeculativeOutput
from hf_specgen.depth import (
    AdaptiveDepth,
    Controller,
    FixedDepth,
    MovingWindow,
    Policy,
    PolicySession,
    Schedule,
    StepRecord,
)
from hf_specgen.generate import install, speculate, uninstall
from hf_specgen.monitoring.monitor import Monitor, MonitorSession, SpeculationMonitor
from hf_specgen.state import Call
from hf_specgen.statistics import Statistics
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult, VerificationSession, Verifier
from hf_specgen.version import __version__

__all__ = [
    "AdaptiveDepth",
    "Call",
    "Candidates",
    "CombinedCandidates",
    "Controller",
    "DraftModelCandidates",
    "DraftSession",
    "DraftTree",
    "FixedDepth",
    "LayerSkipCandidates",
    "MedusaCandidates",
    "Monitor",
    "MonitorSession",
    "MovingWindow",
    "NgramCandidates",
    "NgramHistory",
    "Policy",
    "PolicySession",
    "Schedule",
    "SpeculationMonitor",
    "SpeculativeOutput",
    "Statistics",
    "StepRecord",
    "VerificationResult",
    "VerificationSession",
    "Verifier",
    "__version__",
    "install",
    "speculate",
    "uninstall",
]

install()
