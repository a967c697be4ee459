"""The plan of the demo at the limits of its inputs; its usual values are in a doctest."""

from __future__ import annotations

import pytest

from hf_specgen.cli.demo_plan import MIN_TOKENS, answer_length


@pytest.mark.parametrize(
    ("seconds", "speed", "compared", "expected"),
    [(40, float("inf"), 6, 64), (0, 40, 6, MIN_TOKENS), (-5, 40, 6, MIN_TOKENS), (40, 8, 0, 64)],
)
def test_answer_length_at_limits_is_between_the_bounds(
    seconds: float, speed: float, compared: int, expected: int
) -> None:
    assert answer_length(64, seconds, speed, compared) == expected
