"""The report of a run: one HTML page without network access or scripts, made from `report.html.j2`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from benchmarks.report.figures import figures, save
from benchmarks.report.results import choices
from benchmarks.report.summary import ALL
from benchmarks.report.tables import Rows, cell, columns, short_commit, tables_of

FOLDER = Path(__file__).parent


def write(result: dict[str, Any], folder: Path) -> Path:
    """Write `report.json`, `report.html` and `plots/` of what `results.result` returned; returns the page."""
    drawn = figures(result["tables"])
    svg = save(drawn, folder / "plots")
    (folder / "report.json").write_text(json.dumps(result, indent=2), encoding="utf-8")
    page = folder / "report.html"
    page.write_text(html(result, svg).strip() + "\n", encoding="utf-8")
    return page


def html(result: dict[str, Any], svg: dict[str, str]) -> str:
    """The page of a result, with its figures as `<svg>` elements by the name of their table."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"cell": cell, "short_commit": short_commit}
    tables = tables_of(result)
    return environment.get_template("report.html.j2").render(
        result=result,
        tables=tables,
        style=Markup((FOLDER / "report.css").read_text(encoding="utf-8")),
        figures={name: Markup(text) for name, text in svg.items()},
        target=_target(result["plan"]),
        choices=choices(result),
        differing=bool(tables.get("differences")),
        speeds={(row["variant"], row["domain"]): row for row in tables.get("speed", [])},
        positions=_positions(tables.get("acceptance", [])),
        provenance=json.dumps({name: result[name] for name in ("seed", "chosen", "provenance", "plan")}, indent=2),
        columns=columns,
        ALL=ALL,
    )


def _target(plan: dict[str, Any]) -> str:
    name = Path(plan["model"]).name or "the bundled model"
    return f"{name} widened to {plan['widen'] / 1e6:.0f}M parameters (the same function)" if plan["widen"] else name


def _positions(acceptance: Rows) -> Rows:
    """Acceptance by position over all domains: a row for each position, a column for each variant."""
    shares = {row["variant"]: row["by position"].split() for row in acceptance if row["domain"] == ALL}
    deepest = max(map(len, shares.values()), default=0)
    return [
        {"position": place + 1} | {name: values[place] for name, values in shares.items() if place < len(values)}
        for place in range(deepest)
    ]
