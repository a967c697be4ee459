"""Loads the strategies of this package and their peers in Transformers by name, with all settings that are tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.harness.variants import AUTO, Arguments, Family, Strategy, ours
from hf_specgen import (
    AutoCandidates,
    Candidates,
    CombinedCandidates,
    DraftModelCandidates,
    FixedDepth,
    LayerSkipCandidates,
    NgramCandidates,
    Policy,
)
from hf_specgen.candidates.base import Depth
from hf_specgen.candidates.draft_heads import HeadCandidates
from hf_specgen.candidates.draft_model import have_same_vocabulary
from hf_specgen.depth import LatencyModel
from hf_specgen.evaluation import workloads
from hf_specgen.heads.exit_head import exit_layer_of

NGRAM_DEPTHS, DRAFT_DEPTHS, EXIT_DEPTHS, HEAD_DEPTHS = (4, 8, 16), (2, 4, 6), (1, 2, 4), (2, 4, 6)
"""Tried depths, besides "auto"."""
LOOKUP = ((3, 2), (5, 2), (10, 2), (10, 3), (20, 3))
"""Settings of Transformers' prompt lookup: draft tokens and n-gram size."""
BRANCHED: dict[str, Any] = {"k": 8, "tree": 32}
"""One more setting of n-grams, so that both sides try five."""
CONFIDENT = (20, 0.4)
"""Transformers' defaults for assistants: up to 20 tokens, while the draft's confidence is above 0.4."""
SHIPPED = {
    "draft": str(workloads.BUNDLED_DRAFT),
    "layerskip": str(workloads.BUNDLED_ADAPTER),
    "medusa": str(workloads.BUNDLED_HEADS),
    "eagle": str(workloads.BUNDLED_EAGLE),
    "dspark": str(workloads.BUNDLED_DSPARK),
}
"""The files of the bundled model."""


class StrategyError(ValueError):
    """A strategy that is unknown, incomplete, or does not fit the model."""


def build(
    strategies: Sequence[str], peers: Sequence[str], model: PreTrainedModel, latency: LatencyModel | None = None
) -> list[Family]:
    """The families to measure; a `StrategyError` for what is unknown, or does not fit the target.

    Args:
        strategies: "ngram", "auto", "draft=MODEL", "layerskip=ADAPTER" (or =LAYER without one), "medusa=HEADS",
            "eagle=HEAD", "dspark=HEAD" or "heads=HEAD" of any format (ids or folders), or several joined by "+";
            without "=…" the files that ship for the bundled model.
        peers: "transformers" for the same strategies in Transformers; or empty.
        latency: decides for "auto".
    """
    if unknown := sorted(set(peers) - {"transformers"}):
        raise StrategyError(f"unknown peer {unknown[0]!r}; there is transformers")
    families: list[Family] = []
    for text in strategies:
        try:
            strategy = _load(text, model)
            families.append(strategy.family(latency))
        except StrategyError:
            raise
        except (OSError, ValueError) as error:
            raise StrategyError(f"{text}: {error}") from error
        families += [strategy.peer] if strategy.peer is not None and peers else []
    return families


def _load(text: str, model: PreTrainedModel) -> Strategy:
    """What a strategy needs, loaded."""
    if "+" in text:
        return _combined([_load(part, model) for part in text.split("+")])
    name, _, source = text.partition("=")
    if name not in (*COPYING, *LOADERS):
        raise StrategyError(f"unknown strategy {name!r}; there are {', '.join((*COPYING, *LOADERS))}")
    if name in COPYING:
        if source:
            raise StrategyError(f"{name} takes no source, got {source!r}")
        return COPYING[name]()
    if not source and (name not in SHIPPED or str(model.name_or_path) != str(workloads.BUNDLED_MODEL)):
        raise StrategyError(f"{name} needs a file or id for this model: {name}=…")
    return LOADERS[name](source or SHIPPED[name], model)


