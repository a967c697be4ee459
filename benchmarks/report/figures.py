"""The figures of a report, saved as PNG and SVG files; the page embeds the SVG."""

from __future__ import annotations

import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.report.tables import Rows

KINDS = {"n-grams + draft": 5, "n-grams + EAGLE": 7, "n-grams + Medusa": 8, "n-grams + recycling": 6}
KINDS |= {"n-grams": 0, "prompt lookup": 0}
KINDS |= {"draft model": 1, "assistant_model": 1, "layer skip": 2, "assistant_early_exit": 2, "Medusa": 3, "EAGLE": 4}
"""A strategy and its peer in Transformers have one hue; the peer's is paler. The first name that fits counts."""
PEERS = ("prompt lookup", "assistant_model", "assistant_early_exit")
COLORS = ["#0b7a75", "#c8553d", "#6a4c93", "#3a6ea5", "#b8860b", "#8c2f1b", "#4fa39e", "#7a5a07", "#1f3b73"]
PALE = ["#93c9c6", "#ebb5a8", "#c0b1d4", "#a9c4de"]
INK, GRID = "#202428", "#d5d9dd"
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hf_specgen",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def figures(tables: dict[str, Rows]) -> dict[str, Figure]:
    """A figure for each table that can be drawn, by the name of the table."""
    drawers: dict[str, Callable[[Rows], Figure]] = {
        "speed": _speedups,
        "projected by domain": _projected,
        "acceptance": _positions,
        "cost": _cost,
        "batch": lambda rows: _sweep(rows, "batch", "rows in a batch"),
        "temperature": lambda rows: _sweep(rows, "temperature", "temperature"),
        "context": lambda rows: _sweep(rows, "context", "tokens of context"),
    }
    with rc_context(STYLE):
        return {name: draw(tables[name]) for name, draw in drawers.items() if len(tables.get(name, [])) > 1}


def save(drawn: dict[str, Figure], folder: Path) -> dict[str, str]:
    """Save every figure as a PNG and an SVG file; returns the `<svg>` elements by name."""
    folder.mkdir(parents=True, exist_ok=True)
    elements = {}
    for name, figure in drawn.items():
        file, text = folder / name.replace(" ", "_"), StringIO()
        with rc_context(STYLE):
            figure.savefig(text, format="svg", facecolor="white", metadata={"Date": None})
            figure.savefig(file.with_suffix(".png"), dpi=160, facecolor="white")
        elements[name] = text.getvalue()[text.getvalue().index("<svg") :]
        file.with_suffix(".svg").write_text(elements[name], encoding="utf-8")
    return elements


def color_of(variant: str) -> str:
    """The color of a variant's strategy; black for others."""
    for kind, number in KINDS.items():
        if variant.startswith(kind):
            return (PALE if kind in PEERS else COLORS)[number]
    return INK


def _speedups(rows: Rows) -> Figure:
    """Bars with confidence intervals by domain, one for each variant."""
    rows = [row for row in rows if "speedup" in row]
    return _bars(rows, "speedup", "speedup over plain generate, with 95% interval", lambda row: "")


def throughput(rows: Rows) -> Figure:
    """Tokens per second by domain, a bar for each variant, with the speedup over plain `generate` at its end."""

    def label(row: dict[str, Any]) -> str:
        return f"{row['speedup']:.1f}x" if "speedup" in row else f"{row['tokens/s']:.0f}"

    with rc_context(STYLE):
        return _bars(rows, "tokens/s", "tokens per second (at the bars: over plain)", label)


def _projected(rows: Rows) -> Figure:
    """Bars by domain, one for each variant, with the value at the end of the bars of all domains together."""
    spread = [
        {"variant": row["variant"], "domain": domain, "speedup": value}
        for row in rows
        for domain, value in row.items()
        if domain != "variant"
    ]
    text = "projected speedup over plain generate"
    return _bars(spread, "speedup", text, lambda row: f"{row['speedup']:.1f}x" if row["domain"] == "all" else "")


