"""How long each thread has spent compiling, which is not a part of any step's latency."""

from __future__ import annotations

import threading


class _CompileTime(threading.local):
    seconds = 0.0


_compile_time = _CompileTime()


def compile_seconds() -> float:
    """How long this thread has spent compiling so far."""
    return _compile_time.seconds


def add_compile_seconds(seconds: float) -> None:
    """Count a compilation of this thread."""
    _compile_time.seconds += seconds
