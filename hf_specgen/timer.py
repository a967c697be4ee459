"""Measures the wall time of a call by part; time in which forward passes are compiled is counted separately."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from hf_specgen.target.compiled import compile_seconds

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

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time inside the context to a part."""
        begin, compiling = perf_counter(), compile_seconds()
        try:
            yield
        finally:
            compiling = compile_seconds() - compiling
            self.seconds[name] += perf_counter() - begin - compiling
            if compiling:
                self.seconds["compile"] = self.seconds.get("compile", 0.0) + compiling

    def step_seconds(self) -> dict[str, float]:
        """Seconds of each part since the last call of this method; parts that took no time are left out."""
        seconds, before = self.seconds, self._before_step
        self._before_step = {part: seconds[part] for part in STEP_PARTS}
        return {part: seconds[part] - before[part] for part in STEP_PARTS if seconds[part] > before[part]}

    def stop(self) -> dict[str, float]:
        """The seconds of all parts, and of the call in `total`."""
        self.seconds["total"] = perf_counter() - self._started
        return self.seconds
