"""Confidences become acceptance probabilities through what was observed."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from torch import nn

from hf_specgen.candidates.acceptance import BIN_CENTERS, BIN_PRIOR_WEIGHT, REMEMBERED_KEYS, Calibration, CalibrationMemory


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


def test_memory_keeps_what_calls_counted_and_is_bounded() -> None:
    """Would catch: entries that are kept for the model's lifetime (one per temperature or history)."""
    memory, model = CalibrationMemory(Calibration), nn.Linear(1, 1)
    for key in range(3 * REMEMBERED_KEYS):
        calibration = Calibration()
        calibration.observe(np.zeros(10, dtype=int), np.full(10, 0.5), np.ones(10, dtype=bool))
        memory.store(model, key, calibration)
    assert memory.recall(model, 3 * REMEMBERED_KEYS - 1).seen.sum() == 10
    assert memory.recall(model, 0).seen.sum() == 0
    assert memory.recall(None, 0).seen.sum() == 0


def test_memory_of_a_freed_model_is_freed() -> None:
    """Would catch: a model kept alive by what was counted with it."""
    memory, model = CalibrationMemory(Calibration), nn.Linear(1, 1)
    memory.store(model, "key", Calibration())
    del model
    gc.collect()
    assert not len(memory._known)


def test_memory_used_by_many_threads_loses_no_call() -> None:
    """Would catch: 'dictionary changed size during iteration' when calls of several threads end together."""
    memory, model, errors = CalibrationMemory(Calibration), nn.Linear(1, 1), []

    def work(thread: int) -> None:
        try:
            for call in range(200):
                memory.store(model, (thread, call % 7), memory.recall(model, (thread, call % 7)))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_count_with_weights_is_the_acceptance_at_the_centre_of_the_bin() -> None:
    """Would catch: a bin whose tokens are more confident than its centre taken for a better one."""
    prior = BIN_PRIOR_WEIGHT * BIN_CENTERS[7]
    for weight in (1.0, 1.1):
        calibration = Calibration()
        for place in range(40):
            calibration.count(0, 7, place % 2 == 0, weight)
        assert calibration.by_bin()[0, 7] == pytest.approx((20 + prior) / (40 * weight + BIN_PRIOR_WEIGHT))
