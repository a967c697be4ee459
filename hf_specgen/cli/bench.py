"""`hf-specgen bench`: runs the benchmark suite of a clone of the repository.

Without a model of the user's own the target is the embedded model widened to 300M parameters, where drafting matters;
`--widen 0` measures the embedded model itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

SUITE = Path("benchmarks") / "__main__.py"
TARGET_OPTIONS = ("--model", "--wide", "--widen", "--help", "-h", "--resume")
"""Options that choose the target, or run nothing."""
MISSING = (
    "the benchmarks come with the repository, not with the package: change to the root of a clone and run "
    "`python -m benchmarks suite`"
)


def run(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by `python -m benchmarks suite`, run in the current directory.

    Args:
        arguments: options of the suite.

    Raises:
        SystemExit: if the current directory is not the root of a clone.
    """
    if not SUITE.is_file():
        raise SystemExit(MISSING)
    sys.stdout.flush()
    chosen = any(argument.partition("=")[0] in TARGET_OPTIONS for argument in arguments)
    target = [] if chosen else ["--wide"]
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks", "suite", *target, *arguments])
