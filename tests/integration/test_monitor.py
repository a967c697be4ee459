"""Watching: windowed figures, counters, one log line per call."""

from __future__ import annotations

import logging

import pytest

from hf_specgen import NgramCandidates, SpeculationMonitor
from hf_specgen.monitoring.prometheus import PREFIX
from tests.helpers import Oracle, prompts, tiny_model


def _watched(monitor: SpeculationMonitor, accuracy: float = 0.7, batch: int = 2):
    model, inputs = tiny_model("llama"), prompts(batch)
    oracle = Oracle(model.generate(**inputs, max_new_tokens=40)[:, 12:], accuracy)
    model.generate(**inputs, max_new_tokens=40, candidate_generator=oracle, monitor=monitor)
    return oracle.speculation


def test_figures_are_those_of_the_statistics() -> None:
    monitor = SpeculationMonitor(window=10_000, prometheus=False)
    stats = _watched(monitor)
    assert monitor.acceptance_rate == pytest.approx(stats.acceptance_rate)
    assert monitor.tokens_per_step == pytest.approx(stats.tokens_per_step)
    assert sum(monitor.histogram.values()) == stats.drafts
    assert sum(n * count for n, count in monitor.histogram.items()) == stats.accepted
    assert len(monitor.timeline) == max(map(len, stats.rows)) and all(step[3] > 0 for step in monitor.timeline)
    assert stats.seconds["policy"] > 0


def test_the_window_forgets() -> None:
    monitor = SpeculationMonitor(window=5, prometheus=False)
    _watched(monitor, accuracy=1.0, batch=1)
    assert monitor.acceptance_rate == 1
    _watched(monitor, accuracy=0.0, batch=1)
    assert monitor.acceptance_rate == 0 and monitor.calls == 2
    assert "0% of draft tokens accepted" in monitor.summary()
    for arguments in ({"window": 0}, {"timeline": -1}):
        with pytest.raises(ValueError, match="must be at least 1"):
            SpeculationMonitor(**arguments)


def test_prometheus_counts_under_the_usual_names() -> None:
    prometheus = pytest.importorskip("prometheus_client")

    def value(name: str, **labels: str) -> float:
        return prometheus.REGISTRY.get_sample_value(f"{PREFIX}{name}_total", labels) or 0.0

    monitor = SpeculationMonitor()
    names = ("drafts", "draft_tokens", "accepted_tokens")
    before = [value(name) for name in names]
    first = value("accepted_tokens_per_pos", position="0")
    stats = _watched(monitor)
    assert [value(name) for name in names] == [
        old + new for old, new in zip(before, (stats.drafts, stats.drafted, stats.accepted), strict=True)
    ]
    assert value("accepted_tokens_per_pos", position="0") - first == stats.accepted_per_position[0]


def test_one_log_line_per_call(caplog) -> None:
    with caplog.at_level(logging.INFO, logger="hf_specgen"):
        model, monitor = tiny_model("llama"), SpeculationMonitor(prometheus=False)
        for _ in range(2):
            model.generate(
                **prompts(1), max_new_tokens=20, candidate_generator=NgramCandidates(k="auto"), monitor=monitor
            )
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    assert "20 tokens" in caplog.text and "policy=Controller()" in caplog.text


def test_plot(tmp_path) -> None:
    monitor = SpeculationMonitor(prometheus=False)
    with pytest.raises(ValueError, match="has no steps"):
        monitor.plot(tmp_path / "m.png")
    _watched(monitor)
    monitor.plot(tmp_path / "m.png")
    assert (tmp_path / "m.png").stat().st_size > 10_000
