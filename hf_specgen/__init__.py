"""Speculative decoding inside `model.generate()`: the tokens of plain `generate`, in float32 exactly.

The names below are imported when they are first used, so that `import hf_specgen` takes no time beside
`import transformers`.

Example:
    >>> from hf_specgen import NgramCandidates
    >>> # model.generate(**inputs, candidate_generator=NgramCandidates(k=5))
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import Any

from hf_specgen.patch import install as install
from hf_specgen.patch import uninstall as uninstall

_MODULES = {
    "attachment": "attach attached detach statistics",
    "candidates": "AutoCandidates Candidates CombinedCandidates DFlashCandidates DraftModelCandidates DraftSession "
    "EagleCandidates GemmaAssistantCandidates LayerSkipCandidates MTPCandidates MedusaCandidates NgramCandidates "
    "NgramHistory PEagleCandidates RecyclingCandidates UnoCandidates",
    "call": "Call",
    "candidates.draft_batch": "DraftBatch",
    "call_statistics": "CallTotals Statistics StepRecord",
    "depth": "AdaptiveDepth FixedDepth MovingWindow Policy PolicySession Schedule",
    "generate": "speculate",
    "batching.many_prompts": "Completion generate_many",
    "monitor": "Monitor MonitorSession SpeculationMonitor",
    "outputs": "SpeculativeOutput",
    "prepacked_weights": "prepacked",
    "tree": "DraftTree",
    "verification": "VerificationResult VerificationSession Verifier",
}
"""Where each lazily imported name is defined; `__init__.pyi` has them for type checkers."""
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted([*_HOMES, "__version__", "install", "uninstall"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name in _HOMES:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _version() -> str:
    """The version of the installed package, which setuptools-scm takes from the tags of the repository."""
    try:
        return metadata.version("hf-specgen")
    except metadata.PackageNotFoundError:  # a folder of PYTHONPATH that was never installed
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


install()
