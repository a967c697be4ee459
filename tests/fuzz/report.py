"""Counts over many cases: of one run, or of the records of several."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tests.fuzz.comparison import Outcome

COLUMNS = ("cases", "drafting", "drafted", "accepted", "rejected", "same", "refused", "raised", "different")
"""Of the printed table; differences that are gone in float64 count as "same" and as "rounding"."""


class Report:
    """Sums outcomes up; `origin` is what is needed to repeat the run: seed, first case, commit, versions, machine."""

    def __init__(self, origin: dict[str, Any] | None = None) -> None:
        self.origins = [] if origin is None else [origin]
        self.counts: dict[str, defaultdict[str, Counter[str]]] = {}
        """By strategy and by architecture; of refusals, and of errors that both sides raised, by reason."""
        for name in ("strategy", "architecture", "reasons"):
            self.counts[name] = defaultdict(Counter)
        self.failures: list[str] = []
        """Cases, as JSON."""

    @property
    def total(self) -> Counter[str]:
        """The counts of all cases."""
        return sum(self.counts["strategy"].values(), Counter())

    def add(self, outcome: Outcome) -> str:
        """Count an outcome; returns its status."""
        case, status = outcome.case, outcome.status
        if status == "different":
            self.failures.append(case.to_json())
        if status in ("refused", "raised"):
            self.counts["reasons"][status][_without_names(outcome.reason)] += 1
        rejected = outcome.drafted - outcome.accepted
        counts = {
            "cases": 1,
            "drafting": int(outcome.drafted > 0),
            "faults raised": int(outcome.fault_raised),
            status: 1,
        }
        counts |= {"drafted": outcome.drafted, "accepted": outcome.accepted, "rejected": rejected}
        if status == "rounding":
            counts["same"] = 1
        for name in ("strategy", "architecture"):
            self.counts[name][getattr(case, name)].update(counts)
        return status

    def write(self, path: Path) -> None:
        """Write the counts so far; the file is replaced as a whole, so an interrupted run leaves a complete one."""
        temporary = path.with_suffix(".part")
        temporary.write_text(json.dumps({"total": self.total, **vars(self)}, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)

    @classmethod
    def merged(cls, paths: Sequence[Path]) -> Self:
        """The sum of several records."""
        merged = cls()
        for path in paths:
            record = json.loads(path.read_text(encoding="utf-8"))
            merged.origins += record["origins"]
            merged.failures += record["failures"]
            for name, rows in record["counts"].items():
                for key, counts in rows.items():
                    merged.counts[name][key].update(counts)
        return merged

    def markdown(self) -> str:
        """Tables by strategy and by architecture, and the reasons of refusals and errors."""
        parts = []
        for name in ("strategy", "architecture"):
            rows = [(name, *COLUMNS), ("---", *["--:"] * len(COLUMNS))]
            for label, row in [*sorted(self.counts[name].items()), ("**all**", self.total)]:
                rows.append((label, *(f"{row[column]:,}" for column in COLUMNS)))
            parts.append("\n".join("| " + " | ".join(row) + " |" for row in rows))
        for status, reasons in self.counts["reasons"].items():
            parts.append("\n".join(f"{count} {status}: {reason}" for reason, count in reasons.most_common()))
        return "\n\n".join(parts)


def _without_names(reason: str) -> str:
    """A reason that is the same for all models and numbers."""
    first = reason.strip().splitlines()[0] if reason.strip() else "(no reason)"
    first = re.sub(r"\b\w+(ForCausalLM|LMHeadModel|LMHead|Decoder)\b", "<model>", first)
    return re.sub(r"\d+", "N", first)[:150]
