"""Latency of a decoding step: T(q) of the target by tokens per pass, and the time of the drafter's passes.

A `LatencyModel` is immutable. It is measured (`hf_specgen.depth.calibrate`), read from a file that `hf-specgen tune`
wrote, or built from curves. Decisions depend on ratios of times only, so any unit will do.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import inf, log2, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_specgen.device_tree import Floats

FORMAT = "hf_specgen latency profile 1"
ANY_DRAFTER = "any"  # the entry used for every kind of drafter without an entry of its own
ASSUMED = "assumed"  # in place of a latency file: latencies that are the same in every process, see `assumed_latency`
MIN_BATCH_GAIN = 0.02  # relative gain in tokens per second below which a step of several calls verifies no draft


def interpolate(size: float, sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Piecewise linear through the measured sizes; extrapolated along the last piece, with a slope of at least 0."""
    if size <= sizes[0] or len(sizes) == 1:
        return seconds[0]
    index = min(bisect_right(sizes, size), len(sizes) - 1)
    slope = (seconds[index] - seconds[index - 1]) / (sizes[index] - sizes[index - 1])
    return seconds[index] + (slope if size < sizes[-1] else max(0.0, slope)) * (size - sizes[index])


def _check_curve(sizes: Sequence[float], seconds: Sequence[float]) -> None:
    """Raise `ValueError` unless sizes increase from at least 1, and each has finite seconds."""
    if not 0 < len(sizes) == len(seconds) or sizes[0] < 1 or any(b <= a for a, b in pairwise(sizes)):
        raise ValueError(f"a curve needs increasing numbers of tokens, and seconds for each, got {sizes} and {seconds}")
    if not all(0 <= value < inf for value in seconds):
        raise ValueError(f"seconds must be finite and not negative, got {seconds}")


@dataclass(frozen=True)
class CostCurve:
    """T(q): seconds of a forward pass of the target over q tokens per row."""

    queries: tuple[int, ...]  # increasing numbers of tokens per row, from 1
    seconds: tuple[float, ...]  # of a pass over that many tokens in each row
    context: int  # cached tokens in each row
    batch: int  # rows

    def __post_init__(self) -> None:
        _check_curve(self.queries, self.seconds)
        if self.queries[0] != 1 or not all(0 < value < inf for value in (*self.seconds, self.context, self.batch)):
            raise ValueError(f"queries must increase from 1, and seconds, context and batch be positive, got {self}")

    def __call__(self, queries: float) -> float:
        """Seconds of a pass over `queries` tokens per row."""
        return interpolate(queries, self.queries, self.seconds)

    def seconds_of(self, tokens: float) -> float:
        """Seconds of a pass over this many tokens in all rows together, for any number of rows."""
        return self(tokens / self.batch)

    def relative(self, queries: float) -> float:
        """T(q) / T(1)."""
        return self(queries) / self.seconds[0]


def fastest(tokens: Floats, seconds: Floats, margin: float = 0.0) -> int:
    """The index of the choice with the most expected tokens per second; 0 unless another is faster by `margin`.

    Args:
        tokens: `[choices]` expected tokens of a step; choice 0 is to draft nothing, or nothing more.
        seconds: `[choices]` of the step.
        margin: relative gain that another choice needs.

    Example:
        >>> fastest(2 + np.cumsum([0, 0.9, 0.8, 0.1]), 1 + 0.2 * np.arange(4))
        2
    """
    rates = tokens / seconds
    best = int(rates.argmax())
    return best if rates[best] > (1 + margin) * rates[0] else 0


def fastest_count(gains: Sequence[float], emitted: int, seconds: Floats) -> int:
    """How many draft tokens of a batch to verify: the most probable ones with the most expected tokens per second.

    Args:
        gains: expected tokens that each further node (of one row, or of all rows) adds, in descending order.
        emitted: tokens of a step without drafts.
        seconds: `[1 + len(gains)]` of a step with 0, 1, 2, … draft tokens.
    """
    return fastest(emitted + np.cumsum([0.0, *gains]), seconds, MIN_BATCH_GAIN)


