"""Loads the strategies of this package and their peers in Transformers by name, with all settings that are tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.harness.variants import AUTO, Arguments, Family, Strategy, StrategyError
from benchmarks.workloads.scripted import AlwaysRejected
from hf_specgen import (
    AutoCandidates,
    Candidates,
    CombinedCandidates,
    DraftModelCandidates,
    FixedDepth,
    LayerSkipCandidates,
    MedusaCandidates,
    NgramCandidates,
    Policy,
)
from hf_specgen.candidates.base import Depth
from hf_specgen.candidates.draft_heads import HeadCandidates
from hf_specgen.candidates.draft_model import have_same_vocabulary
from hf_specgen.depth import LatencyModel
from hf_specgen.evaluation.workloads import (
    EMBEDDED_ADAPTER,
    EMBEDDED_DFLASH,
    EMBEDDED_DRAFT,
    EMBEDDED_EAGLE,
    EMBEDDED_HEADS,
    EMBEDDED_MODEL,
    HEAD_NAMES,
)
from hf_specgen.heads import load_head
from hf_specgen.heads.exit_head import exit_layer_of

NGRAM_DEPTHS, DRAFT_DEPTHS, EXIT_DEPTHS, MEDUSA_NODES = (4, 8, 16), (2, 4, 6), (1, 2, 4), (4, 8, 16)
HEAD_DEPTHS = (2, 4, 6)
"""With trees of four nodes for each level."""
LOOKUP = ((3, 2), (5, 2), (10, 2), (10, 3), (20, 3))
"""Settings of Transformers' prompt lookup: draft tokens and n-gram size."""
CONFIDENT = (20, 0.4)
"""Transformers' defaults for assistants: up to 20 tokens, while the draft's confidence is above 0.4."""


def build(
    strategies: Sequence[str], peers: Sequence[str], model: PreTrainedModel, latency: LatencyModel | None = None
) -> list[Family]:
    """The families to measure.

    Args:
        strategies: "ngram", "auto", "draft=MODEL", "layerskip=ADAPTER" (or =LAYER without one), "medusa=HEADS",
            "eagle=HEAD", "dflash=HEAD" or "heads=HEAD" of any format (ids or folders), or several joined by "+";
            without "=…" the files that ship for the embedded model.
        peers: "transformers" for the same strategies in Transformers; or empty.
        model: the target.
        latency: decides for "auto".

    Raises:
        StrategyError: for anything else, and for a draft model, adapter or heads that do not fit the target.
    """
    if unknown := sorted(set(peers) - {"transformers"}):
        raise StrategyError(f"unknown peer {unknown[0]!r}; there is transformers")
    families: list[Family] = []
    for text in strategies:
        strategy = load_strategy(text, model)
        try:
            families.append(strategy.family(latency))
        except ValueError as error:
            raise StrategyError(f"{text}: {error}") from error
        families += [strategy.peer] if strategy.peer is not None and peers else []
    return families


def load_strategy(text: str, model: PreTrainedModel) -> Strategy:
    """Load what a strategy needs.

    Args:
        text: as for `build`.
        model: the target.

    Raises:
        StrategyError: as `build`.
    """
    if "+" in text:
        return _combined([load_strategy(part, model) for part in text.split("+")])
    name, _, source = text.partition("=")
    if name not in LOADERS:
        raise StrategyError(f"unknown strategy {name!r}; there are {', '.join(LOADERS)}")
    try:
        return LOADERS[name](source or _shipped(name, model), model)
    except (OSError, ValueError) as error:
        raise StrategyError(f"{text}: {error}") from error


def _shipped(name: str, model: PreTrainedModel) -> str:
    if name not in SHIPPED:
        return ""
    if str(model.name_or_path) != str(EMBEDDED_MODEL):
        raise StrategyError(f"{name} needs a file or id for this model: {name}=…")
    return SHIPPED[name]


def _ngram(source: str, model: PreTrainedModel) -> Strategy:
    if source:
        raise StrategyError(f"ngram takes no source, got {source!r}")
    lookup: dict[str, Arguments] = {
        f"k={k} n={n}": partial(dict, prompt_lookup_num_tokens=k, max_matching_ngram_size=n) for k, n in LOOKUP
    }
    peer = Family("prompt lookup", lookup, ours=False)
    return Strategy("n-grams", lambda k, policy: NgramCandidates(k=k, policy=policy), NGRAM_DEPTHS, peer=peer)


