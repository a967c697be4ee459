"""The strategy that `candidate_generator="auto"` stands for."""

from __future__ import annotations

from hf_specgen.candidates.base import Candidates
from hf_specgen.candidates.ngram import NgramCandidates


def default_candidates() -> Candidates:
    """A strategy that needs no files and no training.

    Example:
        >>> default_candidates().negligible_draft_cost
        True
    """
    return NgramCandidates()
