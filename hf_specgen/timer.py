"""Measures the wall time of a call by part; time in which forward passes are compiled is counted separately."""

from __future__ import annotations

from time import perf_counter

from hf_specgen.targets.compile_time import compile_seconds

PARTS = ("prefill", "draft", "forward", "verify", "policy")
STEP_PARTS = ("draft", "forward", "verify")
"""Parts that make up the latency of a step."""


class StepTimer:
    """Measures the parts of a call from now on.

    Attributes:
        seconds: of each part so far; `compile` is among them once something was compiled.
    """

    def __init__(self) -> None:
        self._started = perf_counter()
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._before_step = dict.fromkeys(STEP_PARTS, 0.0)
        self._parts = {name: _Part(self.seconds, name) for name in PARTS}

    def part(self, name: str) -> _Part:
        """A context whose time is added to a part; a part is not entered again inside itself."""
        return self._parts[name]

    def step_seconds(self) -> dict[str, float]:
        """Seconds of each part since the last call of this method; parts that took no time are left out."""
        seconds, before = self.seconds, self._before_step
        self._before_step = {part: seconds[part] for part in STEP_PARTS}
        return {part: seconds[part] - before[part] for part in STEP_PARTS if seconds[part] > before[part]}

    def stop(self) -> dict[str, float]:
        """The seconds of all parts, and of the call in `total`."""
        self.seconds["total"] = perf_counter() - self._started
        return self.seconds


class _Part:
    """Adds the time inside the context to a part: a class, since a generator would take longer than some parts."""

    __slots__ = ("_begin", "_compiling", "_name", "_seconds")

    def __init__(self, seconds: dict[str, float], name: str):
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._compiling, self._begin = compile_seconds(), perf_counter()

    def __exit__(self, *exception: object) -> None:
        elapsed, compiling = perf_counter() - self._begin, compile_seconds() - self._compiling
        self._seconds[self._name] += elapsed - compiling
        if compiling:
            self._seconds["compile"] = self._seconds.get("compile", 0.0) + compiling
