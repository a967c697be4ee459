"""Where a number comes from: commit, versions, machine, command. Saved with every result."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

RECORDED = ("benchmarks/results", "benchmarks/README.md")


def provenance() -> dict[str, Any]:
    """What somebody needs in order to repeat a measurement.

    Returns:
        commit (with "+changes" if anything but recorded results differs from it), argv, versions, machine.
    """
    packages = ("hf-specgen", "torch", "transformers")
    return {
        "commit": _commit(),
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
        "machine": {
            "processor": _processor(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


def _commit() -> str | None:
    here = Path(__file__).resolve().parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        status = ["git", "status", "--porcelain", "--", ":/", *(f":(top,exclude){path}" for path in RECORDED)]
        changes = subprocess.run(status, cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+changes" if changes.stdout.strip() else "")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
