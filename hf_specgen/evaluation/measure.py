"""Times several generation variants, interleaved in one process, on the same prompts with the same seeds.

Also the confidence interval of a speedup.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_specgen import compat
from hf_specgen.counters import Statistics
from hf_specgen.depth.calibrate import wait as wait

MARGIN = 1.05
"""Smallest ratio that counts: of speeds, of a speed to its tokens per step, of tokens per step."""


@dataclass(frozen=True)
class Variant:
    """One way to generate."""

    name: str
    arguments: Callable[[], dict[str, Any]]
    batched: bool = True


@dataclass
class Sample:
    """One variant on one batch of prompts; `ids` are `[batch, prompt + generated]`."""

    tokens: int
    seconds: float
    ids: torch.Tensor
    speculation: Statistics | None
    first_token: float = 0.0


@dataclass
class Total:
    """The samples of a variant, and how many have other tokens than plain `generate`.

    Throughput is the sum of tokens divided by the sum of time, never a mean of rates.
    """

    samples: list[Sample] = field(default_factory=list)
    different: int = 0

    def add(self, sample: Sample, reference: Sample) -> None:
        """Add a sample; `reference` is plain `generate` on the same prompts."""
        self.different += not torch.equal(sample.ids, reference.ids)
        self.samples.append(sample)

    @property
    def tokens_per_second(self) -> float:
        """Throughput; 0 without samples."""
        tokens, seconds = (sum(getattr(one, name) for one in self.samples) for name in ("tokens", "seconds"))
        return float(tokens / seconds) if seconds else 0.0

    @property
    def counts(self) -> Statistics:
        """The statistics of all samples together."""
        return sum((one.speculation for one in self.samples if one.speculation is not None), Statistics([]))


def measure_round(
    model: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    variants: Sequence[Variant],
    settings: dict[str, Any],
    seed: int,
    *,
    first: int = 0,
    followups: Sequence[torch.Tensor] = (),
) -> dict[str, Sample]:
    """Run every variant once on the same inputs.

    Args:
        inputs: `input_ids` and `attention_mask` `[batch, prompt]`.
        followups: for a chat (one row) the tokens `[1, length]` of every further turn, starting at the end of the
            previous answer; each turn continues from the cache of the previous one.
    """
    device = compat.input_device(model)
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    able = [variant for variant in variants if variant.batched or len(inputs["input_ids"]) == 1]
    order = able[first % len(able) :] + able[: first % len(able)]
    samples = {v.name: _run(model, inputs, followups, {**settings, **v.arguments()}, seed) for v in order}
    return {variant.name: samples[variant.name] for variant in able}


def _run(
    model: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    followups: Sequence[torch.Tensor],
    arguments: dict[str, Any],
    seed: int,
) -> Sample:
    torch.manual_seed(seed)
    device, clock, tokens = compat.input_device(model), _FirstToken(), 0
    generator = arguments.get("candidate_generator")
    arguments = {**arguments, "streamer": clock, "return_dict_in_generate": bool(followups)}
    statistics = list[Statistics]()
    wait(device)
    clock.begin = begin = perf_counter()
    output: Any = None
    for followup in [None, *followups]:
        if followup is not None:
            inputs = _next_turn(output, followup.to(device))
        output = cast(Any, model).generate(**inputs, **arguments)
        ids = output.sequences if followups else output
        tokens += _count(model, ids[:, inputs["input_ids"].shape[1] :])
        if generator is not None:
            statistics.append(generator.speculation)
    wait(device)
    seconds = perf_counter() - begin
    speculation = sum(statistics[1:], statistics[0]) if statistics else None
    return Sample(tokens, seconds, ids.cpu(), speculation, clock.seconds)


def _next_turn(output: Any, followup: torch.Tensor) -> dict[str, Any]:
    """The inputs of the next turn of a chat; an EOS token at the end of the answer is not repeated."""
    text = output.sequences
    if int(text[0, -1]) == int(followup[0, 0]):
        followup = followup[:, 1:]
    ids = torch.cat([text, followup], dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "past_key_values": output.past_key_values}


class _FirstToken(BaseStreamer):
    """Records the time of the first new token: the second `put`, as the first one is the prompt."""

    begin = 0.0
    seconds = 0.0
    _puts = 0

    def put(self, value: torch.Tensor) -> None:
        self._puts += 1
        if self._puts == 2:
            self.seconds = perf_counter() - self.begin

    def end(self) -> None:
        pass


def _count(model: PreTrainedModel, generated: torch.Tensor) -> int:
    """Tokens up to and including the first EOS token of each row; counted the same way for every variant."""
    ends: Any = cast(Any, model).generation_config.eos_token_id
    if ends is None:
        return generated.numel()
    is_end = torch.isin(generated, torch.as_tensor(ends, device=generated.device))
    before_end = is_end.long().cumsum(dim=1) - is_end.long() == 0
    return int(before_end.sum())


@dataclass(frozen=True)
class Interval:
    """A ratio and its confidence interval."""

    value: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """False if the interval includes 1: the measurement shows no difference."""
        return not self.low <= 1 <= self.high

    def __str__(self) -> str:
        ratio = f"{self.value:.2f}x" if self.differs else "no difference"
        return f"{ratio} ({self.low:.2f}-{self.high:.2f})"


def speedup_interval(
    tokens: Sequence[float],
    seconds: Sequence[float],
    plain_tokens: Sequence[float],
    plain_seconds: Sequence[float],
    *,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Ratio of two throughputs, each the sum of tokens divided by the sum of time, with its 95% confidence interval.

    The bootstrap is paired: it resamples requests with the times of both sides together. Both ran on the same prompts
    at the same time, so variation that affects both sides alike does not widen the interval.
    """
    columns = [np.asarray(column, dtype=float) for column in (tokens, seconds, plain_tokens, plain_seconds)]
    sizes = {len(column) for column in columns}
    if len(sizes) != 1 or sizes == {0}:
        raise ValueError(f"need the same number of requests on both sides, at least 1, got {sorted(sizes)}")
    if min(columns[1].min(), columns[3].min()) <= 0:
        raise ValueError("the time of a request must be positive")
    value = float(_ratio(*columns))
    if sizes == {1}:
        return Interval(value, value, value)
    from scipy.stats import bootstrap  # takes half a second to import

    settings: dict[str, Any] = {"paired": True, "vectorized": True, "method": "percentile", "rng": seed}
    low, high = bootstrap(columns, _ratio, n_resamples=resamples, **settings).confidence_interval
    return Interval(value, float(low), float(high))


