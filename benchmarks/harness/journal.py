"""What was measured, line by line on disk, so that an interrupted run keeps it and can go on."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.plan import Plan

Record = dict[str, Any]


class JournalError(ValueError):
    """A run that cannot be resumed."""


class Journal:
    """The records of one run; every process writes a file of its own.

    Args:
        folder: of the run.
        plan: what is measured; a run is resumed with the same plan only.
        rank: of this process.
        resume: go on with what is there; otherwise begin anew.

    Raises:
        JournalError: if there is nothing to resume, or it was made with another plan.
    """

    def __init__(self, folder: Path, plan: Plan, rank: int = 0, *, resume: bool = False):
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"records-{rank}.jsonl"
        self.old: list[Record] = []
        self.new: list[Record] = []
        header = json.loads(json.dumps({"plan": asdict(plan)}))
        if resume:
            self.old = read(folder, header)
        kept = _lines(self._path) if resume and self._path.exists() else []
        self._path.write_text("".join(line + "\n" for line in kept or [json.dumps(header)]), encoding="utf-8")
        self._done = {record["unit"] for record in self.old}

    def __contains__(self, key: str) -> bool:
        return key in self._done

    def add(self, key: str, records: list[Record]) -> None:
        """Write the records of a unit down as one line: it is there as a whole, or not at all."""
        records = [{"unit": key, **record} for record in records]
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(records) + "\n")
        self.new += records
        self._done.add(key)


def read(folder: Path, header: dict[str, Any] | None = None) -> list[Record]:
    """The records of all processes.

    Raises:
        JournalError: if there are none, or the header is another one.
    """
    files = sorted(folder.glob("records-*.jsonl"))
    if not files:
        raise JournalError(f"there is nothing to resume in {folder}; run without --resume first")
    records: list[Record] = []
    for file in files:
        first, *units = map(json.loads, _lines(file) or [json.dumps(header)])
        if header is not None and first != header:
            raise JournalError(f"{file} was measured with other options; repeat those, or leave --resume out")
        records += [record for unit in units for record in unit]
    return records


def _lines(file: Path) -> list[str]:
    """Those that end: a killed run may leave half a line behind."""
    return file.read_text(encoding="utf-8").split("\n")[:-1]
