"""The variants that `hf-specgen demo` measures: plain `generate`, Transformers' prompt lookup, and our strategies."""

from __future__ import annotations

from functools import partial
from typing import Any

from hf_specgen.candidates import Candidates, NgramCandidates
from hf_specgen.cli.settings import DemoSettings
from hf_specgen.depth import FixedDepth
from hf_specgen.evaluation.measure import Variant
from hf_specgen.evaluation.strategies import head_strategy, strategies
from hf_specgen.evaluation.workloads import (
    EMBEDDED_ADAPTER,
    EMBEDDED_DFLASH,
    EMBEDDED_DRAFT,
    EMBEDDED_EAGLE,
    EMBEDDED_HEADS,
    NGRAM,
    PACKED,
    PEER,
    PLAIN,
)


def variants(settings: DemoSettings, packed: bool = False) -> list[Variant]:
    """Plain `generate`, Transformers' prompt lookup, then our strategies: those named, or the fastest embedded ones.

    Args:
        settings: of the demo.
        packed: run ours with packed weights; what those bring without drafts is then a variant of its own.
    """
    draft, adapter, heads = settings.draft, settings.adapter, [settings.heads] if settings.heads else []
    if not settings.model:
        draft = draft or str(EMBEDDED_DRAFT)
        adapter = adapter or (str(EMBEDDED_ADAPTER) if settings.every else "")
        shipped = (EMBEDDED_EAGLE, EMBEDDED_HEADS, EMBEDDED_DFLASH) if settings.every else (EMBEDDED_EAGLE,)
        heads = heads or [str(folder) for folder in shipped if folder.exists()]
    built = [*strategies(draft, "", adapter, dtype=settings.dtype), *map(head_strategy, heads)]
    found: dict[str, Candidates] = {strategy.name: strategy.candidates for strategy in built}
    found[NGRAM] = NgramCandidates(k=settings.k)
    if packed:
        found = {PACKED: NgramCandidates(policy=FixedDepth(0)), **found}
    ours: Any = partial(dict, verification=settings.verification, pack_weights=packed)
    return [
        Variant(PLAIN, dict),
        Variant(PEER, lambda: {"prompt_lookup_num_tokens": 10}, batched=False),
        *(Variant(name, partial(ours, candidate_generator=strategy)) for name, strategy in found.items()),
    ]
