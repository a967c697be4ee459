"""Verification modes: they decide which draft tokens are accepted."""

from hf_specgen.verification.base import VerificationSession, Verifier
from hf_specgen.verification.exact import ExactVerifier
from hf_specgen.verification.rejection import RejectionVerifier, TypicalVerifier
from hf_specgen.verification.result import VerificationResult

__all__ = [
    "ExactVerifier",
    "RejectionVerifier",
    "TypicalVerifier",
    "VerificationResult",
    "VerificationSession",
    "Verifier",
]
