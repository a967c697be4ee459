"""Latency of a decoding step: the target's pass over the tokens of all rows, and the drafter's passes.

A `LatencyModel` is immutable. It is read from a profile file, built from measured curves, or learnt from the steps of
the first calls on a machine (`hf_specgen.depth.learning`). Depths depend on ratios of times only, so any unit will do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import inf, log2
from pathlib import Path
from typing import Any, NamedTuple

from hf_specgen.depth.cost import Array, CostCurve, interpolate, interpolate_one

FORMAT = "hf_specgen latency profile 1"
ANY_KIND = "any"
"""The entry used for every kind of drafter without an entry of its own."""
MAX_SLICES = 64
"""8 powers of two of rows times 8 powers of four of context: more than one target needs."""
SECOND_TOKEN_COST, FURTHER_TOKEN_COST = {"cpu": 0.3}, {"cpu": 0.06}
"""Before any measurement: the cost of the second token of a target's pass and of each further one, in plain steps, by
device. On two-core CPUs T(2) was 1.1 to 2.0 T(1), since kernels for one token are faster, and T(17) 1.25 to 2.9."""
ACCELERATOR_TOKEN_COST = 0.02
"""The same on any other device: decoding is bound by reading the weights there."""
DRAFTER_PASS_COST = 0.10
"""Before any measurement: the cost of a drafter's pass, in plain steps."""


@dataclass(frozen=True)
class DraftLatency:
    """Seconds of drafting.

    Args:
        tokens, seconds: seconds of one forward pass of the drafter over that many tokens, all rows together.
        overhead: seconds of any draft, empty or not; includes heads that run once per draft.
        prefill: seconds per prompt token of one row, before the first draft.

    Raises:
        ValueError: if a number is negative or not finite, or the tokens do not increase.
    """

    tokens: tuple[float, ...] = (1,)
    seconds: tuple[float, ...] = (0.0,)
    overhead: float = 0.0
    prefill: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= number < inf for number in (*self.tokens, *self.seconds, self.overhead, self.prefill)):
            raise ValueError(f"times of a drafter must be finite and not negative, got {self}")
        if not 0 < len(self.tokens) == len(self.seconds) or any(b <= a for a, b in pairwise(self.tokens)):
            raise ValueError(f"a drafter needs increasing tokens, and seconds for each, got {self}")

    def by_tokens(self, tokens: Array | float) -> Array:
        """Seconds of one pass over this many tokens, all rows together."""
        return interpolate(tokens, self.tokens, self.seconds)

    def seconds_of(self, tokens: float) -> float:
        """`by_tokens` for one number of tokens."""
        return interpolate_one(tokens, self.tokens, self.seconds)

    def draft(self, passes: Sequence[int]) -> float:
        """Seconds of a draft with these passes, each given by its tokens."""
        return self.overhead + sum(map(self.seconds_of, passes))

    def scaled(self, factor: float) -> DraftLatency:
        """The same with all times multiplied by a factor."""
        seconds = tuple(factor * one for one in self.seconds)
        return DraftLatency(self.tokens, seconds, factor * self.overhead, factor * self.prefill)


class Slice(NamedTuple):
    """Latencies at one number of rows and one context length: of the target, and of drafters by kind."""

    target: CostCurve
    drafters: Mapping[str, DraftLatency]


