"""Every strategy in the forms that differ in the loop, with a target that accepts a part of its draft tokens."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from hf_specgen import (
    CombinedCandidates,
    DFlashCandidates,
    DraftModelCandidates,
    EagleCandidates,
    FixedDepth,
    GemmaAssistantCandidates,
    LayerSkipCandidates,
    MedusaCandidates,
    MTPCandidates,
    NgramCandidates,
    NgramHistory,
    PEagleCandidates,
    Policy,
    RecyclingCandidates,
    UnoCandidates,
)
from hf_specgen.heads import MedusaHeads
from tests.helpers.encoder_decoder import encoder_decoder, encoder_inputs
from tests.helpers.head_fixtures import FIXTURES, Fixture, steered
from tests.helpers.lora import shared_lora
from tests.helpers.medusa import fitted_heads
from tests.helpers.models import prompts, shared_draft, tiny_model
from tests.helpers.oracle import Oracle

EAGLE = FIXTURES["eagle1_original"]


def repeating(batch: int) -> dict[str, torch.Tensor]:
    """Ragged prompts that repeat themselves, so that n-grams propose something."""
    inputs = prompts(batch)
    inputs["input_ids"][:, 6:] = inputs["input_ids"][:, :6]
    return inputs


class Strategy(NamedTuple):
    """How to make a strategy: from the tokens of plain `generate` and a policy; None fixes the depth."""

    target: Callable[[], Any]
    make: Callable[..., Any]
    inputs: Callable[[int], dict[str, torch.Tensor]] = repeating


@cache
def medusa_heads(reads_path: bool) -> MedusaHeads:
    """Medusa heads, or Hydra heads that depend on the path a little."""
    return fitted_heads(llama(), repeating(3), reads_path=reads_path)


def llama() -> Any:
    """Three layers, so that a layer skip has several early ones."""
    return tiny_model("llama", num_hidden_layers=3)


def _on_llama(make: Callable[..., Any]) -> Strategy:
    """A strategy that needs no tokens of plain `generate`."""
    return Strategy(llama, lambda answers, **settings: make(**settings))


def _oracle(**shape: Any) -> Strategy:
    return Strategy(llama, lambda answers, k=4, policy=None: Oracle(answers, k=k, policy=policy, **shape))


def _steered(name: str, strategy: Any, **shape: Any) -> Strategy:
    """A head whose logits prefer the right tokens in most places."""
    fixture: Fixture = FIXTURES[name]
    return Strategy(
        lambda: fixture.target,
        lambda answers, **settings: steered(strategy(fixture.head_folder, **{**shape, **settings}), answers.tolist()),
    )


def _with_head(name: str, strategy: Any, **shape: Any) -> Strategy:
    """A head with random weights."""
    fixture: Fixture = FIXTURES[name]
    source = str(fixture.target_folder) if strategy is MTPCandidates else fixture.head_folder
    return Strategy(lambda: fixture.target, lambda answers, **settings: strategy(source, **{**shape, **settings}))


def _medusa(tree: Any, reads_path: bool = False) -> Strategy:
    def make_candidates(policy: Policy | None = None) -> MedusaCandidates:
        return MedusaCandidates(medusa_heads(reads_path), tree=tree, policy=policy or FixedDepth())

    return _on_llama(make_candidates)


def _combined(make_members: Callable[[list[Any]], list[Any]], target: Callable[[], Any] = llama) -> Strategy:
    def make_candidates(answers: torch.Tensor, policy: Policy | None = None) -> CombinedCandidates:
        return CombinedCandidates(make_members(answers.tolist()), policy=policy or FixedDepth(5))

    return Strategy(target, make_candidates)


def _draft(encoder: str = "", k: int = 4, **settings: Any) -> DraftModelCandidates:
    return DraftModelCandidates(shared_draft(encoder_decoder(encoder) if encoder else llama()), k, **settings)


def _with_encoder(kind: str, make: Callable[..., Any], **shape: Any) -> Strategy:
    """A strategy for an encoder-decoder; `make` also takes the tokens of plain `generate`."""
    return Strategy(
        lambda: encoder_decoder(kind),
        lambda answers, **settings: make(answers, **{"k": 4, **shape, **settings}),
        lambda batch: encoder_inputs(kind, batch),
    )


PARTLY_RIGHT: dict[str, Strategy] = {
    "oracle, some": _oracle(accuracy=0.6),
    "oracle, tree": _oracle(accuracy=0.7, branching=True),
    "n-grams": _on_llama(lambda k=6, **settings: NgramCandidates(k=k, **settings)),
    "n-grams, tree": _on_llama(lambda k=6, **settings: NgramCandidates(k=k, tree=12, **settings)),
    "n-grams, history": _on_llama(lambda k=6, **more: NgramCandidates(k=k, tree=12, history=NgramHistory(100), **more)),
    "recycling": _on_llama(lambda k=4, **settings: RecyclingCandidates(k=k, **settings)),
    "recycling, tree": _on_llama(lambda k=4, **settings: RecyclingCandidates(k=k, tree=16, **settings)),
    "draft model": _on_llama(lambda k=4, **settings: _draft(k=k, **settings)),
    "draft model, tree": _on_llama(lambda k=4, **settings: _draft(k=k, tree=10, **settings)),
    "draft model, threshold": _on_llama(lambda k=6, **more: _draft(k=k, tree=8, confidence_threshold=0.02, **more)),
    "draft model, any tree": _on_llama(
        lambda k=5, policy=None, **settings: _draft(k=k, tree="auto", policy=policy or FixedDepth(), **settings)
    ),
    "layer skip, tree": _on_llama(lambda k=4, **settings: LayerSkipCandidates(2, k, tree=8, **settings)),
    "layer skip": _on_llama(lambda k=4, **settings: LayerSkipCandidates(2, k, **settings)),
    "Uno": _on_llama(lambda k=4, **settings: UnoCandidates(shared_lora(llama), k, **settings)),
    "Uno, tree": _on_llama(lambda k=4, **settings: UnoCandidates(shared_lora(llama), k, tree=8, **settings)),
    "Medusa, auto": _medusa("auto"),
    "Medusa, tree": _medusa(6),
    "Hydra": _medusa(12, reads_path=True),
    "EAGLE-1": _steered("eagle1_original", EagleCandidates, k=3),
    "EAGLE-1, tree": _steered("eagle1_original", EagleCandidates, k=3, tree=8),
    "EAGLE-3, tree": _steered("eagle3_original", EagleCandidates, k=3, tree=8),
    "DFlash": _steered("dflash_zlab", DFlashCandidates, k=4),
    "DFlash, tree": _steered("dflash_zlab", DFlashCandidates, k=4, tree=8),
    "P-EAGLE, tree": _steered("speculators_peagle_llama", PEagleCandidates, k=4, tree=8),
    "combined": _combined(lambda _: [NgramCandidates(), RecyclingCandidates()]),
    "n-grams and draft model": _combined(lambda _: [NgramCandidates(k=5), _draft(k=5)]),
    "n-grams and layer skip": _combined(lambda _: [NgramCandidates(k=5), LayerSkipCandidates(2, 5)]),
    "n-grams and Medusa": _combined(lambda _: [NgramCandidates(k=4), MedusaCandidates(medusa_heads(False))]),
    "n-grams and EAGLE": _combined(
        lambda texts: [NgramCandidates(k=4), steered(EagleCandidates(EAGLE.head_folder, k=3), texts)],
        lambda: EAGLE.target,
    ),
}
RANDOM_HEADS: dict[str, Strategy] = {
    "MTP": _with_head("mtp_transformers_glm4_moe", MTPCandidates, k=2),
    "MTP, recurrent target": _with_head("mtp_qwen3_next_native", MTPCandidates, k=2, tree=4),
    "Gemma assistant": _with_head("gemma4_assistant", GemmaAssistantCandidates, k=3),
    "Gemma assistant, tree": _with_head("gemma4_assistant", GemmaAssistantCandidates, k=3, tree=8),
}
"""Hardly any of their draft tokens is accepted."""
ENCODER_DECODERS: dict[str, Strategy] = {
    "T5, oracle": _with_encoder("t5", Oracle, accuracy=0.6),
    "BART, oracle": _with_encoder("bart", Oracle, accuracy=0.6),
    "Whisper, oracle, tree": _with_encoder("whisper", Oracle, accuracy=0.7, branching=True),
    "T5, draft model": _with_encoder("t5", lambda _, **settings: _draft("t5", **settings)),
    "Whisper, draft model, tree": _with_encoder("whisper", lambda _, **settings: _draft("whisper", tree=6, **settings)),
    "T5, combined": _with_encoder(
        "t5", lambda _, policy=None, **__: CombinedCandidates([NgramCandidates(), _draft("t5")], policy=policy)
    ),
}
STRATEGIES = {**PARTLY_RIGHT, **RANDOM_HEADS, **ENCODER_DECODERS}


def make(name: str, policy: Policy | None = None) -> Callable[[torch.Tensor], Any]:
    """What makes the strategy of this name from the tokens of plain `generate`."""
    return lambda answers: STRATEGIES[name].make(answers, policy=policy)