def _ratio(*columns: np.ndarray, axis: int = -1) -> np.ndarray:
    tokens, seconds, plain_tokens, plain_seconds = (column.sum(axis=axis) for column in columns)
    return (tokens / seconds) / (plain_tokens / plain_seconds)


@dataclass(frozen=True)
class Speed:
    """The speedup of a strategy over plain `generate`, with a confidence interval over calls.

    Args:
        counts: what was drafted and accepted.
    """

    tokens_per_second: float
    counts: Statistics
    interval: Interval

    @classmethod
    def of(cls, total: Total, plain: Total) -> Speed:
        """From the totals of a strategy and of plain `generate` on the same batches."""
        columns = [[getattr(one, name) for one in s.samples] for s in (total, plain) for name in ("tokens", "seconds")]
        return cls(total.tokens_per_second, total.counts, speedup_interval(*columns))

    @property
    def plausible(self) -> bool:
        """Whether the speedup is possible: a step takes no less than a plain one, so it is at most tokens per step."""
        return self.interval.value <= MARGIN * max(1.0, self.counts.tokens_per_step)

    @property
    def faster(self) -> bool:
        """Whether the strategy was clearly faster than plain `generate`."""
        return self.plausible and self.interval.low > 1 and self.interval.value >= MARGIN

    def __str__(self) -> str:
        return f"{self.interval.value:.2f}x plain ({self.interval.low:.2f}-{self.interval.high:.2f})"

    def to_dict(self) -> dict[str, float]:
        """Numbers by name, ready for JSON."""
        return {
            "tokens_per_second": self.tokens_per_second,
            "speedup": self.interval.value,
            "speedup_low": self.interval.low,
            "speedup_high": self.interval.high,
            "tokens_per_step": self.counts.tokens_per_step,
            "acceptance_rate": self.counts.acceptance_rate,
        }
