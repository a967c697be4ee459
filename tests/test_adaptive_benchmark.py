"""The section of the benchmark: what it tabulates, that it goes on where it stopped, that the wrong one is wrong."""

from __future__ import annotations

import json

import pytest

from benchmarks import adaptive
from benchmarks.wrong import WrongCandidates
from hf_specgen.adaptive import Controller


def test_the_summary_counts_sums_over_sums() -> None:
    cell = adaptive.Cell("embedded", "edit", 1, 0.0, "ngram")
    sides = {
        "plain": [(10.0, 1.0), (30.0, 3.0)],
        "plain again": [(10.0, 1.0), (30.0, 3.0)],
        "2": [(10.0, 0.5), (30.0, 1.5)],
        "5": [(10.0, 0.8), (30.0, 2.4)],
        "auto": [(10.0, 0.5), (30.0, 2.0)],
    }
    row = adaptive.summary(cell, sides)
    assert row["best fixed"] == "2" and row["again/plain"] == 1 and row["later calls"] == pytest.approx(1.5)
    assert row["auto/plain"] == pytest.approx(40 / 2.5 / 10) and row["auto/best"] == pytest.approx(2.0 / 2.5)
    assert row["lowest"] <= row["auto/plain"] <= row["highest"]


def test_one_k_for_all_cells_loses_where_cells_differ() -> None:
    """Each k is best somewhere; auto is as good as the better one in both, and so better than either over all."""
    calls = {name: {"plain": [(10.0, 1.0)], "plain again": [(10.0, 1.0)]} for name in "ab"}
    calls["a"] |= {"2": [(10.0, 0.5)], "16": [(10.0, 1.5)], "auto": [(10.0, 0.5)]}
    calls["b"] |= {"2": [(10.0, 0.8)], "16": [(10.0, 0.2)], "auto": [(10.0, 0.2)]}
    cells = [adaptive.Cell("embedded", domain, 1, 0.0, "ngram") for domain in ("edit", "prose")]
    (row,) = adaptive.together({cells[0]: calls["a"], cells[1]: calls["b"]})
    assert row["best fixed"] == "2"
    assert row["auto/best"] == pytest.approx((0.5 + 0.8) / (0.5 + 0.2))


def test_the_matrix_is_whole() -> None:
    names = [cell.name for cell in adaptive.cells()]
    assert len(names) == len(set(names)) == 2 * 5 * (5 * 3 * 2 + 3)


def test_it_goes_on_where_it_stopped(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(adaptive, "JOURNAL", tmp_path / "cells.jsonl")
    monkeypatch.setenv("CELLS", "embedded/edit/b1/t0.0/")
    asked = []

    def measure(cell, repeats, quick):
        asked.append(cell.name)
        return {name: [(10.0, 1.0)] for name in ("plain", "plain again", "5", "auto")}

    monkeypatch.setattr(adaptive, "measure", measure)
    monkeypatch.setenv("MINUTES", "0")
    assert adaptive.adaptive(1, False) == [] and asked == []
    monkeypatch.delenv("MINUTES")
    rows = adaptive.adaptive(1, False)
    assert len(asked) == 5 and len(rows) == 10
    adaptive.adaptive(1, False)
    assert len(asked) == 5, "finished cells are not measured again"
    assert len([json.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines()]) == 5
    adaptive.adaptive(2, False)
    assert len(asked) == 10, "other repeats are other measurements"


def test_measured_for_real(monkeypatch) -> None:
    cell = adaptive.Cell("embedded", "edit", 1, 0.0, "wrong")
    sides = adaptive.measure(cell, 1, True)
    assert set(sides) == {"plain", "plain again", "5", "auto"} and all(len(calls) == 2 for calls in sides.values())
    assert all(tokens > 0 and seconds > 0 for calls in sides.values() for tokens, seconds in calls)


def test_the_wrong_one_is_wrong(reference_model, tokenizer) -> None:
    wrong = WrongCandidates(k=4)
    ids = tokenizer("def add(x, y):", return_tensors="pt").input_ids
    reference_model.generate(ids, max_new_tokens=20, candidate_generator=wrong)
    assert wrong.speculation.drafted > 0 == wrong.speculation.accepted
    assert isinstance(WrongCandidates(k="auto").policy, Controller)
