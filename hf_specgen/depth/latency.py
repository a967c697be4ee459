"""How long a decoding step takes: the target's pass over the tokens of all rows, and the drafter's passes.

A `LatencyModel` never changes. It is read from a file, made of measured curves, or learnt from the steps of the first
calls on a machine (`hf_specgen.depth.recorder`). Only ratios of times matter for decisions, so its unit may be anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, log2
from pathlib import Path
from typing import Any

import numpy as np

from hf_specgen.depth.cost import Array, CostCurve, interpolate

FORMAT = "hf_specgen latency profile, version 1"
ANY_KIND = "any"
"""Under this name a slice may hold a drafter that stands for every kind that it has no entry for."""
DEFAULT_SLOPES = {"cpu": (0.08, 0.10)}
"""Before anything was measured: what a token more adds to a step, and a drafter pass, in plain steps. On two-core
processors T(17) was 1.25 to 2.3 T(1): the upper end is assumed."""
DEFAULT_SLOPE = (0.02, 0.10)
"""The same on accelerators, where decoding waits for the weights."""
MAX_POINTS = 64
"""Slices of a profile, and points of a curve: a file with more is refused."""


def slice_of(rows: int, context: int) -> tuple[int, int]:
    """The rows and context that a slice stands for: the next power of two, and of four from 512 on.

    Example:
        >>> slice_of(3, 100), slice_of(16, 3000)
        ((4, 512), (16, 8192))
    """
    longest = 512
    while longest < context:
        longest *= 4
    return 1 << max(0, rows - 1).bit_length(), longest


@dataclass(frozen=True)
class DraftLatency:
    """Seconds of drafting.

    Args:
        tokens, seconds: of one forward pass of the drafter by the tokens, over all rows, that it reads.
        overhead: of a draft as such, also of one that turns out empty; here belong heads that run once per draft.
        prefill: of reading one token of one row's prompt, before the first draft.

    Raises:
        ValueError: if a number is negative or not finite, or the tokens do not increase.
    """

    tokens: tuple[float, ...] = (1,)
    seconds: tuple[float, ...] = (0.0,)
    overhead: float = 0.0
    prefill: float = 0.0

    def __post_init__(self) -> None:
        numbers = [*self.tokens, *self.seconds, self.overhead, self.prefill]
        if not all(0 <= number < inf for number in numbers):
            raise ValueError(f"times of a drafter must be finite and not negative, got {self}")
        if not 0 < len(self.tokens) == len(self.seconds) or any(b <= a for a, b in pairwise(self.tokens)):
            raise ValueError(f"a drafter needs increasing tokens, and seconds for each, got {self}")

    def by_tokens(self, tokens: Array | float) -> Array:
        """Seconds of one pass over so many tokens in all rows together."""
        return interpolate(tokens, self.tokens, self.seconds)

    def draft(self, passes: Sequence[int]) -> float:
        """Seconds of a draft with these passes, each given by its tokens."""
        return self.overhead + float(self.by_tokens(np.array(passes, dtype=float)).sum())

    def scaled(self, factor: float) -> DraftLatency:
        """The same in another unit of time."""
        seconds = tuple(factor * one for one in self.seconds)
        return DraftLatency(self.tokens, seconds, factor * self.overhead, factor * self.prefill)


@dataclass(frozen=True)
class Slice:
    """Latencies at one number of rows and one context length: the target's curve, and drafters by kind."""

    target: CostCurve
    drafters: Mapping[str, DraftLatency]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Slice:
        target = data["target"]
        queries, seconds = (tuple(target[name]) for name in ("tokens_per_row", "seconds"))
        if max(len(queries), len(data["drafters"])) > MAX_POINTS:
            raise ValueError(f"a profile has at most {MAX_POINTS} points to a curve and drafters to a slice")
        drafters = {
            kind: DraftLatency(tuple(one["tokens"]), tuple(one["seconds"]), one["overhead"], one["prefill"])
            for kind, one in data["drafters"].items()
        }
        return cls(CostCurve(queries, seconds, data["context"], data["rows"]), drafters)

    def to_dict(self) -> dict[str, Any]:
        target = {"tokens_per_row": list(self.target.queries), "seconds": list(self.target.seconds)}
        drafters = {
            kind: {"tokens": [*d.tokens], "seconds": [*d.seconds], "overhead": d.overhead, "prefill": d.prefill}
            for kind, d in self.drafters.items()
        }
        return {"rows": self.target.batch, "context": self.target.context, "target": target, "drafters": drafters}


