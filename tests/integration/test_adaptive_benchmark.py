"""The adaptive suite: its tables, its journal, and the strategy whose drafts are always rejected."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.journal import Journal, JournalError
from benchmarks.report.adaptive import over_all_cells, summary
from benchmarks.suites import adaptive
from hf_specgen.evaluation.workloads import load


def records(**calls: list[tuple[float, float]]) -> list[dict[str, Any]]:
    """(tokens, seconds) of the calls of each variant; plain decoding runs twice."""
    plain = calls.pop("plain")
    sides = {"plain": plain, "plain again": plain, **{name.removeprefix("k"): side for name, side in calls.items()}}
    return [{"variant": name, "tokens": t, "seconds": s} for name, side in sides.items() for t, s in side]


def test_the_summary_counts_sums_over_sums() -> None:
    row = summary(
        "embedded/edit/b1/t0.0/ngram",
        records(
            plain=[(10.0, 1.0), (30.0, 3.0)],
            k2=[(10.0, 0.5), (30.0, 1.5)],
            k5=[(10.0, 0.8), (30.0, 2.4)],
            auto=[(10.0, 0.5), (30.0, 2.0)],
        ),
    )
    assert row["best fixed"] == "2" and row["again/plain"] == 1 and row["later calls"] == pytest.approx(1.5)
    assert row["auto/plain"] == pytest.approx(40 / 2.5 / 10) and row["auto/best"] == pytest.approx(2.0 / 2.5)
    assert row["lowest"] <= row["auto/plain"] <= row["highest"]


def test_one_k_for_all_cells_loses_where_cells_differ() -> None:
    """Each k is the best in one cell; auto equals the better one in both, and is better than either over both."""
    measured = {
        "embedded/edit/b1/t0.0/ngram": records(
            plain=[(10.0, 1.0)], k2=[(10.0, 0.5)], k16=[(10.0, 1.5)], auto=[(10.0, 0.5)]
        ),
        "embedded/prose/b1/t0.0/ngram": records(
            plain=[(10.0, 1.0)], k2=[(10.0, 0.8)], k16=[(10.0, 0.2)], auto=[(10.0, 0.2)]
        ),
    }
    (row,) = over_all_cells(measured)
    assert row["cell"] == "all 2 of ngram" and row["best fixed"] == "2"
    assert row["auto/best"] == pytest.approx((0.5 + 0.8) / (0.5 + 0.2))


def test_it_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def measure(cell: adaptive.Cell, settings: adaptive.Settings, journal: Journal) -> list[dict[str, Any]]:
        measured.append(cell.name)
        return records(plain=[(10.0, 1.0)], k5=[(10.0, 1.0)], auto=[(10.0, 1.0)])

    monkeypatch.setattr(adaptive, "measure", measure)
    once, patterns = adaptive.Settings(repeats=1), ["embedded/edit/b1/t0.0/"]
    assert adaptive.adaptive(once, tmp_path, patterns, minutes=0) == [] and measured == []
    rows = adaptive.adaptive(once, tmp_path, patterns)
    assert len(measured) == 5 and len(rows) == 10
    adaptive.adaptive(once, tmp_path, patterns)
    assert len(measured) == 5, "finished cells are not measured again"
    assert len((tmp_path / "records-0.jsonl").read_text().splitlines()) == 1 + 5
    with pytest.raises(JournalError, match="measured with other options"):
        adaptive.adaptive(adaptive.Settings(repeats=2), tmp_path, patterns)


def test_measured_for_real(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = str(folder / "target")
    monkeypatch.setattr(adaptive, "load", lambda settings: load(replace(settings, model=target)))
    cell = adaptive.Cell("embedded", "edit", 1, 0.0, "rejected")
    settings = adaptive.Settings(repeats=1, quick=True)
    found = adaptive.measure(cell, settings, Journal(tmp_path, settings))
    names = [record["variant"] for record in found]
    assert set(names) == {"plain", "plain again", "5", "auto"} and all(names.count(name) == 2 for name in names)
    assert all(record["tokens"] > 0 and record["seconds"] > 0 for record in found)
    assert all(record["identical"] for record in found)
