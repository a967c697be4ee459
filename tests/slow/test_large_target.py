"""`micro large-target-graphs` on a CPU, with a stand-in for graphs: the rows of every variant, and a step in parts."""

import importlib
from typing import Any

import pytest

from tests.helpers.captures import graphs_on_cpu

large_target = importlib.import_module("benchmarks.micro.large_target")


def test_steps_are_split_into_passes_and_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: captured passes that are not recognised, and drafter passes counted as the target's."""
    captures: list[Any] = graphs_on_cpu(monkeypatch)
    rows = {row["variant"]: row for row in large_target.large_target_graphs(repeats=1, quick=True)}
    for name in ("no drafts", "n-grams + recycling", "EAGLE-3", "draft model"):
        for mode in ("eager", "graphs"):
            row = rows[f"{name}, {mode}"]
            assert row["same tokens"] == 1.0 and row["limit, ms"] > 0
            assert row["target pass, ms"] > 0 and row["step, ms"] > 0
            assert (row["drafter passes, ms"] > 0) == (name in ("EAGLE-3", "draft model"))
    assert captures
