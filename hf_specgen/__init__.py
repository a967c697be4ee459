"""Exactly lossless speculative decoding inside `model.generate()`.

The names below are imported when they are first used, so that `import hf_specgen` takes no time beside
`import transformers`.

Example:
    >>> from hf_specgen import NgramCandidates
    >>> # model.generate(**inputs, candidate_generator=NgramCandidates(k=5))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_specgen.patch import install, uninstall
from hf_specgen.version import __version__

if TYPE_CHECKING:
    from hf_specgen.attachment import attach, attached, detach, statistics
    from hf_specgen.call import Call
    from hf_specgen.candidates import (
        AutoCandidates,
        Candidates,
        CombinedCandidates,
        DFlashCandidates,
        DraftModelCandidates,
        DraftSession,
        EagleCandidates,
        GemmaAssistantCandidates,
        LayerSkipCandidates,
        MedusaCandidates,
        MTPCandidates,
        NgramCandidates,
        NgramHistory,
        PEagleCandidates,
        RecyclingCandidates,
        RecyclingTable,
    )
    from hf_specgen.candidates.base import DraftCall
    from hf_specgen.counters import CallTotals, Statistics, StepRecord
    from hf_specgen.depth import (
        AdaptiveDepth,
        FixedDepth,
        MovingWindow,
        Policy,
        PolicySession,
        Schedule,
    )
    from hf_specgen.generate import speculate
    from hf_specgen.monitoring.monitor import Monitor, MonitorSession, SpeculationMonitor
    from hf_specgen.outputs import SpeculativeOutput
    from hf_specgen.prepacked_weights import prepacked
    from hf_specgen.tree import DraftTree
    from hf_specgen.verification import VerificationResult, VerificationSession, Verifier

__all__ = [
    "AdaptiveDepth",
    "AutoCandidates",
    "Call",
    "CallTotals",
    "Candidates",
    "CombinedCandidates",
    "DFlashCandidates",
    "DraftCall",
    "DraftModelCandidates",
    "DraftSession",
    "DraftTree",
    "EagleCandidates",
    "FixedDepth",
    "GemmaAssistantCandidates",
    "LayerSkipCandidates",
    "MTPCandidates",
    "MedusaCandidates",
    "Monitor",
    "MonitorSession",
    "MovingWindow",
    "NgramCandidates",
    "NgramHistory",
    "PEagleCandidates",
    "Policy",
    "PolicySession",
    "RecyclingCandidates",
    "RecyclingTable",
    "Schedule",
    "SpeculationMonitor",
    "SpeculativeOutput",
    "Statistics",
    "StepRecord",
    "VerificationResult",
    "VerificationSession",
    "Verifier",
    "__version__",
    "attach",
    "attached",
    "detach",
    "install",
    "prepacked",
    "speculate",
    "statistics",
    "uninstall",
]

_MODULES = {
    "attachment": "attach attached detach statistics",
    "candidates": "AutoCandidates Candidates CombinedCandidates DFlashCandidates DraftModelCandidates DraftSession "
    "EagleCandidates GemmaAssistantCandidates LayerSkipCandidates MTPCandidates MedusaCandidates NgramCandidates "
    "NgramHistory PEagleCandidates RecyclingCandidates RecyclingTable",
    "call": "Call",
    "candidates.base": "DraftCall",
    "counters": "CallTotals Statistics StepRecord",
    "depth": "AdaptiveDepth FixedDepth MovingWindow Policy PolicySession Schedule",
    "generate": "speculate",
    "monitoring.monitor": "Monitor MonitorSession SpeculationMonitor",
    "outputs": "SpeculativeOutput",
    "prepacked_weights": "prepacked",
    "tree": "DraftTree",
    "verification": "VerificationResult VerificationSession Verifier",
}
"""Where each lazily imported name is defined. `tests/unit/test_start_up.py` compares it with `__all__`."""
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


install()
