"""Strategies that need no training: the tokens of plain `generate`, greedy and sampled, whatever they propose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_specgen import Candidates, NgramCandidates, NgramHistory
from tests.helpers import assert_same_tokens, prompts, tiny_model

STRATEGIES: dict[str, Callable[[], Candidates]] = {
    "n-grams": lambda: NgramCandidates(k=6),
    "n-gram tree": lambda: NgramCandidates(k=6, tree=12),
    "n-grams with history": lambda: NgramCandidates(k=6, tree=12, history=NgramHistory(max_tokens=100)),
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
    arguments = {"max_new_tokens": 20, **SETTINGS[settings]}
    drafted = 0
    for _ in range(2):  # the second call uses what the first one left
        drafted += assert_same_tokens(tiny_model("llama"), repeating(batch), candidates, **arguments).drafted
    assert drafted
