"""Candidate strategies: one file each."""

from hf_specgen.candidates.auto import AutoCandidates
from hf_specgen.candidates.base import Candidates, DraftSession
from hf_specgen.candidates.combined import CombinedCandidates
from hf_specgen.candidates.draft_heads import (
    DFlashCandidates,
    EagleCandidates,
    GemmaAssistantCandidates,
    MTPCandidates,
    PEagleCandidates,
)
from hf_specgen.candidates.draft_model import DraftModelCandidates
from hf_specgen.candidates.layer_skip import LayerSkipCandidates
from hf_specgen.candidates.medusa import MedusaCandidates
from hf_specgen.candidates.ngram import NgramCandidates
from hf_specgen.candidates.ngram_history import NgramHistory
from hf_specgen.candidates.recycling import RecyclingCandidates, RecyclingTable
from hf_specgen.candidates.transformers_candidates import TransformersCandidates

__all__ = [
    "AutoCandidates",
    "Candidates",
    "CombinedCandidates",
    "DFlashCandidates",
    "DraftModelCandidates",
    "DraftSession",
    "EagleCandidates",
    "GemmaAssistantCandidates",
    "LayerSkipCandidates",
    "MTPCandidates",
    "MedusaCandidates",
    "NgramCandidates",
    "NgramHistory",
    "PEagleCandidates",
    "RecyclingCandidates",
    "RecyclingTable",
    "TransformersCandidates",
]
