"""Eight threads: all strategies and plain calls with one model, every text checked; and sampled calls.

Each for 5 seconds; `pytest tests/slow/test_threads.py --thread-seconds 60` runs each for a minute.
"""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import LogitsProcessorList, StoppingCriteriaList

from hf_specgen import AdaptiveDepth, DraftModelCandidates, NgramCandidates, SpeculationMonitor, speculate
from hf_specgen.verification import ExactVerifier, RejectionVerifier
from tests.helpers.models import perturbed_copy, prompts
from tests.helpers.noise import RecordedNoise
from tests.helpers.processors import PrefixReader, RowWisePrefixReader
from tests.helpers.strategies import PARTLY_RIGHT, llama


@dataclass
class Job:
    """A call of `generate` with a strategy, or a plain one, whose ids are known."""

    name: str
    inputs: dict[str, torch.Tensor]
    arguments: dict[str, Any]
    expected: torch.Tensor


@dataclass
class Outcome:
    """How often each strategy ran, and what went wrong."""

    calls: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def mixed_jobs() -> tuple[Any, list[Job]]:
    """Greedy calls with every strategy object shared."""
    model, no_answers = llama(), torch.empty(0, 0, dtype=torch.long)
    shared: list[dict[str, Any]] = [
        {"verification": ExactVerifier()},
        {"verification": RejectionVerifier()},
        {"monitor": SpeculationMonitor(prometheus=False)},
    ]
    strategies: dict[str, dict[str, Any]] = {"plain": {}}
    for name, strategy in PARTLY_RIGHT.items():
        if strategy.target is llama and not name.startswith("oracle"):
            number = len(strategies)
            candidates = strategy.make(no_answers, policy=AdaptiveDepth() if number % 2 else None)
            strategies[name] = {"candidate_generator": candidates, **shared[number % 3]}
    strategies["speculate"] = {"custom_generate": speculate(NgramCandidates(k=4), verification=ExactVerifier())}
    settings: list[tuple[dict[str, torch.Tensor], dict[str, Any]]] = [
        (prompts(1, length=8), {"max_new_tokens": 16}),
        (prompts(1, length=20), {"max_new_tokens": 24}),
        (prompts(3), {"max_new_tokens": 20, "eos_token_id": list(range(30, 40)), "pad_token_id": 0}),
        (prompts(2), {"max_new_tokens": 12, "repetition_penalty": 1.3}),
        (prompts(2), {"max_new_tokens": 12, "logits_processor": LogitsProcessorList([RowWisePrefixReader()])}),
        (prompts(2), {"max_new_tokens": 12, "logits_processor": LogitsProcessorList([PrefixReader()])}),
    ]
    jobs = []
    for inputs, arguments in settings:
        expected = model.generate(**inputs, **arguments)
        jobs += [Job(name, inputs, {**arguments, **strategy}, expected) for name, strategy in strategies.items()]
    return model, jobs


def run_in_threads(model: Any, jobs: Sequence[Job], threads: int, seconds: float) -> Outcome:
    """Run the jobs again and again in several threads until the time is over, or a text is wrong."""
    outcome, end, lock = Outcome(), time.monotonic() + seconds, threading.Lock()
    remaining = itertools.cycle(jobs)

    def work(_: int) -> None:
        while time.monotonic() < end and not outcome.failures:
            with lock:
                job = next(remaining)
            try:
                ids = model.generate(**job.inputs, **job.arguments)
            except Exception as error:
                outcome.failures.append(f"{job.name}: {error!r}")
                return
            outcome.calls[job.name] += 1
            if not torch.equal(ids, job.expected):
                outcome.failures.append(f"{job.name}: {ids.tolist()} instead of {job.expected.tolist()}")

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    return outcome


def test_eight_threads_with_one_model_same_texts(pytestconfig: pytest.Config) -> None:
    """Would catch: rare races between calls that share a model, a strategy, a verifier or a monitor."""
    model, jobs = mixed_jobs()
    outcome = run_in_threads(model, jobs, threads=8, seconds=pytestconfig.getoption("thread_seconds"))
    assert outcome.failures == []
    assert set(outcome.calls) == {job.name for job in jobs}, "every strategy must have run"


def no_stop(input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
    """A stopping criterion that never stops, and takes some time."""
    return input_ids.sum(dim=1) < 0


def sampled_jobs(verifier: RecordedNoise) -> tuple[Any, list[Job]]:
    """Sampled calls of which the texts are known, with functions of the user's, and plain calls."""
    model, draft = llama(), perturbed_copy(llama(), 0.05)
    jobs = list[Job]()
    for batch in (1, 2):
        functions = {
            "processors": {"logits_processor": LogitsProcessorList([RowWisePrefixReader()])},
            "stateful processors": {"logits_processor": LogitsProcessorList([PrefixReader()])},
            "criteria": {"stopping_criteria": StoppingCriteriaList([no_stop])},
        }
        for name, function in functions.items():
            arguments = {"max_new_tokens": 16, "do_sample": True, "top_k": 1, **function}
            expected = model.generate(**prompts(batch), **arguments)
            jobs.append(Job("plain", prompts(batch), arguments, expected))
            for candidates in (NgramCandidates(k=4), DraftModelCandidates(draft, k=4)):
                how = {**arguments, "candidate_generator": candidates, "verification": verifier}
                model.generate(**prompts(batch), **how)
                jobs.append(Job(f"{name}, {type(candidates).__name__}", prompts(batch), how, expected))
    verifier.noise.clear()
    return model, jobs


def test_sampled_calls_beside_plain_ones_and_a_data_loader(pytestconfig: pytest.Config) -> None:
    """Would catch: noise that chooses two tokens, a function that is refused since other threads draw numbers."""
    verifier, done = RecordedNoise(), threading.Event()
    model, jobs = sampled_jobs(verifier)

    def load_data() -> None:
        while not done.is_set():
            for _ in DataLoader(range(8), shuffle=True):
                time.sleep(0.001)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(load_data)
        try:
            outcome = run_in_threads(model, jobs, threads=7, seconds=pytestconfig.getoption("thread_seconds"))
        finally:
            done.set()
    assert outcome.failures == []
    assert set(outcome.calls) == {job.name for job in jobs}, "every kind of call must have run"
    assert len(verifier.noise) == len(set(verifier.noise)) > 0
