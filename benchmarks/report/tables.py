"""Recorded results as Markdown.

python -m benchmarks.tables benchmarks/results                                  # print them
python -m benchmarks.tables benchmarks/results --write benchmarks/README.md     # put them between its two markers
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import Rows

LONG = 22
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def markdown(result: dict[str, Any]) -> str:
    """One result file: where its numbers come from, and its table or tables."""
    origin = result["provenance"]
    machine, versions = origin["machine"], origin["versions"]
    made = (
        f"commit {short(origin['commit'])}, torch {versions['torch']}, transformers "
        f"{versions['transformers']}, {machine['gpu'] or machine['processor']}, {machine['threads']} threads"
    )
    if "seconds" in result:
        made += f", {result['seconds'] / 60:.1f} minutes"
    if "section" in result:
        command = f"python -m benchmarks.core {result['section']} --repeats {result['repeats']}"
        parts = [f"### {result['section']}", f"`{command}`: {made}", _shown(result["rows"])]
    else:
        program, *options = origin["argv"]
        program = f"python benchmarks/{program}" if program.endswith(".py") else program
        command = " ".join([program, *options])
        parts = ["### The report's tables", f"`{command}`: {made}", *result["notes"]]
        for name, rows in result["tables"].items():
            parts += [f"#### {name}", _shown(rows)]
    return "\n\n".join(parts) + "\n"


def _shown(rows: Rows) -> str:
    """A long table opens on a click; its rows over all domains or cells, if it has such, stand before it."""
    if len(rows) <= LONG:
        return "\n".join(lines(rows))
    over_all = [row for row in rows if str(next(iter(row.values()))).startswith("all")]
    each = [row for row in rows if row not in over_all]
    first = ["\n".join(lines(over_all))] if over_all else []
    folded = [f"<details><summary>all {len(each)} rows</summary>", "\n".join(lines(each)), "</details>"]
    return "\n\n".join([*first, *folded])


def lines(rows: Rows) -> list[str]:
    """A Markdown table."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    made = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return made + ["| " + " | ".join(cell(row.get(column, "")) for column in columns) + " |" for row in rows]


def cell(value: Any) -> str:
    """A number as it stands in a table."""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def short(commit: str | None) -> str:
    """Enough of a commit to find it; what was changed since stays told."""
    name, changed, _ = (commit or "unknown").partition("+")
    return name[:12] + (" with changes" if changed else "")


def main(
    folder: Annotated[Path, typer.Argument(help="Where the JSON files are.")],
    write: Annotated[Path | None, typer.Option(help="A Markdown file with the two markers.")] = None,
) -> None:
    """Print every table, or write them into a file."""
    files = [*sorted(folder.glob("*/report.json")), *sorted(folder.glob("*.json"))]
    text = "\n".join(markdown(json.loads(path.read_text(encoding="utf-8"))) for path in files)
    if write is None:
        typer.echo(text)
        return
    page = write.read_text(encoding="utf-8")
    if BEGIN not in page or END not in page:
        raise typer.BadParameter(f"{write} has no place for the tables; put {BEGIN} and {END} into it")
    write.write_text(f"{page.split(BEGIN)[0]}{BEGIN}\n\n{text}\n{END}{page.split(END, 1)[1]}", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