def _ngram() -> Strategy:
    lookup: dict[str, Arguments] = {
        f"k={k} n={n}": partial(dict, prompt_lookup_num_tokens=k, max_matching_ngram_size=n) for k, n in LOOKUP
    }
    branched = {" ".join(f"{name}={value}" for name, value in BRANCHED.items()): ours(NgramCandidates(**BRANCHED))}
    return Strategy(
        "n-grams",
        "NgramCandidates({})",
        lambda k, policy: NgramCandidates(k=k, policy=policy),
        NGRAM_DEPTHS,
        Family("prompt lookup", lookup),
        branched,
    )


def _default() -> Strategy:
    return Strategy(
        "n-grams + recycling",
        "CombinedCandidates()",
        lambda k, policy: CombinedCandidates(policy=policy or _fixed(k)),
        NGRAM_DEPTHS,
    )


def _draft(source: str, model: PreTrainedModel) -> Strategy:
    draft = AutoModelForCausalLM.from_pretrained(source, dtype=model.dtype, device_map=model.device).eval()
    if not have_same_vocabulary(draft, model):
        raise StrategyError(
            f"{source!r} has another tokenizer than the target; assistant_model cannot be compared with it"
        )
    return Strategy(
        "draft model",
        f"DraftModelCandidates({_in_clone(source)!r}, {{}})",
        lambda k, policy: DraftModelCandidates(draft, k=k, policy=policy),
        DRAFT_DEPTHS,
        Family("assistant_model", _assisted(draft, DRAFT_DEPTHS, assistant_model=draft)),
    )


def _layer_skip(source: str, model: PreTrainedModel) -> Strategy:
    adapter = None if source.isdigit() else source
    layer = int(source) if adapter is None else exit_layer_of(adapter)
    shown = f"adapter={_in_clone(source)!r}, " if adapter else ""
    return Strategy(
        "layer skip" if adapter else "layer skip without adapter",
        f"LayerSkipCandidates({layer}, {shown}{{}})",
        lambda k, policy: LayerSkipCandidates(layer, k=k, adapter=adapter, policy=policy),
        EXIT_DEPTHS,
        Family("assistant_early_exit", _assisted(model, EXIT_DEPTHS, assistant_early_exit=layer)),
    )


def _heads(source: str, model: PreTrainedModel, name: str = "") -> Strategy:
    """Medusa, EAGLE, P-EAGLE, DFlash, DSpark or JetSpec heads; for MTP the target's own checkpoint."""
    kind: Any = type(AutoCandidates.from_pretrained(source))
    if not issubclass(kind, HeadCandidates):
        raise StrategyError(f"{source} holds no head that reads the target's hidden states, but {kind.__name__}")
    return Strategy(
        name or workloads.STRATEGY_NAMES[kind.__name__],
        f"{kind.__name__}({_in_clone(source)!r}, {{}})",
        lambda k, policy: kind(source, k, policy=policy),
        HEAD_DEPTHS,
    )


def _in_clone(source: str) -> str:
    """A file of the clone by its path in it: a record must not name the folders of a machine."""
    root, path = workloads.ASSETS.parents[1], Path(source)
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else source


def _combined(members: Sequence[Strategy]) -> Strategy:
    def make(k: Depth, policy: Policy | None) -> Candidates:
        return CombinedCandidates([member.make(k, None) for member in members], policy=policy or _fixed(k))

    built = ", ".join(member.code.format("").replace(", )", ")") for member in members)
    return Strategy(
        " + ".join(member.name for member in members), f"CombinedCandidates([{built}])", make, members[-1].depths
    )


def _fixed(k: Depth) -> Policy | None:
    """The policy of a combination: the default one for "auto"."""
    return None if k == AUTO else FixedDepth(int(k))


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


COPYING: dict[str, Callable[[], Strategy]] = {"ngram": _ngram, "auto": _default}
LOADERS: dict[str, Callable[[str, PreTrainedModel], Strategy]] = {
    "draft": _draft,
    "layerskip": _layer_skip,
    **dict.fromkeys(("medusa", "eagle", "heads"), _heads),
    "dspark": partial(_heads, name="DSpark"),
}
