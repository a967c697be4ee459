"""The metric of `evaluate`, on cases that the field agrees on."""

from typing import Any

import pytest

evaluate: Any = pytest.importorskip("evaluate", reason="the metric needs evaluate")
THREE_DRAFTS = {"drafted": [3, 3, 2], "accepted": [3, 1, 0]}


@pytest.fixture(scope="module")
def metric(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """As a user loads it; `evaluate` keeps its files below the user's home otherwise."""
    from tests.helpers.paths import ROOT

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate.config, "HF_METRICS_CACHE", str(tmp_path_factory.mktemp("metrics")))
        yield evaluate.load(str(ROOT / "benchmarks" / "acceptance.py"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (THREE_DRAFTS, {"drafts": 3, "drafted": 8, "accepted": 4, "acceptance_rate": 0.5}),
        (THREE_DRAFTS, {"acceptance_rate_per_position": [2 / 3, 1 / 3, 1 / 2]}),
        # 7 nodes that are 3 deep reach position 3, not 7.
        ({"drafted": [7], "accepted": [2], "depths": [3]}, {"acceptance_rate_per_position": [1, 1, 0]}),
        # The two definitions differ where steps draft nothing or are cut.
        (
            {"drafted": [3, 3, 0, 0], "accepted": [3, 0, 0, 0], "emitted": [3, 1, 1, 1]},
            {"mean_acceptance_length": 2.5, "tokens_per_step": 1.5},
        ),
    ],
)
def test_acceptance_of_steps(metric: Any, given: dict[str, Any], expected: dict[str, Any]) -> None:
    found = metric.compute(**given)
    assert {key: found[key] for key in expected} == expected


def test_impossible_steps_are_refused(metric: Any) -> None:
    with pytest.raises(ValueError, match="accepted <= depth <= drafted"):
        metric.compute(drafted=[2], accepted=[3])
    with pytest.raises(ValueError, match="argument 4 is longer"):
        metric.compute(drafted=[2], accepted=[1], emitted=[1, 2], depths=[2])