class StepLatency(NamedTuple):
    """Latencies of the next steps; each has `by_tokens`, the seconds of a pass by its tokens in all rows together."""

    target: CostCurve
    drafter: DraftLatency


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
class LatencyModel:
    """Seconds of a target step by tokens per row, rows and context, and of a drafter's pass by its tokens.

    Args:
        slices: at different numbers of rows and context lengths; the nearest one is used.
        drafter: the kind of drafter in use.
        description: what the latencies depend on, as written to profile files.

    Example:
        >>> import numpy as np
        >>> model = LatencyModel.from_curves(CostCurve((1, 9), (0.010, 0.012), context=256, batch=1), draft_token=0.001)
        >>> step = model.at(rows=2, context=300)
        >>> step.target.by_tokens(np.array([2, 18])).round(4).tolist()  # two rows: plain, and with 8 draft tokens each
        [0.0102, 0.0142]
    """

    slices: tuple[Slice, ...]
    drafter: str = ANY_KIND
    description: Mapping[str, Any] = field(default_factory=dict)
    _nearest: dict[tuple[int, int], StepLatency] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < len(self.slices) <= MAX_SLICES:
            raise ValueError(f"a latency model needs 1 to {MAX_SLICES} slices, got {len(self.slices)}")

    def at(self, rows: int, context: int) -> StepLatency:
        """Latencies for this many rows, the longest of which has `context` tokens."""
        wanted = rows, context = slice_of(rows, context)
        known = self._nearest.get(wanted)
        if known is not None:
            return known

        def distance(one: Slice) -> float:
            # Rows have twice the weight: they change the cost of every token, contexts only that of attention.
            return 2 * abs(log2(rows / one.target.batch)) + abs(log2(context / one.target.context))

        nearest = min(self.slices, key=distance)
        drafter = nearest.drafters.get(self.drafter) or nearest.drafters[ANY_KIND]
        return self._nearest.setdefault(wanted, StepLatency(nearest.target, drafter))

    def select(self, drafter: str, negligible_draft_cost: bool = False) -> LatencyModel:
        """The same model with this kind of drafter.

        Raises:
            ValueError: if it has no such drafter, unless the draft cost is negligible.
        """
        slices = []
        for target, drafters in self.slices:
            if negligible_draft_cost:
                drafters = {ANY_KIND: DraftLatency(), **drafters}
            if not {drafter, ANY_KIND} & drafters.keys():
                raise ValueError(f"the latency profile has no drafter {drafter!r}; it has {sorted(drafters)}")
            slices.append(Slice(target, drafters))
        return LatencyModel(tuple(slices), drafter, self.description)

    @classmethod
    def from_curves(cls, *curves: CostCurve, draft_token: float = 0.0, draft_step: float = 0.0) -> LatencyModel:
        """From measured curves of the target at different batch sizes and contexts, for any kind of drafter.

        Args:
            curves: at least one.
            draft_token: seconds of one pass of the drafter, for all rows.
            draft_step: overhead of every draft in seconds.
        """
        drafters = {ANY_KIND: DraftLatency(seconds=(draft_token,), overhead=draft_step)}
        return cls(tuple(Slice(curve, drafters) for curve in curves))

    @classmethod
    def default(cls, device: str, drafter: str, negligible_draft_cost: bool) -> LatencyModel:
        """The model assumed for a type of device before any measurement."""
        by_device = SECOND_TOKEN_COST, FURTHER_TOKEN_COST
        second, token = (costs.get(device, ACCELERATOR_TOKEN_COST) for costs in by_device)
        draft = DraftLatency(seconds=(0.0 if negligible_draft_cost else DRAFTER_PASS_COST,))
        curve = CostCurve((1, 2, 3), (1.0, 1.0 + second, 1.0 + second + token), context=1, batch=1)
        return cls((Slice(curve, {drafter: draft}),), drafter)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and strings, ready for JSON."""
        slices = [
            {"target": asdict(one.target), "drafters": {kind: asdict(draft) for kind, draft in one.drafters.items()}}
            for one in self.slices
        ]
        return {"format": FORMAT, "description": dict(self.description), "slices": slices}

    @classmethod
    def from_dict(cls, data: Any, drafter: str = ANY_KIND) -> LatencyModel:
        """From what `to_dict` returns.

        Raises:
            ValueError: if it is something else.
        """
        try:
            if data["format"] != FORMAT:
                raise ValueError(f"unknown format {data['format']!r}, expected {FORMAT!r}")
            slices = []
            for one in data["slices"]:
                drafters = {
                    kind: DraftLatency(
                        **{**draft, "tokens": tuple(draft["tokens"]), "seconds": tuple(draft["seconds"])}
                    )
                    for kind, draft in one["drafters"].items()
                }
                slices.append(Slice(CostCurve.from_dict(one["target"]), drafters))
            return cls(tuple(slices), drafter, dict(data.get("description", {})))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"not a latency profile: {error!r}") from None

    @classmethod
    def load(cls, path: str | Path) -> LatencyModel:
        """Read a profile file, such as `benchmarks/profiles/gpu_like.json`.

        Raises:
            ValueError: if the file is not a profile.
            OSError: if it cannot be read.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{str(path)!r} is not a latency profile: {error}") from None