@lru_cache(maxsize=16)
def pass_seconds_up_to(target: CostCurve, tokens: int) -> Floats:
    """`[1 + tokens]` seconds of the target's pass over 0, 1, …, `tokens` tokens."""
    return np.array([target.seconds_of(size) for size in range(1 + tokens)])


@dataclass(frozen=True)
class DraftLatency:
    """Seconds of drafting."""

    tokens: tuple[float, ...] = (1,)  # of forward passes of the drafter, all rows together
    seconds: tuple[float, ...] = (0.0,)  # of each of these passes
    overhead: float = 0.0  # seconds of any draft, empty or not

    def __post_init__(self) -> None:
        _check_curve(self.tokens, self.seconds)
        _check_curve((1,), (self.overhead,))

    def pass_seconds(self, tokens: float) -> float:
        """Seconds of one pass over this many tokens, all rows together."""
        return interpolate(tokens, self.tokens, self.seconds)

    def draft_seconds(self, tokens_per_pass: Sequence[int]) -> float:
        """Seconds of a draft with these passes."""
        return self.overhead + sum(map(self.pass_seconds, tokens_per_pass))


class NodeLatency(NamedTuple):
    """Latency of a step by the number n of verified nodes of each row, from 0 on."""

    seconds: Floats
    least_seconds_per_node: Floats
    """`[n]`: the least (seconds[m] - seconds[n]) / (m - n) of all m > n. At a rate of r tokens per second, further
    nodes raise the rate only if their path probability is more than r times this."""

    @classmethod
    def of_seconds(cls, seconds: Floats) -> NodeLatency:
        nodes = np.arange(len(seconds))
        least = [((seconds[n + 1 :] - seconds[n]) / (nodes[n + 1 :] - n)).min(initial=np.inf) for n in nodes]
        return cls(seconds, np.array(least))


class Bucket(NamedTuple):
    """Latencies at one number of rows and one context length: of the target, and of drafters by kind."""

    target: CostCurve
    drafters: Mapping[str, DraftLatency]


class StepLatency(NamedTuple):
    """Latencies of target and drafter, at the numbers of rows and cached tokens of the next steps."""

    target: CostCurve
    draft: DraftLatency

    def per_row(self, rows: int, drafts_together: bool) -> StepLatency:
        """One row's part of the latencies of a shared pass: those of the target divided by `rows`.

        With `drafts_together` those of the drafter too: its methods still take the tokens of all rows, and return the
        seconds of one row's part.
        """
        seconds = tuple(self.target.seconds_of(rows * q) / rows for q in self.target.queries)
        target = replace(self.target, seconds=seconds, batch=1)
        if not drafts_together:
            return StepLatency(target, self.draft)
        seconds = tuple(value / rows for value in self.draft.seconds)
        return StepLatency(target, replace(self.draft, seconds=seconds, overhead=self.draft.overhead / rows))


