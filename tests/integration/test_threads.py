"""Any number of threads may generate with one model and shared objects; all strategies together are in `tests/slow`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from hf_specgen import DraftModelCandidates, NgramCandidates, Verifier, speculate
from hf_specgen.verification import CoupledVerifier, RejectionVerifier, TypicalVerifier
from tests.helpers import prompts, shared_draft, tiny_model
from tests.helpers.comparison import plain_output

LENGTHS = (8, 12, 16, 20)


def generate_in_threads(arguments: dict[str, Any], repeats: int = 2) -> list[torch.Tensor]:
    """The outputs of calls with prompts of different lengths, each length in a thread of its own."""
    model = tiny_model("llama")
    inputs = [prompts(1, length=length) for length in LENGTHS] * repeats
    with ThreadPoolExecutor(len(LENGTHS)) as pool:
        calls = [pool.submit(model.generate, **each, max_new_tokens=24, **arguments) for each in inputs]
    return [call.result(timeout=60) for call in calls]


def plain_texts() -> list[torch.Tensor]:
    """The outputs of plain `generate`, by length of the prompt."""
    return [plain_output(tiny_model("llama"), prompts(1, length=n), max_new_tokens=24)[0] for n in LENGTHS]


@pytest.mark.parametrize(
    "verifier", [CoupledVerifier(), RejectionVerifier(), TypicalVerifier(epsilon=0.1)], ids=lambda v: type(v).__name__
)
def test_verifier_shared_by_threads_same_texts(verifier: Verifier) -> None:
    """Would catch: a verifier that keeps the state of a call. Typical acceptance is compared with itself."""
    model = tiny_model("llama")
    arguments = {
        "candidate_generator": DraftModelCandidates(shared_draft(model), k=4),
        "verification": verifier,
    }
    expected = plain_texts() * 2
    if isinstance(verifier, TypicalVerifier):
        expected = [model.generate(**prompts(1, length=n), max_new_tokens=24, **arguments) for n in LENGTHS] * 2
    for ids, wanted in zip(generate_in_threads(arguments), expected, strict=True):
        assert torch.equal(ids, wanted)


@pytest.mark.parametrize("keyword", ["candidate_generator", "custom_generate"])
def test_strategy_shared_by_threads_same_texts(keyword: str) -> None:
    """Would catch: a strategy, or what `speculate` returns, that keeps the state of a call."""
    ngram = NgramCandidates(k=4)
    expected = plain_texts() * 2
    arguments = {keyword: ngram if keyword == "candidate_generator" else speculate(ngram)}
    for ids, wanted in zip(generate_in_threads(arguments), expected, strict=True):
        assert torch.equal(ids, wanted)
