"""Candidate strategies: one file each."""

from hf_specgen.candidates.base import Candidates, DraftContext, Drafter
from hf_specgen.candidates.foreign import ForeignCandidates
from hf_specgen.candidates.ngram import NgramCandidates, NgramHistory

__all__ = ["Candidates", "DraftContext", "Drafter", "ForeignCandidates", "NgramCandidates", "NgramHistory"]
