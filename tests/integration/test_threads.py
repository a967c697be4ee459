"""Any number of threads may generate with one model and shared objects."""

import subprocess
import sys
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
    arguments = {"candidate_generator": DraftModelCandidates(shared_draft(model), k=4), "verification": verifier}
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


FIRST_CALLS = """
import threading
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import hf_specgen

sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, pad_token_id=0, eos_token_id=None, **sizes)).eval()
ids, barrier = torch.tensor([[3, 4, 5, 3, 4]]), threading.Barrier(8)
arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4}
ways = ({}, {"candidate_generator": "auto"}, {"custom_generate": lambda model, input_ids, **_: input_ids})
texts, failures = {0: set(), 1: set(), 2: set()}, []

def work(number):
    barrier.wait()
    for _ in range(4):
        try:
            text = model.generate(ids, **arguments, **ways[number % 3])
            texts[number % 3].add(str(text.tolist()))
        except Exception as error:
            failures.append(repr(error))

threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failures, (len(failures), failures[0])
assert texts[0] == texts[1] and len(texts[0]) == 1 and texts[2] == {str(ids.tolist())}
"""


def test_first_calls_of_a_process_in_eight_threads() -> None:
    """Would catch: a plain call that fails while another thread's first call imports the package."""
    finished = subprocess.run([sys.executable, "-c", FIRST_CALLS], capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr[-2000:]
