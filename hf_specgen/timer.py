"""Where the time of a call goes."""

from __future__ import annotations

from time import perf_counter


class Timer:
    """Adds the time spent inside to a dictionary."""

    def __init__(self, seconds: dict[str, float], name: str):
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._begin = perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._name] += perf_counter() - self._begin
