"""What a run decides: which strategy to use, how much faster it is on which text, and the line of code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from benchmarks.report.summary import ALL
from benchmarks.report.tables import tables_of

CLASSES = {
    "n-grams": ("ngram", "NgramCandidates"),
    "draft model": ("draft", "DraftModelCandidates"),
    "layer skip": ("layerskip", "LayerSkipCandidates"),
    "layer skip without adapter": ("layerskip", "LayerSkipCandidates"),
    "Medusa": ("medusa", "MedusaCandidates"),
    "EAGLE": ("eagle", "EagleCandidates"),
    "n-grams + recycling": ("auto", "CombinedCandidates"),
}
"""By the name of a strategy in tables: its name on the command line, and its class."""
WIDTH = 80
NAME_WIDTH, CELL_WIDTH = 26, 7
"""Columns of the terminal for the name of a variant, and for each speedup."""


@dataclass(frozen=True)
class Choice:
    """The best of this package's variants for one kind of text.

    Args:
        domain: kind of text; `ALL` for the choice over all of them.
        variant: its name in tables; None if none is faster than plain `generate`.
        speedup, low, high: of the fastest variant, with its 95% interval; `low` and `high` None for too few requests.
        code: the expression that builds the strategy.
    """

    domain: str
    variant: str | None
    speedup: float
    low: float | None
    high: float | None
    code: str


def choices(result: dict[str, Any]) -> list[Choice]:
    """The choice over all domains, then that of each domain; empty for a run without the table "speed".

    Args:
        result: as from `benchmarks.report.results.result`.
    """
    rows = [row for row in result["tables"].get("speed", []) if row["variant"] in result["ours"]]
    domains = sorted(dict.fromkeys(row["domain"] for row in rows), key=lambda domain: domain != ALL)
    return [_choice([row for row in rows if row["domain"] == domain], result) for domain in domains]


def code_of(variant: str, result: dict[str, Any]) -> str:
    """The Python expression that builds a variant.

    Example:
        >>> code_of("draft model k=4", {"plan": {"strategies": ["ngram", "draft=org/small"]}})
        "DraftModelCandidates('org/small', k=4)"
    """
    name, setting = _divided(variant)
    if " + " in name and name not in CLASSES:
        members = [code_of(f"{part} k=auto", result) for part in name.split(" + ")]
        return f"CombinedCandidates([{', '.join(members)}])"
    if name not in CLASSES:
        return variant
    command, made = CLASSES[name]
    texts = [text for part in result["plan"]["strategies"] for text in part.split("+")]
    source = next((text.partition("=")[2] for text in texts if text.partition("=")[0] == command), "")
    arguments = [] if command in ("ngram", "auto") else [source if source.isdigit() else repr(source or "…")]
    if command == "layerskip" and not source.isdigit():
        arguments = ["…", f"adapter={source or '…'!r}"]
    arguments += [part for part in setting.split() if not part.endswith("=auto")]
    return f"{made}({', '.join(arguments)})"


def overview(result: dict[str, Any]) -> Table | None:
    """Speedups by variant and domain in 80 columns, projected ones if a latency profile was given.

    Domains that do not fit are in the report.
    """
    tables, title = tables_of(result), "Speedup over plain generate"
    rows = tables.get("projected by domain") or tables.get("by domain", [])
    if not rows:
        return None
    verdicts = {(row["variant"], row["domain"]): row.get("verdict") for row in tables.get("speed", [])}
    if "projected by domain" in tables:
        title, verdicts = "Projected speedup over plain generate", {}
    domains = [name for name in dict.fromkeys(key for row in rows for key in row) if name != "variant"]
    shown = domains[: (WIDTH - NAME_WIDTH) // CELL_WIDTH]
    left_out = len(domains) - len(shown)
    view = Table(box=None, pad_edge=False, padding=(0, 0), title_justify="left", title_style="bold")
    view.title = title + (f"; {left_out} more domains in the report" if left_out else "")
    view.add_column("", width=NAME_WIDTH, no_wrap=True)
    for domain in shown:
        view.add_column(domain[: CELL_WIDTH - 1], width=CELL_WIDTH, justify="right", no_wrap=True)
    for row in sorted(rows, key=lambda row: row.get(ALL, 0.0)):
        ours = row["variant"] in result["ours"]
        cells = [_speedup(row.get(domain), verdicts.get((row["variant"], domain))) for domain in shown]
        view.add_row(Text(row["variant"][: NAME_WIDTH - 1], style="bold" if ours else "dim"), *cells)
    return view


def sentence(result: dict[str, Any]) -> str | None:
    """What to use, in one line or two; None for projected speedups, which hold for another machine."""
    if "projected by domain" in tables_of(result):
        return None
    best = next(iter(choices(result)), None)
    if best is None:
        return None
    if best.variant is None:
        return f"Use plain generate: no strategy was faster over all domains (the best: {best.speedup:.2f}x)."
    interval = f" (95% interval {best.low:.2f} to {best.high:.2f})" if best.low is not None else ""
    packed = " inside prepacked(model)" if result["plan"].get("pack_weights") else ""
    return f"Use {best.code}{packed}: {best.speedup:.2f}x{interval}."


def _choice(rows: list[dict[str, Any]], result: dict[str, Any]) -> Choice:
    best = max(rows, key=lambda row: row["speedup"])
    is_faster = best["verdict"] == "faster" or (best["verdict"] == "too few requests" and best["speedup"] > 1)
    variant = best["variant"] if is_faster else None
    code = code_of(best["variant"], result) if is_faster else ""
    return Choice(best["domain"], variant, best["speedup"], best.get("low"), best.get("high"), code)


def _speedup(value: float | None, verdict: str | None) -> Text:
    if value is None:
        return Text("")
    style = {"faster": "green", "slower": "red"}.get(verdict or "", "")
    return Text(f"{value:.2f}x", style=style)


def _divided(variant: str) -> tuple[str, str]:
    """Name and setting: the setting begins at the first word with "=".

    Example:
        >>> _divided("n-grams k=8 tree=32")
        ('n-grams', 'k=8 tree=32')
    """
    words = variant.split()
    first = next((place for place, word in enumerate(words) if "=" in word), len(words))
    return " ".join(words[:first]), " ".join(words[first:])
