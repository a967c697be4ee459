"""Which guesses stand: the verification modes, and what they have in common."""

from hf_specgen.verification.base import Verdict, Verifier
from hf_specgen.verification.coupled import CoupledVerifier

__all__ = ["CoupledVerifier", "Verdict", "Verifier"]
