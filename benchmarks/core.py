"""The figures of the core: n-gram candidates against plain `generate` and Transformers' own prompt lookup.

    python -m benchmarks.core                 # every section; about 40 minutes on two cores
    python -m benchmarks.core lookup loop     # some of them
    python -m benchmarks.core --quick         # a look in a few minutes; too little for figures to quote

All sides of a comparison run in this process, taking turns on the same prompts from the same seeds. Throughput is the
sum of tokens over the sum of time. A figure is the median over the repeats, with the lowest and highest beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import adaptive, drafting, matches, medusa, overhead, replay, throughput
from benchmarks.common import Rows
from benchmarks.tables import cell
from hf_specgen.evaluation.provenance import provenance

SECTIONS: dict[str, Callable[[int, bool], Rows]] = {
    "lookup": overhead.lookup,
    "loop": overhead.loop,
    "context": overhead.context,
    "traces": replay.traces,
    "matches": matches.matches,
    "domains": throughput.domains,
    "batch": throughput.batch,
    "domains-wide": partial(throughput.domains, wide=True),
    "drafting": drafting.drafting,
    "drafting-wide": partial(drafting.drafting, wide=True),
    "medusa": medusa.medusa,
    "medusa-wide": partial(medusa.medusa, wide=True),
    "medusa-wide-batch": partial(medusa.medusa, wide=True, batch_size=4),
    "medusa-training": medusa.medusa_training,
    "adaptive": adaptive.adaptive,
}


def main(
    sections: Annotated[list[str] | None, typer.Argument(help=f"All if left out: {', '.join(SECTIONS)}")] = None,
    repeats: Annotated[int, typer.Option(help="Runs of everything that is timed.")] = 3,
    quick: Annotated[bool, typer.Option(help="Few prompts, one run.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for one JSON file per section.")] = Path("benchmarks/results"),
) -> None:
    """Run the sections, print a table of each and save it with its provenance."""
    unknown = sorted(set(sections or ()) - set(SECTIONS))
    if unknown:
        raise typer.BadParameter(f"unknown section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    for name in sections or SECTIONS:
        begin = perf_counter()
        rows = SECTIONS[name](1 if quick else repeats, quick)
        took = {"seconds": perf_counter() - begin}
        console.print(table(name, rows))
        result = {"section": name, "quick": quick, "repeats": repeats, **took, "rows": rows, "provenance": provenance()}
        (out / f"{name}.json").write_text(json.dumps(result, indent=2))


def table(title: str, rows: Rows) -> Table:
    """Rows for the terminal."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    view = Table(title=title, title_style="bold")
    for column in columns:
        view.add_column(column, justify="right" if isinstance(rows[0].get(column), float) else "left")
    for row in rows:
        view.add_row(*[cell(row.get(column, "")) for column in columns])
    return view


if __name__ == "__main__":
    typer.run(main)