def _bars(rows: Rows, value: str, title: str, label: Callable[[dict[str, Any]], str]) -> Figure:
    """Horizontal bars by domain, one for each variant; with the intervals `low` to `high` of speedups."""
    domains, variants = (list(dict.fromkeys(row[name] for row in rows)) for name in ("domain", "variant"))
    figure, axes = _axes(1.2 + 0.15 * len(rows))
    height = 0.84 / len(variants)
    for place, variant in enumerate(variants):
        mine = [row for row in rows if row["variant"] == variant]
        at = [domains.index(row["domain"]) + (place - (len(variants) - 1) / 2) * height for row in mine]
        color = GRID if variant == "plain" else color_of(variant)
        bars = axes.barh(at, [row[value] for row in mine], height, color=color, label=_without_setting(variant))
        axes.bar_label(bars, [label(row) for row in mine], padding=2, fontsize=6.5)
        for row, where in zip(mine, at, strict=True):
            if value == "speedup" and "low" in row:
                axes.plot([row["low"], row["high"]], [where, where], color=INK, linewidth=0.8)
    if value == "speedup":
        axes.axvline(1, color=INK, linewidth=1)
    axes.set_yticks(range(len(domains)), domains)
    axes.set_ylim(len(domains) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.margins(x=0.08)
    axes.set_xlabel(title)
    return _with_legend(figure, axes)


def _without_setting(variant: str) -> str:
    """The name of a variant without the settings that it runs with."""
    return re.sub(r" (k|n|tree|p)[=>]\S+", "", variant)


def _positions(rows: Rows) -> Figure:
    """Acceptance by position over all domains, a line for each variant."""
    figure, axes = _axes(3.2)
    for row in [row for row in rows if row["domain"] == "all"]:
        shares = [float(share) for share in row["by position"].split()]
        axes.plot(range(1, len(shares) + 1), shares, "o-", color=color_of(row["variant"]), label=row["variant"])
    axes.set(xlabel="position in the draft", ylabel="share of drafts accepted up to there", ylim=(0, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    return _with_legend(figure, axes)


def _cost(rows: Rows) -> Figure:
    figure, axes = _axes(2.8)
    axes.plot([row["q"] for row in rows], [row["T(q)/T(1)"] for row in rows], "o-", color=COLORS[3])
    axes.axhline(1, color=INK, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks([row["q"] for row in rows], [str(row["q"]) for row in rows])
    axes.set(xlabel="tokens in one forward pass, q", ylabel="T(q) / T(1)")
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    return figure


def _sweep(rows: Rows, column: str, label: str) -> Figure:
    """Speedup along a sweep, a line for each variant; dashed for those of Transformers."""
    rows = [row for row in rows if "speedup" in row]
    points = list(dict.fromkeys(row[column] for row in rows))
    figure, axes = _axes(3.8)
    axes.axhline(1, color=INK, linewidth=1)
    for variant in dict.fromkeys(row["variant"] for row in rows):
        mine = [row for row in rows if row["variant"] == variant]
        places, style = [points.index(row[column]) for row in mine], "o--" if variant.startswith(PEERS) else "o-"
        speedups = [row["speedup"] for row in mine]
        axes.plot(places, speedups, style, color=color_of(variant), label=variant, markersize=4.5)
    axes.set_xticks(range(len(points)), [str(point) for point in points])
    axes.set(xlabel=label, ylabel="speedup over plain")
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    return _with_legend(figure, axes)


def _axes(height: float) -> tuple[Figure, Axes]:
    """The width of a phone, so that text is not scaled down there."""
    figure = Figure(figsize=(4.6, height), layout="constrained")
    axes = figure.subplots()
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _with_legend(figure: Figure, axes: Axes) -> Figure:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=2, frameon=False, fontsize=9, handlelength=1.2)
    return figure
