"""The recorded results as Markdown: `python -m benchmarks.tables benchmarks/results > tables.md`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import Rows


def markdown(result: dict[str, Any]) -> str:
    """One section: a heading, where the numbers come from, a table."""
    origin = result["provenance"]
    machine, versions = origin["machine"], origin["versions"]
    return "\n".join(
        [
            f"### {result['section']}",
            "",
            f"`python -m benchmarks.core {result['section']} --repeats {result['repeats']}`: commit "
            f"{(origin['commit'] or 'unknown')[:12]}, torch {versions['torch']}, transformers "
            f"{versions['transformers']}, {machine['processor']}, {machine['threads']} threads",
            "",
            *_table(result["rows"]),
            "",
        ]
    )


def _table(rows: Rows) -> list[str]:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(cell(row.get(column, "")) for column in columns) + " |" for row in rows]


def cell(value: Any) -> str:
    """A number as it stands in a table."""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def main(folder: Annotated[Path, typer.Argument(help="Where the JSON files are.")]) -> None:
    """Print every section."""
    for path in sorted(folder.glob("*.json")):
        typer.echo(markdown(json.loads(path.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    typer.run(main)
