"""Exactly lossless speculative decoding inside `model.generate()`.

Example:
    >>> from hf_specgen import NgramCandidates
    >>> # model.generate(**inputs, candidate_generator=NgramCandidates(k=5))
"""

from hf_specgen.adaptive import Controller, MovingWindow, Policy, Schedule
from hf_specgen.candidates import (
    AutoCandidates,
    Candidates,
    DraftModelCandidates,
    LayerSkipCandidates,
    MedusaCandidates,
    NgramCandidates,
    NgramHistory,
)
from hf_specgen.decoding import SpeculativeOutput
from hf_specgen.generate import install, speculate, uninstall
from hf_specgen.monitoring.monitor import SpeculationMonitor
from hf_specgen.statistics import Statistics
from hf_specgen.tree import DraftTree
from hf_specgen.verification import Verifier
from hf_specgen.version import __version__

__all__ = [
    "AutoCandidates",
    "Candidates",
    "Controller",
    "DraftModelCandidates",
    "DraftTree",
    "LayerSkipCandidates",
    "MedusaCandidates",
    "MovingWindow",
    "NgramCandidates",
    "NgramHistory",
    "Policy",
    "Schedule",
    "SpeculationMonitor",
    "SpeculativeOutput",
    "Statistics",
    "Verifier",
    "__version__",
    "install",
    "speculate",
    "uninstall",
]

install()
