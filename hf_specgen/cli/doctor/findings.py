"""The doctor's report: findings, each with its meaning and what to change, and a recommended line of code."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from rich.box import SIMPLE
from rich.table import Table


class CheckResult(str, Enum):
    """The result of a check."""

    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"


SIGNS = {CheckResult.GOOD: "[green]✓[/]", CheckResult.WARNING: "[yellow]![/]", CheckResult.BAD: "[red]✗[/]"}


@dataclass(frozen=True)
class Finding:
    """One check.

    Args:
        subject: what was checked.
        result: good, warning or bad.
        found: what was found, with its numbers.
        meaning: the consequence, and what to change, if anything.
    """

    subject: str
    result: CheckResult
    found: str
    meaning: str = ""


@dataclass
class Report:
    """All findings, and a recommendation.

    Args:
        findings: in the order of the checks.
        recommendation: a line of code; empty if speculation cannot be used.
        reason: why that line.
        measured: numbers of each variant of the quick benchmark, by name.
    """

    findings: list[Finding] = field(default_factory=list)
    recommendation: str = ""
    reason: str = ""
    measured: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def bad(self) -> list[Finding]:
        """The findings that have to be solved first."""
        return [finding for finding in self.findings if finding.result is CheckResult.BAD]

    def to_dict(self) -> dict[str, Any]:
        """Numbers, strings and lists, ready for JSON."""
        return asdict(self)

    def table(self) -> Table:
        """A row for each finding."""
        view = Table(box=SIMPLE, pad_edge=False, show_header=False)
        view.add_column()
        view.add_column(style="bold", no_wrap=True)
        view.add_column(overflow="fold")
        for finding in self.findings:
            text = finding.found + (f"\n[dim]{finding.meaning}[/]" if finding.meaning else "")
            view.add_row(SIGNS[finding.result], finding.subject, text)
        return view