@dataclass(frozen=True)
class LatencyModel:
    """Seconds of a target step by tokens per row, rows and context, and of a drafter's pass by its tokens.

    Args:
        buckets: at different numbers of rows and context lengths; the nearest one is used.
        drafter_kind: that in use.

    Example:
        >>> model = LatencyModel.from_curves(CostCurve((1, 9), (0.010, 0.012), context=256, batch=1), draft_token=0.001)
        >>> step = model.at(rows=2, context=300)
        >>> [round(step.target.seconds_of(tokens), 5) for tokens in (2, 18)]  # two rows: plain, and 8 draft tokens each
        [0.01025, 0.01425]
    """

    buckets: tuple[Bucket, ...]
    drafter_kind: str = ANY_DRAFTER

    def __post_init__(self) -> None:
        if not 0 < len(self.buckets) <= 64:
            raise ValueError(f"a latency model needs 1 to 64 buckets, got {len(self.buckets)}")

    def at(self, rows: int, context: int) -> StepLatency:
        """Latencies for this many rows, the longest of which has `context` tokens."""

        def distance(bucket: Bucket) -> float:
            # Rows have twice the weight: they change the cost of every token, contexts only that of attention.
            curve = bucket.target
            return 2 * abs(log2(rows / curve.batch)) + abs(log2(max(1, context) / curve.context))

        target, drafters = min(self.buckets, key=distance)
        return StepLatency(target, drafters.get(self.drafter_kind) or drafters[ANY_DRAFTER])

    def for_drafter(self, kind: str, negligible_draft_cost: bool = False) -> LatencyModel:
        """The same model with this kind of drafter; `ValueError` if it has none, unless its cost is negligible.

        A drafter with negligible cost makes no passes: of its latency, or of that of any drafter, the overhead counts.
        """
        buckets: list[Bucket] = []
        for target, drafters in self.buckets:
            latency = drafters.get(kind) or drafters.get(ANY_DRAFTER)
            if negligible_draft_cost:
                latency = DraftLatency() if latency is None else DraftLatency(overhead=latency.overhead)
            if latency is None:
                raise ValueError(f"the latency file has no drafter {kind!r}; it has {sorted(drafters)}")
            buckets.append(Bucket(target, {**drafters, kind: latency}))
        return LatencyModel(tuple(buckets), kind)

    @classmethod
    def from_curves(cls, *curves: CostCurve, draft_token: float = 0.0, draft_step: float = 0.0) -> LatencyModel:
        """From curves of the target, the seconds of any drafter's pass, and the overhead of every draft."""
        drafters = {ANY_DRAFTER: DraftLatency(seconds=(draft_token,), overhead=draft_step)}
        return cls(tuple(Bucket(curve, drafters) for curve in curves))

    def save(self, path: str | Path) -> None:
        """Write a file for `load`."""
        data = {"format": FORMAT, "slices": [bucket._asdict() for bucket in self.buckets]}
        Path(path).expanduser().write_text(json.dumps(data, indent=1, default=asdict) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> LatencyModel:
        """Read a latency file, such as `benchmarks/profiles/gpu_like.json`; `ValueError` for any other file."""
        try:
            data = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise ValueError(f"unknown format {data['format']!r}, expected {FORMAT!r}")
            return cls(tuple(map(_bucket, data["slices"])))
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(f"{str(path)!r} is not a latency file: {error!r}; hf-specgen tune writes one") from None
        except OSError as error:
            raise OSError(f"cannot read {str(path)!r}: {error.strerror}; hf-specgen tune writes such a file") from None


def assumed_latency(device: torch.device) -> LatencyModel:
    """Latencies for a type of device, the same in every process: nothing is measured, and T(1) is 1.

    On a CPU T(q) lies between that of a pass which reading the weights limits and that of one which arithmetic limits;
    an accelerator is limited by the weights up to many more tokens. A pass of a drafter takes 0.3 of the target's, and
    one of Uno, in which the target drafts itself, all of it.
    """
    sizes = (1, 2, 4, 8, 16, 32, 64)
    seconds = tuple(sqrt(q) for q in sizes) if device.type == "cpu" else tuple(1 + q / 64 for q in sizes)
    tokens = tuple(map(float, sizes))
    drafter = DraftLatency(tokens, tuple(0.3 * value for value in seconds))
    drafters = {ANY_DRAFTER: drafter, "uno": DraftLatency(tokens, seconds)}
    return LatencyModel((Bucket(CostCurve(sizes, seconds, 512, 1), drafters),))


def _bucket(data: Any) -> Bucket:
    """A bucket from its entry in a latency file."""
    target = data["target"]
    curve = CostCurve(tuple(target["queries"]), tuple(target["seconds"]), target["context"], target["batch"])
    drafters = {
        kind: DraftLatency(tuple(draft["tokens"]), tuple(draft["seconds"]), draft["overhead"])
        for kind, draft in data["drafters"].items()
    }
    return Bucket(curve, drafters)
