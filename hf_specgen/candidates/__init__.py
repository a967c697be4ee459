"""Candidate strategies: one file each."""

from hf_specgen.candidates.auto import AutoCandidates as AutoCandidates
from hf_specgen.candidates.base import Candidates as Candidates
from hf_specgen.candidates.base import DraftSession as DraftSession
from hf_specgen.candidates.combined import CombinedCandidates as CombinedCandidates
from hf_specgen.candidates.draft_heads import DFlashCandidates as DFlashCandidates
from hf_specgen.candidates.draft_heads import EagleCandidates as EagleCandidates
from hf_specgen.candidates.draft_heads import GemmaAssistantCandidates as GemmaAssistantCandidates
from hf_specgen.candidates.draft_heads import MedusaCandidates as MedusaCandidates
from hf_specgen.candidates.draft_heads import MTPCandidates as MTPCandidates
from hf_specgen.candidates.draft_heads import PEagleCandidates as PEagleCandidates
from hf_specgen.candidates.draft_model import DraftModelCandidates as DraftModelCandidates
from hf_specgen.candidates.layer_skip import LayerSkipCandidates as LayerSkipCandidates
from hf_specgen.candidates.ngram import NgramCandidates as NgramCandidates
from hf_specgen.candidates.ngram_history import NgramHistory as NgramHistory
from hf_specgen.candidates.recycling import RecyclingCandidates as RecyclingCandidates
from hf_specgen.candidates.transformers_candidates import TransformersCandidates as TransformersCandidates
from hf_specgen.candidates.uno import UnoCandidates as UnoCandidates
