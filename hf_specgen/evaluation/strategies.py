"""Strategies by the names of their draft models, heads and adapters, as options of the command line give them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from hf_specgen.candidates import (
    Candidates,
    CombinedCandidates,
    DraftModelCandidates,
    LayerSkipCandidates,
    MedusaCandidates,
    NgramCandidates,
)
from hf_specgen.evaluation.measure import Variant
from hf_specgen.evaluation.workloads import DRAFT, MEDUSA, NGRAM, SKIP
from hf_specgen.heads.exit_head import exit_layer_of
from hf_specgen.heads.files import check_source

COMBINED = "n-grams + draft"


@dataclass(frozen=True)
class Strategy:
    """A strategy and how it is written.

    Args:
        name: for tables.
        code: the Python expression that builds it.
        candidates: the strategy.
    """

    name: str
    code: str
    candidates: Candidates

    def variant(self, **settings: Any) -> Variant:
        """The strategy as a way to generate, with further settings of the call such as `verification`."""
        return Variant(self.name, partial(dict, candidate_generator=self.candidates, **settings))


def strategies(draft: str = "", heads: str = "", adapter: str = "", *, dtype: Any = "auto") -> list[Strategy]:
    """Every strategy that can be built, the cheapest to draft with first: n-grams always, the others if they are named.

    Args:
        draft, heads, adapter: folder or Hub id of a draft model, heads, an exit adapter; "" for none. Draft model
            and heads are loaded by the first call.
        dtype: of the draft model.

    Raises:
        FileNotFoundError: if a folder does not exist.
        ValueError: if the adapter's config is damaged.
    """
    for source in filter(None, (draft, heads, adapter)):
        check_source(source)
    found = [Strategy(NGRAM, "NgramCandidates()", NgramCandidates())]
    if heads:
        found.append(Strategy(MEDUSA, f"MedusaCandidates({heads!r})", MedusaCandidates(heads)))
    if adapter:
        layer = exit_layer_of(adapter)
        code = f"LayerSkipCandidates({layer}, adapter={adapter!r})"
        found.append(Strategy(SKIP, code, LayerSkipCandidates(layer, adapter=adapter)))
    if draft:
        model = Strategy(DRAFT, f"DraftModelCandidates({draft!r})", DraftModelCandidates(draft, dtype=dtype))
        combined = CombinedCandidates([NgramCandidates(), model.candidates])
        found += [model, Strategy(COMBINED, f"CombinedCandidates([NgramCandidates(), {model.code}])", combined)]
    return found
