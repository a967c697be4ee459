"""Finds the benchmark suite, which comes with the repository, not with the package."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

REPOSITORY = Path(__file__).resolve().parents[2]


def command() -> typer.Typer:
    """The command of `benchmarks/run.py`.

    Raises:
        SystemExit: with one sentence, if the package was installed without its repository.
    """
    if not (REPOSITORY / "benchmarks" / "run.py").exists():
        raise SystemExit("the benchmark comes with the repository, not the package; run it from a clone")
    if str(REPOSITORY) not in sys.path:
        sys.path.insert(0, str(REPOSITORY))
    from benchmarks.run import app

    return app