def _default(source: str, model: PreTrainedModel) -> Strategy:
    if source:
        raise StrategyError(f"auto takes no source, got {source!r}")

    def make(k: Depth, policy: Policy | None) -> Candidates:
        fixed = policy or (None if k == AUTO else FixedDepth(int(k)))
        return CombinedCandidates(policy=fixed)

    return Strategy("n-grams + recycling", make, NGRAM_DEPTHS)


def _draft(source: str, model: PreTrainedModel) -> Strategy:
    draft = AutoModelForCausalLM.from_pretrained(source, dtype=model.dtype, device_map=model.device).eval()
    if not have_same_vocabulary(draft, model):
        raise StrategyError(
            f"{source!r} has another tokenizer than the target; assistant_model cannot be compared with it"
        )
    peer = Family("assistant_model", _assisted(draft, DRAFT_DEPTHS, assistant_model=draft), ours=False)
    return Strategy(
        "draft model", lambda k, policy: DraftModelCandidates(draft, k=k, policy=policy), DRAFT_DEPTHS, peer=peer
    )


def _layer_skip(source: str, model: PreTrainedModel) -> Strategy:
    adapter = None if source.isdigit() else source
    layer = int(source) if adapter is None else exit_layer_of(adapter)
    name = "layer skip" if adapter else "layer skip without adapter"
    peer = Family("assistant_early_exit", _assisted(model, EXIT_DEPTHS, assistant_early_exit=layer), ours=False)
    return Strategy(
        name, lambda k, policy: LayerSkipCandidates(layer, k=k, adapter=adapter, policy=policy), EXIT_DEPTHS, peer=peer
    )


def _medusa(source: str, model: PreTrainedModel) -> Strategy:
    heads = load_head(source)
    heads.bind(model)  # raises for heads of another target
    return Strategy(
        "Medusa", lambda tree, policy: MedusaCandidates(heads, tree=tree, policy=policy), MEDUSA_NODES, "tree"
    )


def _heads(source: str, model: PreTrainedModel) -> Strategy:
    """EAGLE, P-EAGLE, DFlash or JetSpec heads; for MTP the target's own checkpoint."""
    found = AutoCandidates.from_pretrained(source)
    if not isinstance(found, HeadCandidates):
        raise StrategyError(f"{source} holds no head that reads the target's hidden states, but {found!r}")
    kind: Any = type(found)
    return Strategy(
        HEAD_NAMES[kind.__name__],
        lambda k, policy: kind(source, k, tree=None if k == AUTO else 4 * k, policy=policy),
        HEAD_DEPTHS,
    )


def _rejected(source: str, model: PreTrainedModel) -> Strategy:
    return Strategy("always rejected", lambda k, policy: AlwaysRejected(k, policy=policy), (5,))


def _combined(members: Sequence[Strategy]) -> Strategy:
    def make(k: Depth, policy: Policy | None) -> Candidates:
        fixed = policy or (None if k == AUTO else FixedDepth(int(k)))
        return CombinedCandidates([member.make(k, None) for member in members], policy=fixed)

    return Strategy(" + ".join(member.name for member in members), make, members[-1].depths)


def _assisted(drafting: PreTrainedModel, lengths: Sequence[int], **arguments: Any) -> dict[str, Arguments]:
    """Transformers reads k from the generation config of the model that drafts; as an argument it has no effect."""

    def with_length(k: int, threshold: float) -> dict[str, Any]:
        config = cast(Any, drafting).generation_config
        config.num_assistant_tokens = k
        config.num_assistant_tokens_schedule = "constant"
        config.assistant_confidence_threshold = threshold
        return arguments

    settings = {f"k={k}": partial(with_length, k, 0.0) for k in lengths}
    return {**settings, "k={} p>{}".format(*CONFIDENT): partial(with_length, *CONFIDENT)}


LOADERS: dict[str, Callable[[str, PreTrainedModel], Strategy]] = {
    "ngram": _ngram,
    "auto": _default,
    "draft": _draft,
    "layerskip": _layer_skip,
    "medusa": _medusa,
    "eagle": _heads,
    "dflash": _heads,
    "heads": _heads,
    "rejected": _rejected,
}
SHIPPED = {
    "draft": str(EMBEDDED_DRAFT),
    "layerskip": str(EMBEDDED_ADAPTER),
    "medusa": str(EMBEDDED_HEADS),
    "eagle": str(EMBEDDED_EAGLE),
    "dflash": str(EMBEDDED_DFLASH),
}
