"""The clock of times that are compared with each other on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache


def thread_clock() -> Callable[[], float]:
    """The time in which the thread ran; wall time where that advances in coarse steps, as on Windows."""
    return time.perf_counter if _is_coarse() else time.thread_time


@cache
def _is_coarse() -> bool:
    """Whether the thread's time advances by a millisecond or more at once, 15.6 on Windows, or stands still."""
    begin = time.thread_time()
    advances = (now - begin for now in (time.thread_time() for _ in range(1_000_000)) if now != begin)
    return not 0 < next(advances, 0.0) < 1e-3
