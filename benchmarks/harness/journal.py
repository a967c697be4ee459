"""Records of a run on disk, one line per finished unit, so that an interrupted run can be resumed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class JournalError(ValueError):
    """A run that cannot be resumed."""


class Journal:
    """The records of a run, of which every process writes its own file.

    Args:
        plan: a dataclass with the settings of the run; only a run with equal settings can be resumed.
        rank: of this process.
        resume: continue with the records in the folder instead of replacing them.
        inputs: a digest of what is measured: prompts and local weights; only a run with the same can be resumed.

    Attributes:
        old: records of the run that is resumed.
        new: records added since.
    """

    def __init__(self, folder: Path, plan: Any, rank: int = 0, *, resume: bool = False, inputs: str = ""):
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"records-{rank}.jsonl"
        self.old: list[Record] = []
        self.new: list[Record] = []
        header = json.loads(json.dumps({"plan": asdict(plan), "inputs": inputs}))
        if resume:
            self.old = read(folder, header)
        kept = _lines(self._path) if resume and self._path.exists() else []
        self._path.write_text("".join(line + "\n" for line in kept or [json.dumps(header)]), encoding="utf-8")
        self._done = {record["unit"] for record in self.old}

    def __contains__(self, unit: str) -> bool:
        return unit in self._done

    @property
    def records(self) -> list[Record]:
        """The old and the new records of this process."""
        return [*self.old, *self.new]

    def add(self, unit: str, records: list[Record]) -> None:
        """Write all records of a unit as one line, so that a unit is recorded completely or not at all."""
        records = [{"unit": unit, **record} for record in records]
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(records) + "\n")
        self.new += records
        self._done.add(unit)


def read(folder: Path, header: dict[str, Any] | None = None) -> list[Record]:
    """The records of all processes in the folder of a run; `header` is the first line that each file must have."""
    files = sorted(folder.glob("records-*.jsonl"))
    if not files:
        raise JournalError(f"there is nothing to resume in {folder}; run without --resume first")
    records: list[Record] = []
    for file in files:
        first, *units = map(json.loads, _lines(file) or [json.dumps(header)])
        if header is not None and first != header:
            changed = "options" if first["plan"] != header["plan"] else "prompts or weights"
            raise JournalError(f"{file} was measured with other {changed}; repeat those, or choose another --out")
        records += [record for unit in units for record in unit]
    return records


def _lines(file: Path) -> list[str]:
    """Complete lines only: a killed run may leave half a line."""
    return file.read_text(encoding="utf-8").split("\n")[:-1]
