"""Peak memory of the process and of the accelerator since a reset."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Peak:
    """Peak memory in bytes; None where the system does not report it.

    Args:
        host: resident memory of the process.
        device: memory allocated by torch on the accelerator.
    """

    host: int | None = None
    device: int | None = None


def reset_peak_memory(device: torch.device) -> None:
    """Start a new measurement of the peaks."""
    with suppress(OSError):  # Linux only: sets the peak of resident memory to its current value
        Path("/proc/self/clear_refs").write_text("5")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> Peak:
    """The peaks since `reset_peak_memory`.

    Example:
        >>> reset_peak_memory(torch.device("cpu"))
        >>> peak_memory(torch.device("cpu")).device is None
        True
    """
    allocated = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return Peak(_host_peak(), allocated)


def _host_peak() -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]
    return sizes[0] if sizes else None
