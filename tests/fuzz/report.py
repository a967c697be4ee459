"""Counts over many cases, and the tables that show them."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from tests.fuzz.comparison import Outcome

STATUSES = ("same", "refused", "raised", "rounding", "different")


@dataclass
class Row:
    """Counts of some cases."""

    cases: int = 0
    drafting: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    statuses: Counter[str] = field(default_factory=Counter)

    @property
    def rejected(self) -> int:
        return self.drafted - self.accepted

    def to_dict(self) -> dict[str, Any]:
        """The counts as plain values."""
        return {
            **{name: getattr(self, name) for name in ("cases", "drafting", "drafted", "accepted", "rejected")},
            "statuses": {status: self.statuses[status] for status in STATUSES},
        }


class Report:
    """Sums outcomes up: by strategy, by architecture, refusals and errors by reason."""

    def __init__(self) -> None:
        self.total = Row()
        self.by_strategy: defaultdict[str, Row] = defaultdict(Row)
        self.by_architecture: defaultdict[str, Row] = defaultdict(Row)
        self.refusals: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.faults_raised = 0
        self.failures: list[Outcome] = []

    def add(self, outcome: Outcome) -> str:
        """Count an outcome; returns its status."""
        case, status = outcome.case, outcome.status
        if status == "different":
            self.failures.append(outcome)
        if status == "refused":
            self.refusals[_without_names(outcome.reason)] += 1
        if status == "raised":
            self.errors[_without_names(outcome.reason)] += 1
        self.faults_raised += outcome.fault_raised
        for row in (self.total, self.by_strategy[case.strategy], self.by_architecture[case.architecture]):
            row.cases += 1
            row.drafting += outcome.drafted > 0
            row.drafted += outcome.drafted
            row.accepted += outcome.accepted
            row.emitted += outcome.emitted
            row.statuses[status] += 1
        return status

    def tables(self) -> Iterable[Table]:
        yield _counts("strategy", self.by_strategy, self.total)
        yield _counts("architecture", self.by_architecture, self.total)
        reasons = {"refusals": self.refusals, "errors of both sides": self.errors}
        for title, counter in reasons.items():
            if counter:
                table = Table("cases", "reason", title=title)
                for name, count in counter.most_common():
                    table.add_row(str(count), name)
                yield table

    def to_dict(self) -> dict[str, Any]:
        """The counts as plain values."""
        return {
            **self.total.to_dict(),
            "faults_raised": self.faults_raised,
            "refusals": dict(self.refusals.most_common()),
            "errors_of_both_sides": dict(self.errors.most_common()),
            "failures": [outcome.case.to_json() for outcome in self.failures],
            "by_strategy": {name: row.to_dict() for name, row in sorted(self.by_strategy.items())},
            "by_architecture": {name: row.to_dict() for name, row in sorted(self.by_architecture.items())},
        }


def _counts(name: str, rows: dict[str, Row], total: Row) -> Table:
    table = Table(name, *("cases", "drafting", "drafted", "accepted", "rejected", *STATUSES), title=f"by {name}")
    for label, row in [*sorted(rows.items()), ("total", total)]:
        if label == "total":
            table.add_section()
        numbers = (row.cases, row.drafting, row.drafted, row.accepted, row.rejected)
        table.add_row(label, *map(str, numbers), *(str(row.statuses[status] or "") for status in STATUSES))
    return table


def _without_names(reason: str) -> str:
    """A reason that is the same for all models and numbers."""
    first = reason.strip().splitlines()[0] if reason.strip() else "(no reason)"
    first = re.sub(r"\b\w+(ForCausalLM|LMHeadModel|LMHead|Decoder)\b", "<model>", first)
    return re.sub(r"\d+", "N", first)[:150]
