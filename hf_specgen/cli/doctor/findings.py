"""What the doctor says: findings, each with what it means and what to change, and a recommended line of code."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from rich.box import SIMPLE
from rich.table import Table


class CheckResult(str, Enum):
    """How a finding is to be taken."""

    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"


SIGNS = {CheckResult.GOOD: "[green]✓[/]", CheckResult.WARNING: "[yellow]![/]", CheckResult.BAD: "[red]✗[/]"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Args:
        subject: what was looked at.
        verdict: good, warning or bad.
        found: what was found, with its numbers.
        meaning: what follows from it; what to change, if anything.
    """

    subject: str
    verdict: CheckResult
    found: str
    meaning: str = ""


@dataclass
class Report:
    """Everything that the doctor found.

    Args:
        findings: in the order in which they were made.
        recommendation: a line of code; empty if speculation cannot be used.
        reason: why that line.
        measured: tokens per second and speedup of each variant of the quick run, by name.
    """

    findings: list[Finding] = field(default_factory=list)
    recommendation: str = ""
    reason: str = ""
    measured: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def bad(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict is CheckResult.BAD]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)

    def table(self) -> Table:
        """For people."""
        view = Table(box=SIMPLE, pad_edge=False, show_header=False)
        view.add_column()
        view.add_column(style="bold", no_wrap=True)
        view.add_column(overflow="fold")
        for finding in self.findings:
            text = finding.found + (f"\n[dim]{finding.meaning}[/]" if finding.meaning else "")
            view.add_row(SIGNS[finding.verdict], finding.subject, text)
        return view
