"""The provenance of a measurement: commit, command, versions and machine."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import hf_specgen
from hf_specgen import __version__

PACKAGE = Path(hf_specgen.__file__).resolve().parent
RECORDED = ("benchmarks/results", "benchmarks/README.md")
"""Recorded results: changes in them do not change what is measured."""


def provenance() -> dict[str, Any]:
    """Everything needed to repeat a measurement: commit, command, versions and machine.

    The commit is that of the clone, with "+changes" if anything but recorded results differs from it; None for an
    installed package.
    """
    versions = {"python": platform.python_version(), "hf-specgen": __version__}
    return {
        "commit": _commit(),
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": versions | {name: version(name) for name in ("torch", "transformers")},
        "machine": {
            "processor": _processor(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


def _commit() -> str | None:
    try:
        root = Path(_git("rev-parse", "--show-toplevel")).resolve()
        if root != PACKAGE.parent or not _git("ls-files", "--", "__init__.py"):
            return None  # installed somewhere inside another repository
        excluded = [f":(top,exclude){path}" for path in RECORDED]
        changes = _git("status", "--porcelain", "--", ":/", *excluded)
        return _git("rev-parse", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=PACKAGE, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
