"""Strategies that need no training: the tokens of plain `generate`, greedy and sampled, whatever they propose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_specgen import (
    AdaptiveDepth,
    Candidates,
    CombinedCandidates,
    FixedDepth,
    NgramCandidates,
    NgramHistory,
    RecyclingCandidates,
)
from hf_specgen.depth import CostCurve, LatencyModel
from tests.helpers import assert_same_tokens, prompts, tiny_model

FREE_TOKENS = LatencyModel.from_curves(CostCurve((1, 257), (0.010, 0.0101), context=256, batch=1))
"""With these latencies every draft token that may be accepted is verified."""
STRATEGIES: dict[str, Callable[[], Candidates]] = {
    "n-grams": lambda: NgramCandidates(k=6),
    "n-gram tree": lambda: NgramCandidates(k=6, tree=12),
    "n-grams with history": lambda: NgramCandidates(k=6, tree=12, history=NgramHistory(max_tokens=100)),
    "recycling": lambda: RecyclingCandidates(k=4),
    "recycling tree": lambda: RecyclingCandidates(k=4, tree=16),
    "combined": lambda: CombinedCandidates(policy=AdaptiveDepth(FREE_TOKENS)),
    "combined, fixed size": lambda: CombinedCandidates(tree=12, policy=FixedDepth(5)),
    "combined, all nodes": lambda: CombinedCandidates(policy=FixedDepth(3)),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 0, "temperature": 0.7},
    "repetition penalty": {"repetition_penalty": 1.3},
    "sampled, processors": {"do_sample": True, "top_p": 0.8, "no_repeat_ngram_size": 3},
    "EOS": {"eos_token_id": list(range(40, 60)), "pad_token_id": 0, "min_new_tokens": 5},
}


def repeating(batch: int) -> dict[str, torch.Tensor]:
    """Ragged prompts that repeat themselves, so that n-grams propose something."""
    inputs = prompts(batch)
    inputs["input_ids"][:, 6:] = inputs["input_ids"][:, :6]
    return inputs


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_generate_same_tokens(strategy: str, batch: int, settings: str) -> None:
    """Would catch: a proposal taken without verification, rows mixed up, tokens behind EOS."""
    candidates = STRATEGIES[strategy]()
    arguments = {"max_new_tokens": 14, **SETTINGS[settings]}
    drafted = 0
    for _ in range(2):  # the second call uses what the first one left
        drafted += assert_same_tokens(tiny_model("llama"), repeating(batch), candidates, **arguments).drafted
    assert drafted


@pytest.mark.parametrize("batch", [1, 3])
def test_generate_with_auto_same_tokens(batch: int) -> None:
    """`candidate_generator="auto"` needs no import and keeps what it has learnt about the target."""
    model, inputs = tiny_model("llama"), repeating(batch)
    plain = model.generate(**inputs, max_new_tokens=20)
    for _ in range(2):
        assert model.generate(**inputs, max_new_tokens=20, candidate_generator="auto").tolist() == plain.tolist()


def test_generate_with_another_word_raises() -> None:
    with pytest.raises(TypeError, match='must be "auto" or a CandidateGenerator'):
        tiny_model("llama").generate(**prompts(1), max_new_tokens=2, candidate_generator="best")


@pytest.mark.parametrize("strategy", ["n-gram tree", "recycling tree", "combined", "combined, fixed size"])
@pytest.mark.parametrize("verification", ["rejection", "typical"])
def test_generate_other_verification_returns_text(strategy: str, verification: str) -> None:
    """Would catch: a strategy that fails where draft probabilities are asked for."""
    arguments = {"max_new_tokens": 16, "do_sample": True, "verification": verification}
    ids = tiny_model("llama").generate(**repeating(3), candidate_generator=STRATEGIES[strategy](), **arguments)
    assert ids.shape == (3, 28)
