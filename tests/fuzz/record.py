"""Files with the counts of a run, written while it runs, and their sum over several processes."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.harness.provenance import provenance
from tests.fuzz.report import Report

CASES_BETWEEN_WRITES = 100
COLUMNS = ("cases", "drafting", "drafted", "accepted", "rejected")


def origin(seed: str, first: int) -> dict[str, Any]:
    """What is needed to repeat a run: seed and number of the first case, commit, versions, machine."""
    return {
        "seed": seed,
        "first_case": first,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **provenance(),
    }


def write(path: Path, report: Report, origin: Mapping[str, Any]) -> None:
    """Write the counts so far; the file is replaced as a whole, so that an interrupted run leaves a complete one."""
    text = json.dumps({**origin, **report.to_dict()}, indent=1) + "\n"
    temporary = path.with_suffix(".part")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def merge(paths: Iterable[Path]) -> dict[str, Any]:
    """The sum of several records, and where each comes from."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    counts = Report().to_dict()
    origins = [{name: value for name, value in record.items() if name not in counts} for record in records]
    counts = {name: _sum([record[name] for record in records]) for name in counts}
    return {
        "runs": [{**origin, "cases": record["cases"]} for origin, record in zip(origins, records, strict=True)]
    } | counts


def _sum(values: Sequence[Any]) -> Any:
    if isinstance(values[0], dict):
        names = list(dict.fromkeys(name for value in values for name in value))
        return {name: _sum([value[name] for value in values if name in value]) for name in names}
    return sum(values[1:], start=values[0])


def markdown(record: Mapping[str, Any]) -> str:
    """The counts by strategy as a table for the documentation."""
    rows = [("strategy", *COLUMNS, "same", "refused", "raised alike", "different")]
    by_strategy = {**dict(sorted(record["by_strategy"].items())), "**all**": record}
    for name, counts in by_strategy.items():
        statuses = counts["statuses"]
        same = statuses["same"] + statuses["rounding"]
        numbers = [*(counts[column] for column in COLUMNS), same, statuses["refused"], statuses["raised"]]
        rows.append((name, *(f"{number:,}" for number in [*numbers, statuses["different"]])))
    first, *others = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([first, "|---" + "|--:" * (len(rows[0]) - 1) + "|", *others])