@dataclass(frozen=True)
class StepLatency:
    """Latencies of the next steps: what `LatencyModel.at` returns.

    Args:
        target: its `by_tokens(tokens)` gives the seconds of a target pass by its tokens in all rows.
        drafter: its `by_tokens(tokens)` gives the seconds of one drafter pass.
    """

    target: CostCurve
    drafter: DraftLatency

    def chains(self, rows: int, depths: Array, nodes_per_level: float = 1.0) -> Array:
        """Seconds of steps by the depth of their drafts, without the overhead of the draft."""
        target = self.target.by_tokens(rows * (1 + nodes_per_level * depths))
        return np.maximum(target, target[0]) + depths * self.drafter.by_tokens(float(rows))


@dataclass(frozen=True)
class LatencyModel:
    """Seconds of a step by tokens per row, rows and context, and of a drafter pass by its tokens.

    Args:
        slices: at different numbers of rows and context lengths; the nearest one is used.
        drafter: kind of drafter that drafts.

    Example:
        >>> model = LatencyModel.from_curves(CostCurve((1, 9), (0.010, 0.012), context=256, batch=1), draft_token=0.001)
        >>> step = model.at(rows=2, context=300)
        >>> step.target.by_tokens(np.array([2, 18])).round(4).tolist()  # 2 rows: plain, and with 8 draft tokens each
        [0.0102, 0.0142]
    """

    slices: tuple[Slice, ...]
    drafter: str = ANY_KIND

    def __post_init__(self) -> None:
        if not 0 < len(self.slices) <= MAX_POINTS:
            raise ValueError(f"a latency model needs 1 to {MAX_POINTS} slices, got {len(self.slices)}")

    def at(self, rows: int, context: int) -> StepLatency:
        """Latencies for so many rows whose longest has `context` tokens."""
        place = slice_of(rows, context)
        nearest = min(self.slices, key=lambda one: _distance(one.target, *place))
        return StepLatency(nearest.target, nearest.drafters[self.drafter])

    def select(self, drafter: str, negligible_draft_cost: bool = False) -> LatencyModel:
        """The same model with this kind of drafter.

        Raises:
            ValueError: if it does not have this kind, unless drafting costs next to nothing.
        """
        slices = []
        for one in self.slices:
            chosen = one.drafters.get(drafter, one.drafters.get(ANY_KIND, DraftLatency()))
            if not negligible_draft_cost and not {drafter, ANY_KIND} & one.drafters.keys():
                raise ValueError(f"the latency profile has no drafter {drafter!r}; it has {sorted(one.drafters)}")
            slices.append(replace(one, drafters={drafter: chosen}))
        return LatencyModel(tuple(slices), drafter)

    @classmethod
    def from_curves(cls, *curves: CostCurve, draft_token: float = 0.0, draft_step: float = 0.0) -> LatencyModel:
        """From measured curves of the target, for any kind of drafter.

        Args:
            curves: at different batch sizes and contexts.
            draft_token: seconds of one pass of the drafter, for all rows.
            draft_step: seconds that every draft takes besides.
        """
        drafters = {ANY_KIND: DraftLatency(seconds=(draft_token,), overhead=draft_step)}
        return cls(tuple(Slice(curve, drafters) for curve in curves), ANY_KIND)

    @classmethod
    def default(cls, device: str, drafter: str, negligible_draft_cost: bool) -> LatencyModel:
        """What is assumed before anything was measured on a type of device."""
        token, draft_pass = DEFAULT_SLOPES.get(device, DEFAULT_SLOPE)
        curve = CostCurve((1, 2), (1.0, 1.0 + token), context=1, batch=1)
        drafters = {drafter: DraftLatency(seconds=(0.0 if negligible_draft_cost else draft_pass,))}
        return cls((Slice(curve, drafters),), drafter)

    @classmethod
    def from_dict(cls, data: Any, drafter: str = ANY_KIND) -> LatencyModel:
        """From what `to_dict` returns.

        Raises:
            ValueError: if it is something else.
        """
        try:
            if data["format"] != FORMAT:
                raise ValueError(f"unknown format {data['format']!r}, expected {FORMAT!r}")
            return cls(tuple(Slice.from_dict(one) for one in data["slices"][: MAX_POINTS + 1]), drafter)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"not a latency profile: {error!r}") from None

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, ready for JSON."""
        return {"format": FORMAT, "slices": [one.to_dict() for one in self.slices]}

    @classmethod
    def load(cls, path: str | Path) -> LatencyModel:
        """Read a profile file, such as `benchmarks/profiles/gpu_like.json`.

        Raises:
            ValueError: if the file is no profile.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{str(path)!r} is not a latency profile: {error}") from None
        return cls.from_dict(data)


def _distance(curve: CostCurve, rows: int, context: int) -> float:
    """Rows count double: they change what a token costs, contexts only what attention adds."""
    return 2 * abs(log2(rows / curve.batch)) + abs(log2(context / curve.context))
