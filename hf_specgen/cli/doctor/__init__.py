"""`hf-specgen doctor`: checks whether speculation works and is faster with these models on this machine."""

from __future__ import annotations

import json

from rich.console import Console

from hf_specgen.cli.doctor.examine import examine
from hf_specgen.cli.doctor.findings import CheckResult, Finding, Report
from hf_specgen.cli.settings import DoctorSettings

__all__ = ["CheckResult", "DoctorSettings", "Finding", "Report", "examine", "show"]


def show(settings: DoctorSettings) -> bool:
    """Examine, and print the report.

    Returns:
        False if a problem has to be solved first.

    Raises:
        OSError, ValueError: if a model cannot be found or is no causal language model.
    """
    report = examine(settings)
    if settings.as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        console = Console()
        console.print(report.table())
        if report.recommendation:
            console.print(f"[bold]{report.recommendation}[/]", highlight=False)
        console.print(report.reason)
    return not report.bad
