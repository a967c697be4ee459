"""Presets: strategies by purpose, chosen when the target is known."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal, get_args
from weakref import WeakSet

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
        if name not in get_args(Preset):
            names = ", ".join(map(repr, get_args(Preset)))
            raise ValueError(
                f"there is no preset {name!r}; choose {names}, or give a strategy such as NgramCandidates(), for a "
                "checkpoint AutoCandidates.from_pretrained(name)"
            )
        self.name = name

    def for_model(self, model: PreTrainedModel) -> Candidates:
        has_layer = any(getattr(text_config(model), name, None) for name in MTP_FIELDS)
        if self.name == "latency" and has_layer and model not in _without_layer:
            try:
                _build("mtp").target_requirements(model)
                return _build("mtp")
            except (OSError, ValueError):
                _without_layer.add(model)
        return _build(self.name)

    def start(self, call: DraftCall) -> DraftSession:
        return default_candidates().start(call)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


_without_layer: WeakSet[PreTrainedModel] = WeakSet()
"""Targets whose config names a multi-token prediction layer that their checkpoint does not have."""
_BUILDERS: dict[str, Callable[[], Candidates]] = {
    "auto": default_candidates,
    "latency": default_candidates,
    "throughput": NgramCandidates,
    "memory": lambda: NgramCandidates(k=8, policy=AdaptiveDepth()),
    "mtp": lambda: CombinedCandidates([NgramCandidates(), MTPCandidates()]),
}


@cache
def _build(name: str) -> Candidates:
    """The strategy of a preset, one object for all calls: it keeps the modules that it has loaded."""
    return _BUILDERS[name]()
