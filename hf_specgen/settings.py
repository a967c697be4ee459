"""The settings of a call that speculates: parsed once from the keywords that a user gave, then only read."""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, Literal, cast

from torch import nn
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from hf_specgen.call import CallSettings, memory
from hf_specgen.candidates.base import Candidates, StartSession, vocabulary_size
from hf_specgen.candidates.combined import PresetCandidates
from hf_specgen.candidates.ngram_history import NgramHistory
from hf_specgen.candidates.transformers_candidates import TransformersCandidates
from hf_specgen.depth import Policy
from hf_specgen.monitor import Monitor
from hf_specgen.verification import ExactVerifier, RejectionVerifier, TypicalVerifier, Verifier

Verification = Literal["exact", "rejection", "typical"]
VERIFIERS = {"exact": ExactVerifier, "rejection": RejectionVerifier, "typical": TypicalVerifier}

History = bool | str | os.PathLike[str] | NgramHistory | None  # what `generate(history=…)` takes
KEYWORDS = ("verification", "policy", "monitor", "compile", "memory", "prediction", "history", "grammar_drafts")
"""Keywords of `generate` that may accompany `candidate_generator=`."""


@dataclass(frozen=True, kw_only=True)
class Settings(CallSettings):
    """The settings of a call that speculates; immutable, so that calls and threads share them. `parse` checks them."""

    candidates: Candidates  # the strategy
    verifier: Verifier
    policy: Policy
    monitor: Monitor | None = None
    history: History = False  # earlier texts for the n-grams of the strategy; True: those that are kept with the target
    start: StartSession | None = None  # begins sessions, where several calls draft together; None: the strategy does

    @classmethod
    def parse(cls, candidate_generator: Any, **keywords: Any) -> Settings:
        """The settings that a user gave by a strategy and any of `KEYWORDS`; raises for those that are not valid.

        Example:
            >>> from hf_specgen import NgramCandidates
            >>> Settings.parse(NgramCandidates(k=5), verification="exact").candidates
            NgramCandidates(k=5)
        """
        candidates = as_candidates(candidate_generator)
        defaults = cls(candidates=candidates, verifier=ExactVerifier(), policy=candidates.policy)
        return defaults.updated(**keywords)

    def updated(self, **keywords: Any) -> Settings:
        """These settings with those that keywords of a call replace, see `parse`."""
        if "verification" in keywords:
            keywords["verifier"] = as_verifier(keywords.pop("verification"))
        if "policy" in keywords and keywords["policy"] is None:
            keywords["policy"] = self.candidates.policy
        settings: Any = replace(self, **keywords)
        if not isinstance(settings.policy, Policy):
            raise TypeError(f"policy must be a Policy such as Schedule({{1: 8, 4: 4, 16: 0}}), got {settings.policy!r}")
        if settings.monitor is not None and not isinstance(settings.monitor, Monitor):
            raise TypeError(f"monitor must be a Monitor such as SpeculationMonitor(), got {settings.monitor!r}")
        if settings.compile not in ("auto", "graphs", False, None):
            raise ValueError(f'compile must be "auto", "graphs" or False, got {settings.compile!r}')
        for name in ("memory", "grammar_drafts"):
            if not isinstance(getattr(settings, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(settings, name)!r}")
        if not isinstance(settings.history, bool | str | os.PathLike | NgramHistory | None):
            raise TypeError(f"history must be True, a file or an NgramHistory, got {settings.history!r}")
        return cast(Settings, settings)

    def for_model(self, model: PreTrainedModel) -> Settings:
        """These settings with the strategy that a preset chooses for a model, and its policy unless one was given.

        The strategy has the history of the call.
        """
        candidates = self.candidates.for_model(model)
        history = self.history
        if history is True:
            history = memory.recall(model, "history", NgramHistory)
            if history.index.max_token >= vocabulary_size(model):  # the embeddings have been cut since
                history = NgramHistory()
            memory.store(model, "history", history)
        elif isinstance(history, str | os.PathLike):
            history = NgramHistory.of_file(history)
        if isinstance(history, NgramHistory):
            candidates = candidates.with_history(history)
        policy = candidates.policy if self.policy is self.candidates.policy else self.policy
        seeds = history.seeds if isinstance(history, NgramHistory) else None
        return replace(self, candidates=candidates, policy=policy, seeds=seeds)


def settings_in(kwargs: dict[str, Any], model: Any = None) -> dict[str, Any]:
    """Our keywords among the arguments of a call, which are removed; those that a model's `forward` has are its own."""
    names = [name for name in KEYWORDS if name in kwargs]
    of_model = inspect.signature(model.forward).parameters if names and model is not None else {}
    return {name: kwargs.pop(name) for name in names if name not in of_model}


def as_verifier(verification: Any) -> Verifier:
    """The verification mode that a user gave, by its name or as an object."""
    if isinstance(verification, Verifier):
        return verification
    if not isinstance(verification, str) or verification not in VERIFIERS:
        modes = ", ".join(map(repr, VERIFIERS))
        raise ValueError(f"verification must be {modes} or a Verifier, got {verification!r}")
    return VERIFIERS[verification]()


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
    remedy = next((f"; {text}" for expected_type, text in remedies.items() if isinstance(generator, expected_type)), "")
    shown = f"a model of type {type(generator).__name__}" if isinstance(generator, nn.Module) else repr(generator)
    raise TypeError(f"candidate_generator must be {expected}, got {shown}{remedy}")
