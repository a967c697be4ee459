"""The settings of a call that speculates: checks what a user gave, and names the keywords."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import PurePath
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from hf_specgen.call import Compile, Prediction
from hf_specgen.candidates.base import Candidates
from hf_specgen.candidates.combined import PresetCandidates
from hf_specgen.candidates.transformers_candidates import TransformersCandidates
from hf_specgen.depth import Policy
from hf_specgen.monitor import Monitor
from hf_specgen.verification import CoupledVerifier, RejectionVerifier, TypicalVerifier, Verifier

Verification = Literal["exact", "rejection", "typical"]
VERIFIERS = {"exact": CoupledVerifier, "rejection": RejectionVerifier, "typical": TypicalVerifier}


@dataclass(frozen=True)
class Settings:
    """The settings of a call that speculates, as a user gives them; immutable, so that calls and threads share them."""

    candidates: Any
    verification: Any = "exact"
    policy: Any = None
    monitor: Monitor | None = None
    compile: Compile = "auto"
    memory: bool = True
    prediction: Prediction | None = None
    grammar_drafts: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "candidates", as_candidates(self.candidates))
        if not isinstance(self.verification, Verifier):
            if not isinstance(self.verification, str) or self.verification not in VERIFIERS:
                modes = ", ".join(map(repr, VERIFIERS))
                raise ValueError(f"verification must be {modes} or a Verifier, got {self.verification!r}")
            object.__setattr__(self, "verification", VERIFIERS[self.verification]())
        if self.policy is not None and not isinstance(self.policy, Policy):
            raise TypeError(f"policy must be a Policy such as Schedule({{1: 8, 4: 4, 16: 0}}), got {self.policy!r}")
        if self.monitor is not None and not isinstance(self.monitor, Monitor):
            raise TypeError(f"monitor must be a Monitor such as SpeculationMonitor(), got {self.monitor!r}")
        if self.compile not in ("auto", "graphs", False, None):
            raise ValueError(f'compile must be "auto", "graphs" or False, got {self.compile!r}')
        for name in ("memory", "grammar_drafts"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")

    def for_model(self, model: PreTrainedModel) -> Settings:
        """These settings with the strategy that a preset chooses for a model, and its policy unless one was given."""
        candidates = self.candidates.for_model(model)
        return replace(self, candidates=candidates, policy=self.policy or candidates.policy)


CALL_SETTINGS = tuple(field.name for field in fields(Settings)[1:])
"""Keywords of `generate` that may accompany `candidate_generator=`."""


def settings_in(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Our settings among the arguments of a call, which are removed."""
    return {name: kwargs.pop(name) for name in CALL_SETTINGS if name in kwargs}


def as_candidates(generator: Any) -> Candidates:
    """The strategy that a user gave: one of ours, a generator of Transformers, or the name of a preset."""
    if isinstance(generator, str):
        return PresetCandidates(generator)
    if isinstance(generator, Candidates):
        return generator
    if isinstance(generator, CandidateGenerator):
        return TransformersCandidates(generator)
    expected = 'a preset such as "auto", or a CandidateGenerator such as NgramCandidates(k=5)'
    remedies: dict[type, str] = {
        nn.Module: "for a draft model give DraftModelCandidates(model)",
        PurePath: "for a checkpoint give AutoCandidates.from_pretrained(path)",
        list: "for several strategies give CombinedCandidates([...])",
        type: "give an object, with parentheses behind the name",
    }
    remedy = next((f"; {text}" for kind, text in remedies.items() if isinstance(generator, kind)), "")
    given = f"a model of type {type(generator).__name__}" if isinstance(generator, nn.Module) else repr(generator)
    raise TypeError(f"candidate_generator must be {expected}, got {given}{remedy}")
