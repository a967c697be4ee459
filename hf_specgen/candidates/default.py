"""The strategy that `candidate_generator="auto"` stands for."""

from __future__ import annotations

from functools import cache

from hf_specgen.candidates.base import Candidates
from hf_specgen.candidates.combined import CombinedCandidates


@cache
def default_candidates() -> Candidates:
    """A strategy that needs no files and no training: n-grams and Token Recycling, with what it has learnt so far.

    Example:
        >>> default_candidates().negligible_draft_cost
        True
    """
    return CombinedCandidates()
