"""Monitors: windowed figures, counters, one log line per call, plots, and the end of a call that fails."""

import logging
from collections import Counter
from dataclasses import astuple
from pathlib import Path
from statistics import mean, median, pstdev
from typing import Any

import pytest

from hf_specgen import Monitor, NgramCandidates, SpeculationMonitor
from hf_specgen.depth import CostCurve
from hf_specgen.monitor import PREFIX, AcceptanceRates, plot_monitor, plot_speedup, speedup
from tests.helpers import Oracle, prompts, tiny_model


def run_monitored(monitor: Monitor, accuracy: float = 0.7, batch: int = 2) -> Any:
    """The statistics of a call with an oracle."""
    model, inputs = tiny_model("llama"), prompts(batch)
    oracle = Oracle(model.generate(**inputs, max_new_tokens=40)[:, 12:], accuracy)
    model.generate(**inputs, max_new_tokens=40, candidate_generator=oracle, monitor=monitor)
    return oracle.speculation


def test_monitor_figures_equal_the_statistics_and_are_plotted(tmp_path: Path) -> None:
    """Would catch: steps that are counted twice or not at all, or a plot that fails on real counts."""
    monitor = SpeculationMonitor(window=10_000, prometheus=False)
    statistics = run_monitored(monitor)
    assert monitor.statistics.acceptance_rate == pytest.approx(statistics.acceptance_rate)
    assert monitor.statistics.tokens_per_step == pytest.approx(statistics.tokens_per_step)
    assert sum(monitor.drafts.values()) == statistics.drafts
    assert sum(accepted * count for (_, accepted), count in monitor.drafts.items()) == statistics.accepted
    assert statistics.seconds["policy"] > 0
    plot_monitor(monitor, tmp_path / "monitor.png")
    assert (tmp_path / "monitor.png").read_bytes().startswith(b"\x89PNG")


def test_monitor_window_covers_the_last_steps_only() -> None:
    """Would catch: figures of the window that never forget, or those of the whole run that do."""
    monitor = SpeculationMonitor(window=5, prometheus=False)
    run_monitored(monitor, accuracy=1.0, batch=1)
    assert monitor.acceptance().min == 1
    run_monitored(monitor, accuracy=0.0, batch=1)
    assert monitor.acceptance().max == 0 < monitor.acceptance("total").max and monitor.calls == 2
    assert "0% of draft tokens accepted" in monitor.summary()


def test_acceptance_rates_equal_those_of_the_statistics_module() -> None:
    """Would catch: drafts that are weighted by their length, percentiles of counts instead of drafts."""
    drafts = [(4, 1), (4, 4), (2, 0), (4, 1), (5, 3)]
    rates, found = sorted(accepted / drafted for drafted, accepted in drafts), AcceptanceRates.of(Counter(drafts))
    expected = (len(rates), mean(rates), pstdev(rates), rates[0], rates[-1], median(rates), rates[3] + 0.8 * 0.4)
    assert astuple(found) == pytest.approx(expected)
    assert AcceptanceRates.of({}).drafts == 0


def test_speedup_of_chains_by_acceptance_and_depth() -> None:
    """Would catch: a bonus token left out, or the time of the draft counted once for all its passes."""
    steep = CostCurve((1, 33), (1.0, 33.0), 256, 1)
    assert speedup(1.0, 4) == 5 and speedup(0.0, 4, draft_pass=0.25) == 0.5
    assert speedup(0.5, 2, steep.relative, draft_pass=0.5) == pytest.approx(1.75 / 4)


def test_monitor_counts_in_prometheus_under_the_usual_names() -> None:
    """Would catch: counters under other names than those that dashboards read, or for position 1 in place of 0."""
    prometheus = pytest.importorskip("prometheus_client")

    def value(name: str, **labels: str) -> float:
        return prometheus.REGISTRY.get_sample_value(f"{PREFIX}{name}_total", labels) or 0.0

    monitor = SpeculationMonitor()
    names = ("drafts", "draft_tokens", "accepted_tokens")
    before = [value(name) for name in names]
    first = value("accepted_tokens_per_pos", position="0")
    statistics = run_monitored(monitor)
    after = [statistics.drafts, statistics.drafted, statistics.accepted]
    assert [value(name) for name in names] == [old + new for old, new in zip(before, after, strict=True)]
    assert value("accepted_tokens_per_pos", position="0") - first == statistics.accepted_per_position[0]


def test_monitor_logs_one_line_per_call(caplog: pytest.LogCaptureFixture) -> None:
    """Would catch: a line for every step, or none for the second call."""
    with caplog.at_level(logging.INFO, logger="hf_specgen"):
        model, monitor = tiny_model("llama"), SpeculationMonitor(prometheus=False)
        for _ in range(2):
            ngram = NgramCandidates(k="auto")
            model.generate(**prompts(1), max_new_tokens=20, candidate_generator=ngram, monitor=monitor)
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    assert "20 tokens" in caplog.text and repr(ngram) in caplog.text


def test_plot_of_speedups_is_written(tmp_path: Path) -> None:
    """Would catch: a plot that needs a display, or that is written as another type of file."""
    plot_speedup(tmp_path / "speedup.svg", depths=(1, 5))
    assert "<svg" in (tmp_path / "speedup.svg").read_text()
