"""Tables of the adaptive suite: "auto" relative to plain decoding and to fixed depths, per cell and over all cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.journal import Record
from benchmarks.harness.variants import AUTO, PLAIN, PLAIN_AGAIN
from benchmarks.report.tables import Rows
from hf_specgen.evaluation.measure import Interval, speedup_interval

NEVER_SLOWER, CLOSE = 0.97, 0.93
"""Goals: speed relative to plain decoding, and to the best fixed depth of each cell."""


def tables(measured: Mapping[str, Sequence[Record]]) -> Rows:
    """Rows over all cells of each strategy, then a row for each cell.

    Args:
        measured: the records of each cell, by its name, which ends with the strategy.
    """
    return over_all_cells(measured) + [summary(name, records) for name, records in measured.items()]


def summary(name: str, records: Sequence[Record]) -> dict[str, Any]:
    """Speed of "auto" relative to plain decoding and to the best fixed depth of the cell; plain counts as depth 0.

    *later calls* leaves out the first call of the cell, which starts with what was learned in another cell.
    """
    sides = _sides(records)
    best = max((name for name in sides if name not in (AUTO, PLAIN_AGAIN.name)), key=lambda name: _rate(sides[name]))
    over_plain, over_best = _interval(sides[AUTO], sides[PLAIN.name]), _interval(sides[AUTO], sides[best])
    later, later_plain = sides[AUTO][1:], sides[PLAIN.name][1:]
    return {
        "cell": name,
        "auto/plain": over_plain.value,
        "lowest": over_plain.low,
        "highest": over_plain.high,
        "again/plain": _interval(sides[PLAIN_AGAIN.name], sides[PLAIN.name]).value,
        "later calls": _rate(later) / _rate(later_plain) if later else "",
        "best fixed": best,
        "auto/best": over_best.value,
        "best lowest": over_best.low,
        "best highest": over_best.high,
    }


def over_all_cells(measured: Mapping[str, Sequence[Record]]) -> Rows:
    """Per strategy: "auto" against the single depth that is best over all cells.

    Every cell has the same weight: the mean is taken over times per token relative to plain decoding. Further columns
    are the slowest cell, in how many cells "auto" reaches its goals, and in how many plain decoding reaches itself.
    """
    rows: Rows = []
    for strategy in dict.fromkeys(name.rsplit("/", 1)[1] for name in measured):
        chosen = {name: records for name, records in measured.items() if name.endswith(f"/{strategy}")}
        sides = [_sides(records) for records in chosen.values()]

        def time_per_token(name: str, sides: list[dict[str, list[Record]]] = sides) -> float:
            """Relative to plain decoding, the mean over cells."""
            return sum(_rate(side[PLAIN.name]) / _rate(side[name]) for side in sides) / len(sides)

        fixed = [name for name in sides[0] if name not in (AUTO, PLAIN_AGAIN.name)]
        best = min(fixed, key=time_per_token)
        each = [summary(name, records) for name, records in chosen.items()]
        rows.append(
            {
                "cell": f"all {len(chosen)} of {strategy}",
                "auto/plain": 1 / time_per_token(AUTO),
                "slowest": min(row["auto/plain"] for row in each),
                f"{NEVER_SLOWER} of plain": _share(each, "auto/plain", NEVER_SLOWER),
                "later calls": _share(each, "later calls", NEVER_SLOWER),
                "plain again": _share(each, "again/plain", NEVER_SLOWER),
                "best fixed": best,
                "auto/best": time_per_token(best) / time_per_token(AUTO),
                f"{CLOSE} of best": _share(each, "auto/best", CLOSE),
            }
        )
    return rows


def _share(rows: Rows, column: str, goal: float) -> str:
    values = [row[column] for row in rows if row[column] != ""]
    return f"{sum(value >= goal for value in values)} of {len(values)}"


def _sides(records: Sequence[Record]) -> dict[str, list[Record]]:
    sides: dict[str, list[Record]] = {}
    for record in records:
        sides.setdefault(record["variant"], []).append(record)
    return sides


def _interval(mine: Sequence[Record], theirs: Sequence[Record]) -> Interval:
    """Every call counts as a request of its own."""
    columns = [[float(record[name]) for record in side] for side in (mine, theirs) for name in ("tokens", "seconds")]
    return speedup_interval(*columns)


def _rate(records: Sequence[Record]) -> float:
    return sum(record["tokens"] for record in records) / sum(record["seconds"] for record in records)
