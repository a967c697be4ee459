"""Confidences become acceptance probabilities through what was observed."""

import gc
import threading

import numpy as np
import pytest
from torch import nn

from hf_specgen import MedusaCandidates
from hf_specgen.candidates.acceptance import Calibration
from hf_specgen.memory import Memory, memory
from tests.helpers import prompts, tiny_model
from tests.helpers.medusa import random_heads


@pytest.mark.parametrize("truth", [0.1, 0.5, 0.9])
def test_acceptance_after_many_observations_is_the_observed_share(truth: float) -> None:
    """Would catch: a confidence that is taken for the probability although it was always wrong."""
    random, calibration = np.random.default_rng(0), Calibration()
    for _ in range(50):
        accepted = random.random(20) < truth
        calibration.observe(np.zeros(20, dtype=int), np.full(20, 0.7), accepted)
    assert calibration.acceptance(np.array([0.7]))[0] == pytest.approx(truth, abs=0.05)


def test_acceptance_of_siblings_does_not_increase_and_sums_to_at_most_one() -> None:
    """Would catch: a later sibling ranked above an earlier one, which rejection sampling must not leave out."""
    calibration = Calibration()
    calibration.observe(np.ones(100, dtype=int), np.full(100, 0.2), np.ones(100, dtype=bool))
    acceptance = calibration.acceptance(np.array([[0.5, 0.2, 0.2, 0.1], [0.9, 0.2, 0.1, 0.1]]))
    assert (np.diff(acceptance, axis=-1) <= 1e-12).all()
    assert (acceptance.sum(axis=-1) <= 1 + 1e-9).all()


# The memory across calls: copies, bounded, freed with the model, safe to share between threads, off on request


def counted(observations: int) -> Calibration:
    """A calibration with so many observations."""
    calibration = Calibration()
    calibration.observe(
        np.zeros(observations, dtype=int), np.full(observations, 0.5), np.ones(observations, dtype=bool)
    )
    return calibration


def test_memory_is_bounded_and_keeps_the_newest() -> None:
    """Would catch: entries that are kept for the model's lifetime (one per temperature or history)."""
    small, model = Memory(max_entries=8), nn.Linear(1, 1)
    for key in range(30):
        small.store(model, key, counted(10))
    assert small.recall(model, 29, Calibration).seen.sum() == 10
    assert small.recall(model, 0, Calibration).seen.sum() == 0
    assert small.recall(None, 29, Calibration).seen.sum() == 0
    assert len(small._entries[model]) == 8


def test_memory_returns_copies() -> None:
    one, model = Memory(), nn.Linear(1, 1)
    one.store(model, "key", counted(10))
    one.recall(model, "key", Calibration).seen[:] = 0
    assert one.recall(model, "key", Calibration).seen.sum() == 10


def test_memory_of_a_freed_model_is_freed() -> None:
    """Would catch: a model kept alive by what was counted with it."""
    one, model = Memory(), nn.Linear(1, 1)
    one.store(model, "key", Calibration())
    del model
    gc.collect()
    assert not len(one._entries)


def test_memory_used_by_many_threads_raises_nothing() -> None:
    """Would catch: 'dictionary changed size during iteration' when calls of several threads end together."""
    one, model, errors = Memory(max_entries=16), nn.Linear(1, 1), []

    def work(thread: int) -> None:
        try:
            for call in range(200):
                one.store(model, (thread, call % 7), one.recall(model, (thread, call % 7), Calibration))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.parametrize("remembers", [True, False])
def test_memory_setting_of_a_call(remembers: bool) -> None:
    model = tiny_model("llama")
    memory.clear()
    candidates = MedusaCandidates(random_heads(model))
    model.generate(**prompts(1), max_new_tokens=16, candidate_generator=candidates, memory=remembers)
    learnt = [key for key in memory._entries[model] if key[0] != "T(q)"]
    assert bool(learnt) == remembers
