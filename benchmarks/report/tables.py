"""Tables as Markdown, for the terminal, and of recorded results for a README."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

Rows = list[dict[str, Any]]
MAX_ROWS = 22
"""Longer tables are folded."""
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def columns(rows: Rows) -> list[str]:
    """The names of all columns, in the order of their first occurrence."""
    return list(dict.fromkeys(column for row in rows for column in row))


def cell(value: Any) -> str:
    """A value as text."""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def markdown(rows: Rows) -> str:
    """A Markdown table.

    Example:
        >>> print(markdown([{"a": 1.0, "b": "x"}, {"b": True}]))
        | a | b |
        |---|---|
        | 1.00 | x |
        |  | yes |
    """
    names = columns(rows)
    lines = [names, *([cell(row.get(name, "")) for name in names] for row in rows)]
    made = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([made[0], "|" + "---|" * len(names), *made[1:]])


def by_domain(rows: Rows, value: str = "speedup", column: str = "domain") -> Rows:
    """A row for each variant and a column for each domain, from the rows of the table "speed"; all domains first.

    `value` is the column that is shown; `column` is the one that is spread, such as the batch size of a sweep.
    """
    chosen = [row for row in rows if value in row]
    domains = sorted(dict.fromkeys(row[column] for row in chosen), key=lambda domain: domain != "all")
    values = {(row["variant"], row[column]): row[value] for row in chosen}
    return [
        {"variant": variant} | {domain: values[variant, domain] for domain in domains if (variant, domain) in values}
        for variant in dict.fromkeys(row["variant"] for row in chosen)
    ]


def show(console: Console, title: str, rows: Rows) -> None:
    """Print a table on the terminal; as Markdown, which is not cut at any width, where the output is piped."""
    text = f"**{title}**\n\n{markdown(rows)}"
    if console.is_terminal:
        console.print(Markdown(text))
    else:
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def short_commit(commit: str | None) -> str:
    """The first 12 digits of a commit, and whether there were changes on top of it."""
    name, changed, _ = (commit or "unknown").partition("+")
    return name[:12] + (" with changes" if changed else "")


def recorded(result: dict[str, Any], folder: str) -> str:
    """The Markdown of a result file: its provenance, and its table or tables; a report is named by its folder."""
    origin = result["provenance"]
    machine, versions = origin["machine"], origin["versions"]
    made = (
        f"commit {short_commit(origin['commit'])}, torch {versions['torch']}, transformers "
        f"{versions['transformers']}, {machine['gpu'] or machine['processor']}, {machine['threads']} threads"
    )
    if "execution" in result:
        made += f", all sides {result['execution']}"
    if "seconds" in result:
        made += f", {result['seconds'] / 60:.1f} minutes"
    heading = f"`{command(result)}`: {made}"
    if "section" in result:
        return "\n\n".join([f"### {result['section']}", heading, _folded(result["rows"])]) + "\n"
    parts = [f"### {folder}", heading, *result["notes"]]
    for name, rows in tables_of(result).items():
        parts += [f"#### {name}", _folded(rows)]
    return "\n\n".join(parts) + "\n"


def tables_of(result: dict[str, Any]) -> dict[str, Rows]:
    """The tables of a report by name, with speedups by domain first; empty for other result files."""
    tables: dict[str, Rows] = result.get("tables", {})
    return {"by domain": by_domain(tables["speed"]), **tables} if "speed" in tables else tables


def command(result: dict[str, Any]) -> str:
    """The command that made a result, as it was at the commit of the result."""
    return f"python -m benchmarks {shlex.join(result['provenance']['argv'][1:])}"


def _folded(rows: Rows) -> str:
    """A table; of a long one only the rows over all domains or cells are visible, if there are such rows."""
    if len(rows) <= MAX_ROWS:
        return markdown(rows)
    over_all = [row for row in rows if str(next(iter(row.values()))).startswith("all")]
    others = [row for row in rows if row not in over_all]
    visible = [markdown(over_all)] if over_all else []
    folded = [f"<details><summary>all {len(others)} rows</summary>", markdown(others), "</details>"]
    return "\n\n".join([*visible, *folded])


def collect(folder: Path, table: str = "") -> str:
    """The Markdown of all results in a folder, or of folders of reports in it; `table` selects one of the reports."""
    files = [*sorted(folder.glob("report.json")), *sorted(folder.glob("*/report.json"))]  # reports of suites first
    files += sorted(path for path in folder.glob("*.json") if path.name != "report.json")
    results = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    if not results:
        raise ValueError(f"there are no results in {folder}")
    if not table:
        return "\n".join(recorded(one, path.resolve().parent.name) for one, path in zip(results, files, strict=True))
    found = [tables_of(result)[table] for result in results if table in tables_of(result)]
    if not found:
        names = sorted({name for result in results for name in tables_of(result)})
        raise ValueError(f"there is no table {table!r} in {folder}; there are {', '.join(names)}")
    return "\n\n".join(map(markdown, found)) + "\n"


def write(text: str, page: Path) -> None:
    """Replace the text between the two markers of a Markdown file."""
    old = page.read_text(encoding="utf-8")
    if BEGIN not in old or END not in old:
        raise ValueError(f"{page} has no markers for the tables; add {BEGIN} and {END}")
    page.write_text(f"{old.split(BEGIN)[0]}{BEGIN}\n\n{text}\n{END}{old.split(END, 1)[1]}", encoding="utf-8")
