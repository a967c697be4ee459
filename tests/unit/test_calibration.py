"""Confidences become acceptance probabilities through what was observed."""

import numpy as np
import pytest

from hf_specgen.candidates.acceptance import Calibration


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
