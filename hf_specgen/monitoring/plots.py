"""Plots of the statistics of one call, and of a monitor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_specgen.counters import Statistics
from hf_specgen.monitoring.monitor import SpeculationMonitor

ACCEPTED, REJECTED = "#2a7f62", "#d9d9d9"


def plot_statistics(statistics: Statistics, path: str | Path) -> None:
    """Plot acceptance by position, and the drafted and accepted tokens of each step of the first row.

    The suffix of the path chooses the format (PNG, SVG, PDF).
    """
    figure = _figure()
    by_position, along_text = figure.subplots(2, 1)
    rates = statistics.acceptance_rate_per_position
    by_position.bar(range(1, len(rates) + 1), rates, color=ACCEPTED)
    by_position.set(
        title=f"{statistics.tokens_per_step:.2f} tokens per step, acceptance rate {statistics.acceptance_rate:.0%}",
        xlabel="position in the draft",
        ylabel="accepted",
        ylim=(0, 1),
    )
    by_position.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    steps = statistics.rows[0]
    numbers = range(1, len(steps) + 1)
    along_text.bar(numbers, [step.depth for step in steps], color=REJECTED, label="drafted")
    along_text.bar(numbers, [step.accepted for step in steps], color=ACCEPTED, label="accepted")
    along_text.set(xlabel="verification step of the first row", ylabel="tokens")
    along_text.legend(frameon=False)
    _save(figure, path)


def plot_monitor(monitor: SpeculationMonitor, path: str | Path) -> None:
    """Plot depth, drafted and accepted tokens of the last steps, and the histogram of accepted tokens per draft.

    The suffix of the path chooses the format (PNG, SVG, PDF).
    """
    if not monitor.timeline:
        raise ValueError("the monitor has no steps yet; pass it to generate(…, monitor=monitor)")
    figure = _figure()
    timeline, histogram = figure.subplots(2, 1)
    depths, drafted, accepted, _ = zip(*monitor.timeline, strict=True)
    numbers = range(1, len(depths) + 1)
    timeline.fill_between(numbers, drafted, step="mid", color=REJECTED, label="drafted")
    timeline.fill_between(numbers, accepted, step="mid", color=ACCEPTED, label="accepted")
    timeline.step(numbers, depths, where="mid", color="#444444", linewidth=1, label="maximum depth")
    timeline.set(title=monitor.summary(), xlabel="step", ylabel="tokens per row", xlim=(1, max(2, len(depths))))
    timeline.set_ylim(0, 1.3 * max(1, *depths))
    timeline.legend(frameon=False, ncols=3, loc="upper right")
    counts = monitor.histogram.copy()  # calls of other threads may add to it
    lengths = range(max(counts, default=0) + 1)
    histogram.bar(lengths, [counts[length] for length in lengths], color=ACCEPTED)
    histogram.set(xlabel="accepted tokens of a draft", ylabel="drafts")
    histogram.xaxis.get_major_locator().set_params(integer=True)
    _save(figure, path)


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'hf-specgen[plot]'") from error
    return Figure(figsize=(9, 5.5), layout="constrained")


def _save(figure: Any, path: str | Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
