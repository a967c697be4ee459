"""Plots of what a monitor has recorded, and of the speedup that an acceptance rate allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_specgen.monitoring.monitor import SpeculationMonitor

ACCEPTED, REJECTED = "#2a7f62", "#d9d9d9"
Latency = Callable[[float], float] | None
"""T(q) / T(1) of a target, such as `CostCurve.relative`; None for one for which draft tokens are free."""


def plot_monitor(monitor: SpeculationMonitor, path: str | Path) -> None:
    """Plot the drafts of the last row steps, and how many drafts had so many tokens accepted.

    The suffix of the path chooses the format (PNG, SVG, PDF).
    """
    steps = list(monitor.window)
    if not steps:
        raise ValueError("the monitor has no steps yet; pass it to generate(…, monitor=monitor)")
    figure = _figure()
    newest, histogram = figure.subplots(2, 1)
    numbers = range(1, len(steps) + 1)
    newest.bar(numbers, [step.depth for step in steps], color=REJECTED, label="depth of the draft")
    newest.bar(numbers, [step.accepted for step in steps], color=ACCEPTED, label="accepted")
    newest.set(title=monitor.summary(), xlabel="step of a row", ylabel="tokens")
    newest.legend(frameon=False)
    accepted = [accepted for _, accepted in monitor.drafts]
    histogram.hist(accepted, range(max(accepted, default=0) + 2), weights=monitor.drafts.values(), color=ACCEPTED)
    histogram.set(xlabel="accepted tokens of a draft, over all calls", ylabel="drafts")
    _save(figure, path)


def speedup(acceptance: float, k: int, latency: Latency = None, draft_pass: float = 0.0) -> float:
    """Expected speedup of chains of k draft tokens over plain decoding, if each is accepted with this probability.

    A step yields 1 + a + a² + … + a^k tokens and takes T(1 + k) / T(1) plus k passes of the drafter.

    Args:
        acceptance: a, between 0 and 1.
        latency: T(q) / T(1) of the target, such as `CostCurve.relative`; 1 for any q if left out.
        draft_pass: time of a drafter's pass over T(1).

    Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), theorem 3.8.

    Example:
        >>> round(speedup(0.8, k=5, draft_pass=0.05), 2)
        2.95
    """
    tokens = sum(acceptance**depth for depth in range(k + 1))
    return tokens / ((latency(1 + k) if latency else 1.0) + k * draft_pass)


def plot_speedup(
    path: str | Path, *, latency: Latency = None, draft_pass: float = 0.05, depths: Sequence[int] = (1, 2, 3, 5, 8, 12)
) -> None:
    """Plot `speedup` over the acceptance rate, a line for each k; where it is below 1, drafting loses."""
    figure = _figure()
    axes, rates = figure.subplots(), [step / 100 for step in range(101)]
    for k in depths:
        axes.plot(rates, [speedup(rate, k, latency, draft_pass) for rate in rates], label=f"k = {k}")
    axes.axhline(1, color=REJECTED)
    axes.set(xlabel="acceptance rate of a draft token", ylabel="speedup over plain decoding", xlim=(0, 1), ylim=0)
    axes.legend(frameon=False)
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
