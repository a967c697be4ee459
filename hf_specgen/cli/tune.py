"""`hf-specgen tune`: measures latencies, and writes them to a file for `AdaptiveDepth(latency=…)`."""

from __future__ import annotations

import os

from rich.box import SIMPLE
from rich.table import Table

from hf_specgen.cli.settings import TuneSettings, terminal
from hf_specgen.depth import LatencyModel
from hf_specgen.evaluation.cost import measure_latency
from hf_specgen.evaluation.workloads import load_model, strategies


def show(settings: TuneSettings) -> None:
    """Measure, store, and print what was measured."""
    console = terminal()
    if settings.latency.is_dir() or not os.access(settings.latency.resolve().parent, os.W_OK):
        raise OSError(f"{str(settings.latency)!r} cannot be written; name a file in a folder that is writable")
    model, _ = load_model(settings.model, settings.dtype, settings.device)
    candidates = [one.candidates for one in strategies(settings.draft, settings.heads, settings.adapter)]
    for strategy in candidates:  # every strategy must fit the target before anything is measured
        strategy.target_requirements(model)
    with console.status("measuring latencies"):
        latency = measure_latency(model, candidates, rows=settings.batch_size, context=settings.context)
    latency.save(settings.latency)
    console.print(_latencies(latency))
    console.print(f"{settings.latency}: read by AdaptiveDepth(latency={str(settings.latency)!r})", highlight=False)


def _latencies(latency: LatencyModel) -> Table:
    """Latencies relative to a plain step, a row for each number of rows."""
    shown = (2, 4, 8, 16, 32)
    drafters = sorted({kind for one in latency.buckets for kind in one.drafters} - {"any"})
    titles = ["rows", "context", "plain step", *(f"T({tokens})" for tokens in shown), *drafters]
    view = Table(*titles, box=SIMPLE, pad_edge=False, title="latency in plain steps", title_justify="left")
    for curve, kinds in latency.buckets:
        cells = [str(curve.batch), str(curve.context), f"{1000 * curve(1):.1f} ms"]
        cells += [f"{curve.relative(tokens):.2f}" for tokens in shown]
        cells += [f"{kinds[kind].seconds[0] / curve(1):.2f}" for kind in drafters]
        view.add_row(*cells)
    return view
