"""Exactly lossless speculative decoding inside `model.generate()`.

Example:
    >>> from hf_specgen import NgramCandidates
    >>> # model.generate(**inputs, candidate_generator=NgramCandidates(k=5))
"""

from hf_specgen.candidates import (
    Candidates,
    DraftModelCandidates,
    LayerSkipCandidates,
    MedusaCandidates,
    NgramCandidates,
    NgramHistory,
)
from hf_specgen.decoding import SpeculativeOutput
from hf_specgen.integration import install, speculate, uninstall
from hf_specgen.statistics import Statistics
from hf_specgen.tree import DraftTree
from hf_specgen.verification import Verifier
from hf_specgen.version import __version__

__all__ = [
    "Candidates",
    "DraftModelCandidates",
    "DraftTree",
    "LayerSkipCandidates",
    "MedusaCandidates",
    "NgramCandidates",
    "NgramHistory",
    "SpeculativeOutput",
    "Statistics",
    "Verifier",
    "__version__",
    "install",
    "speculate",
    "uninstall",
]

install()
