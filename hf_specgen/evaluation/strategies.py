"""Builds strategies from the names of draft models, heads and adapters, as passed on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from hf_specgen.candidates import (
    AutoCandidates,
    Candidates,
    CombinedCandidates,
    DFlashCandidates,
    DraftModelCandidates,
    EagleCandidates,
    GemmaAssistantCandidates,
    LayerSkipCandidates,
    MedusaCandidates,
    MTPCandidates,
    NgramCandidates,
    PEagleCandidates,
)
from hf_specgen.evaluation.measure import Variant
from hf_specgen.evaluation.workloads import ASSISTANT, DFLASH, DRAFT, EAGLE, MEDUSA, MTP, NGRAM, PEAGLE, SKIP
from hf_specgen.heads.checkpoint import check_source
from hf_specgen.heads.exit_head import exit_layer_of

COMBINED = "n-grams + draft"
HEAD_NAMES: dict[type[Candidates], str] = {
    MedusaCandidates: MEDUSA,
    EagleCandidates: EAGLE,
    PEagleCandidates: PEAGLE,
    DFlashCandidates: DFLASH,
    MTPCandidates: MTP,
    GemmaAssistantCandidates: ASSISTANT,
}


@dataclass(frozen=True)
class Strategy:
    """A strategy and the code that builds it.

    Args:
        name: for tables.
        code: the Python expression that builds it.
        candidates: the strategy.
    """

    name: str
    code: str
    candidates: Candidates

    def variant(self, **settings: Any) -> Variant:
        """The strategy as a variant to measure, with further arguments of `generate` such as `verification`."""
        return Variant(self.name, partial(dict, candidate_generator=self.candidates, **settings))


def strategies(draft: str = "", heads: str = "", adapter: str = "", *, dtype: Any = "auto") -> list[Strategy]:
    """Every strategy that can be built, in order of draft cost: n-grams always, the others if their files are named.

    Args:
        draft, heads, adapter: folder or Hub id of a draft model, heads of any known format, an exit adapter; "" for
            none. Draft model and heads are loaded by the first call.
        dtype: of the draft model.

    Raises:
        FileNotFoundError: if a folder does not exist.
        ValueError: if the adapter's config is damaged, or the heads are of an unknown format.
    """
    for source in filter(None, (draft, heads, adapter)):
        check_source(source)
    found = [Strategy(NGRAM, "NgramCandidates()", NgramCandidates())]
    if heads:
        found.append(head_strategy(heads))
    if adapter:
        layer = exit_layer_of(adapter)
        code = f"LayerSkipCandidates({layer}, adapter={adapter!r})"
        found.append(Strategy(SKIP, code, LayerSkipCandidates(layer, adapter=adapter)))
    if draft:
        model = Strategy(DRAFT, f"DraftModelCandidates({draft!r})", DraftModelCandidates(draft, dtype=dtype))
        combined = CombinedCandidates([NgramCandidates(), model.candidates])
        found += [model, Strategy(COMBINED, f"CombinedCandidates([NgramCandidates(), {model.code}])", combined)]
    return found


def head_strategy(heads: str, **settings: Any) -> Strategy:
    """The strategy for heads of any known format.

    Args:
        heads: folder or Hub id.
        settings: of the strategy, such as `k=4`.

    Raises:
        FileNotFoundError: if there are none.
        ValueError: if the format is unknown.
    """
    candidates = AutoCandidates.from_pretrained(heads, **settings)
    kind = type(candidates)
    if kind not in HEAD_NAMES:
        raise ValueError(f"{heads!r} holds no heads, but what {kind.__name__} drafts with; name it as such")
    given = "".join(f", {name}={value!r}" for name, value in settings.items())
    return Strategy(HEAD_NAMES[kind], f"{kind.__name__}({heads!r}{given})", candidates)
