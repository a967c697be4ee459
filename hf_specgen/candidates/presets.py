"""Presets: strategies by purpose, chosen when the target is known."""

from __future__ import annotations

from functools import cache
from typing import Literal
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from hf_specgen.candidates.base import Candidates, DraftCall, DraftSession
from hf_specgen.candidates.combined import CombinedCandidates, default_candidates
from hf_specgen.candidates.draft_heads import MTPCandidates
from hf_specgen.candidates.ngram import NgramCandidates
from hf_specgen.depth import AdaptiveDepth
from hf_specgen.targets.model_parts import text_config

Preset = Literal["auto", "latency", "throughput", "memory"]
MTP_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""Fields of configs with the number of multi-token prediction layers."""


class PresetCandidates(Candidates):
    """The strategy for a purpose. All need no further checkpoint, and draft while that is faster than plain decoding.

    - "auto": n-grams and Token Recycling, in trees.
    - "latency": for single requests. N-grams and the multi-token prediction layer in the target's own checkpoint, if it
      has one; otherwise as "auto".
    - "throughput": for batches. N-grams in trees, whose size follows from the latency of the rows together; nothing is
      computed for rows that repeat nothing.
    - "memory": n-grams in chains of at most 8 tokens; no weights and no tables, a few slots of cache a row.

    Args:
        name: one of these.

    Raises:
        ValueError: for another name.
    """

    def __init__(self, name: str):
        super().__init__()
        if name not in _BUILDERS:
            names = ", ".join(map(repr, _BUILDERS))
            raise ValueError(
                f"there is no preset {name!r}; choose {names}, or give a strategy such as NgramCandidates()"
            )
        self.name = name

    def for_model(self, model: PreTrainedModel) -> Candidates:
        if self.name == "latency" and _has_mtp_layer(model):
            return _with_mtp()
        return _BUILDERS[self.name]()

    def start(self, call: DraftCall) -> DraftSession:
        return default_candidates().start(call)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


def _has_mtp_layer(model: PreTrainedModel) -> bool:
    """Whether the target's config names an MTP layer that can be loaded from its checkpoint."""
    if not any(getattr(text_config(model), name, None) for name in MTP_FIELDS):
        return False
    if model not in _loadable:
        try:
            _with_mtp().target_requirements(model)
            _loadable[model] = True
        except (OSError, ValueError):
            _loadable[model] = False
    return _loadable[model]


_loadable: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()
"""Whether the checkpoint of a target has the layer that its config names."""


@cache
def _with_mtp() -> Candidates:
    return CombinedCandidates([NgramCandidates(), MTPCandidates()])


@cache
def _ngrams() -> Candidates:
    return NgramCandidates()


@cache
def _short_chains() -> Candidates:
    return NgramCandidates(k=8, policy=AdaptiveDepth())


_BUILDERS = {
    "auto": default_candidates,
    "latency": default_candidates,
    "throughput": _ngrams,
    "memory": _short_chains,
}
