"""Who takes part: our strategies and Transformers' own, each with the settings that the sweep tries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specgen import Candidates, DraftModelCandidates, LayerSkipCandidates, MedusaCandidates, NgramCandidates
from hf_specgen.candidates.vocabulary import check_vocabularies
from hf_specgen.evaluation.measure import Variant
from hf_specgen.evaluation.workloads import EMBEDDED_ADAPTER, EMBEDDED_DRAFT, EMBEDDED_HEADS, EMBEDDED_MODEL
from hf_specgen.heads import load_medusa
from hf_specgen.heads.exit_head import exit_layer_of

PLAIN = Variant("plain", dict)
Arguments = Callable[[], dict[str, Any]]
# Both sides try as many settings: each fixed length on both, the one that looks after itself on each.
DRAFT_LENGTHS, EXIT_LENGTHS = (2, 4, 6), (1, 2, 4)
SELF_STOPPING = (20, 0.4)  # Transformers' defaults: up to 20 tokens, while the draft is sure of itself
MEDUSA_TREES: tuple[str | int, ...] = (4, 8, 16, "auto")
NGRAM_SETTINGS: tuple[dict[str, Any], ...] = ({"k": 4}, {"k": 8}, {"k": 16}, {"k": "auto"}, {"k": 8, "branches": 4})
LOOKUP_SETTINGS = [
    {"prompt_lookup_num_tokens": k, "max_matching_ngram_size": n}
    for k, n in ((3, 2), (5, 2), (10, 2), (10, 3), (20, 3))
]


class StrategyError(ValueError):
    """A strategy that is unknown, incomplete, or does not fit the model."""


@dataclass(frozen=True)
class Family:
    """One strategy with all settings that are tried.

    Args:
        name: for tables.
        settings: arguments of `generate` for each setting, by the setting's name.
        ours: whether it is this package's.
    """

    name: str
    settings: Mapping[str, Arguments]
    ours: bool

    def variant(self, setting: str) -> Variant:
        """The family with one of its settings."""
        return Variant(f"{self.name} {setting}", self.settings[setting], batched=self.ours)


def build(strategies: Sequence[str], peers: Sequence[str], model: PreTrainedModel) -> list[Family]:
    """The families that take part.

    Args:
        strategies: "ngram", "draft=MODEL", "layerskip=ADAPTER", "medusa=HEADS" (ids or folders); without "=…" what
            ships for the embedded model.
        peers: "transformers" for the counterparts of the given strategies in Transformers itself, or nothing.
        model: the target.

    Raises:
        StrategyError: for anything else, and for a draft or adapter that does not fit.
    """
    if unknown := sorted(set(peers) - {"transformers"}):
        raise StrategyError(f"unknown peer {unknown[0]!r}; there is transformers")
    families: list[Family] = []
    for text in strategies:
        name, _, source = text.partition("=")
        if name not in BUILDERS:
            raise StrategyError(f"unknown strategy {name!r}; there are {', '.join(BUILDERS)}")
        try:
            mine, theirs = BUILDERS[name](source or _shipped(name, model), model)
        except (OSError, ValueError) as error:
            raise StrategyError(f"{text}: {error}") from error
        families += [mine, *([theirs] if theirs is not None and peers else [])]
    return families


def _shipped(name: str, model: PreTrainedModel) -> str:
    if name == "ngram":
        return ""
    if str(model.name_or_path) != str(EMBEDDED_MODEL) or name not in SHIPPED:
        raise StrategyError(f"{name} needs a file or id here: {name}=…")
    return SHIPPED[name]


def _ngram(source: str, model: PreTrainedModel) -> tuple[Family, Family]:
    if source:
        raise StrategyError(f"ngram takes nothing behind '=', got {source!r}")
    mine = {_named(settings): _ours(NgramCandidates(**settings)) for settings in NGRAM_SETTINGS}
    theirs: dict[str, Arguments] = {
        f"k={settings['prompt_lookup_num_tokens']} n={settings['max_matching_ngram_size']}": partial(dict, **settings)
        for settings in LOOKUP_SETTINGS
    }
    return Family("n-grams", mine, ours=True), Family("prompt lookup", theirs, ours=False)


def _draft(source: str, model: PreTrainedModel) -> tuple[Family, Family]:
    draft = AutoModelForCausalLM.from_pretrained(source, dtype=model.dtype, device_map=model.device).eval()
    check_vocabularies(draft, model)
    mine = {f"k={k}": _ours(DraftModelCandidates(draft, k=k)) for k in (*DRAFT_LENGTHS, "auto")}
    theirs = _assisted(draft, DRAFT_LENGTHS, assistant_model=draft)
    return Family("draft model", mine, ours=True), Family("assistant_model", theirs, ours=False)


def _layer_skip(source: str, model: PreTrainedModel) -> tuple[Family, Family]:
    layers = exit_layer_of(source)
    mine = {f"k={k}": _ours(LayerSkipCandidates(layers, k=k, adapter=source)) for k in (*EXIT_LENGTHS, "auto")}
    theirs = _assisted(model, EXIT_LENGTHS, assistant_early_exit=layers)
    return Family("layer skip", mine, ours=True), Family("assistant_early_exit", theirs, ours=False)


def _medusa(source: str, model: PreTrainedModel) -> tuple[Family, None]:
    heads = load_medusa(source, model)
    trees = {f"tree={tree}": _ours(MedusaCandidates(heads, tree)) for tree in MEDUSA_TREES}
    return Family("Medusa", trees, ours=True), None


Builder = Callable[[str, PreTrainedModel], tuple[Family, Family | None]]
BUILDERS: dict[str, Builder] = {"ngram": _ngram, "draft": _draft, "layerskip": _layer_skip, "medusa": _medusa}
SHIPPED = {"draft": str(EMBEDDED_DRAFT), "layerskip": str(EMBEDDED_ADAPTER), "medusa": str(EMBEDDED_HEADS)}


def _ours(candidates: Candidates) -> Arguments:
    return partial(dict, candidate_generator=candidates)


def _named(settings: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())


def _assisted(drafting: PreTrainedModel, lengths: Sequence[int], **arguments: Any) -> dict[str, Arguments]:
    """Transformers reads its k from the generation config of the model that drafts; as an argument it is ignored."""

    def with_length(k: int, threshold: float) -> dict[str, Any]:
        config = cast(Any, drafting).generation_config
        config.num_assistant_tokens = k
        config.num_assistant_tokens_schedule = "constant"
        config.assistant_confidence_threshold = threshold
        return arguments

    settings = {f"k={k}": partial(with_length, k, 0.0) for k in lengths}
    return {**settings, "k={} p>{}".format(*SELF_STOPPING): partial(with_length, *SELF_STOPPING)}
