"""Times several generation variants, interleaved in one process, on the same prompts with the same seeds.

Also the confidence interval of a speedup, and the judgement of tokens that differ from plain decoding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any, cast

import numpy as np
import psutil
import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_specgen import compat
from hf_specgen.call_statistics import Statistics
from hf_specgen.clock import thread_clock
from hf_specgen.depth.calibrate import wait as wait
from hf_specgen.generate import setting_of
from hf_specgen.targets.support import is_rounding

ROUNDING = "rounding"
UNEXPLAINED = "NO"
NO_TOKEN = -1
"""In place of a token after the end of the shorter output."""
MAX_IDLE = 0.05
"""Idle part of all cores' time above which no process has waited for a core."""


@dataclass(frozen=True)
class Variant:
    """One way to generate."""

    name: str
    arguments: Callable[[], dict[str, Any]]


@dataclass
class Sample:
    """One variant on one batch of prompts; `ids` are `[batch, prompt + generated]`.

    `thread_seconds` are those in which the calling thread ran, `others_share` is what other processes used of the
    processor, see `ProcessorUse`; `cache` is kept if the generation returns it.
    """

    tokens: int
    seconds: float
    ids: torch.Tensor
    speculation: Statistics | None
    first_token: float = 0.0
    thread_seconds: float = 0.0
    cache: Any = None
    others_share: float = 0.0


class ProcessorUse:
    """What other processes use of the processor from now on.

    A thread that waits for the threads of its own pass spins, so that its own time shows no such use.
    """

    def __init__(self) -> None:
        self._begin = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Wall time, idle time of all cores, and the time in which this process ran on any."""
        times = psutil.cpu_times()
        return perf_counter(), times.idle + getattr(times, "iowait", 0.0), process_time()

    def others_share(self) -> float:
        """The part of all cores' time that other processes had, see `others_share`."""
        seconds, idle, own = (now - begin for now, begin in zip(self._now(), self._begin, strict=True))
        return others_share(seconds, idle, own, psutil.cpu_count() or 1)


def others_share(seconds: float, idle: float, own: float, cores: int) -> float:
    """The part of all cores' time that other processes had; 0 if cores were idle, so that nothing had to wait.

    Args:
        seconds: wall time.
        idle, own: seconds of all cores together that were idle, and in which this process ran.
    """
    total = seconds * cores
    return max(0.0, 1 - (idle + own) / total) if total > 0 and idle <= MAX_IDLE * total else 0.0


def total_counts(samples: Sequence[Sample]) -> Statistics:
    """The statistics of all samples together."""
    return sum((one.speculation for one in samples if one.speculation is not None), Statistics([]))


def measure_call(
    model: PreTrainedModel, inputs: dict[str, Any], variant: Variant, generation: dict[str, Any], seed: int
) -> Sample:
    """Run a variant once.

    Args:
        inputs: `input_ids` and `attention_mask` `[batch, prompt]`.
        generation: arguments of `generate` that all variants share; `return_dict_in_generate` keeps the cache, and a
            `streamer` takes the place of the one that records the time of the first token.
    """
    device = compat.input_device(model)
    clock = _FirstToken()
    inputs = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    arguments = {"streamer": clock, **generation, **variant.arguments()}
    generator = arguments.get("candidate_generator")
    torch.manual_seed(seed)
    wait(device)
    use = ProcessorUse()
    thread_time = thread_clock()
    thread_begin = thread_time()
    clock.begin = perf_counter()
    output = cast(Any, model).generate(**inputs, **arguments)
    wait(device)
    seconds = perf_counter() - clock.begin
    thread_seconds = thread_time() - thread_begin
    share = use.others_share()
    ids, cache = (output, None) if isinstance(output, torch.Tensor) else (output.sequences, output[compat.CACHE])
    tokens = _count(ids[:, _prompt_length(model, inputs) :], setting_of(model, arguments, "eos_token_id"))
    speculation = None if generator is None else generator.speculation
    return Sample(tokens, seconds, ids.cpu(), speculation, clock.seconds, thread_seconds, cache, share)


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


def _prompt_length(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> int:
    """Tokens of a row of the output before the first new one: those of the prompt, or a decoder's start token."""
    return 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]


def _count(generated: torch.Tensor, ends: int | Sequence[int] | None) -> int:
    """Tokens up to and including the first EOS token of each row; counted the same way for every variant."""
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
        return f"{self.value:.2f}" + (f" ({self.low:.2f}-{self.high:.2f})" if self.low < self.high else "")


def speedup_interval(tokens: Any, seconds: Any, plain_tokens: Any, plain_seconds: Any) -> Interval:
    """Ratio of two throughputs, each the sum of tokens divided by the sum of time, with its 95% confidence interval.

    Both sides ran on the same prompts at the same time, so the bootstrap resamples them together: variation that
    affects both alike does not widen the interval. It resamples requests; where these were repeated, `[repeats,
    requests]`, it resamples the repeats, and the median time of each request counts.
    """
    columns = [np.asarray(column, dtype=float) for column in (tokens, seconds, plain_tokens, plain_seconds)]
    shapes = {column.shape for column in columns}
    if len(shapes) != 1 or 0 in columns[0].shape:
        raise ValueError(f"need the same number of requests on both sides, at least 1, got {sorted(shapes)}")

    def ratio(numbers: np.ndarray, axis: int = -1) -> np.ndarray:
        drawn = (column[numbers] for column in columns)
        requests = (np.median(one, axis=-2) for one in drawn) if columns[0].ndim == 2 else drawn
        tokens, seconds, plain_tokens, plain_seconds = (one.sum(axis=-1) for one in requests)
        return (tokens / seconds) / (plain_tokens / plain_seconds)

    numbers = np.arange(len(columns[0]))
    value = float(ratio(numbers))
    if len(numbers) == 1:
        return Interval(value, value, value)
    from scipy.stats import bootstrap  # takes half a second to import

    settings: dict[str, Any] = {"vectorized": True, "method": "percentile", "rng": 0}
    low, high = bootstrap([numbers], ratio, n_resamples=2000, **settings).confidence_interval
    return Interval(value, float(low), float(high))


def first_difference(
    model: PreTrainedModel,
    plain: Sample,
    ours: Sample,
    generation: dict[str, Any],
    seed: int,
    inputs: dict[str, torch.Tensor] | None,
) -> dict[str, Any] | None:
    """The first token of any row that differs, and whether rounding explains it; None if all tokens are equal.

    A sampled token is the argmax of p / e, e exponential noise: of ``logit / temperature - log e``. Two tokens whose
    values are closer than the rounding of both logits may exchange their places. (Top-k and top-p leave the order of
    tokens that they keep as it is.) The margin is by how much plain decoding preferred its own token.

    Args:
        generation, seed: of the call.
        inputs: `input_ids` and `attention_mask` `[batch, prompt]`, of prompts that are padded on the left; None if the
            difference need not be explained.
    """
    width = max(plain.ids.shape[1], ours.ids.shape[1])
    plain_ids, our_ids = (pad(s.ids, (0, width - s.ids.shape[1]), value=NO_TOKEN) for s in (plain, ours))
    differs = (plain_ids != our_ids).nonzero()
    if len(differs) == 0:
        return None
    row, position = min(differs.tolist(), key=lambda place: place[1])
    tokens = [int(ids[row, position]) for ids in (plain_ids, our_ids)]
    found = {"row": row, "position": position, "plain_token": tokens[0], "our_token": tokens[1]}
    if inputs is None:
        return found
    if NO_TOKEN in tokens:
        return {**found, "decided by": "length", "explained": UNEXPLAINED}
    logits = _logits_after(model, plain.ids[row : row + 1, :position], row, inputs)
    values = logits[tokens]
    scale = float(logits.std())
    decided_by = "logits"
    if generation.get("do_sample"):
        temperature = generation.get("temperature") or 1.0
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for _ in range(position - _prompt_length(model, inputs) + 1):
                noise = torch.empty(len(plain.ids), len(logits), device=logits.device).exponential_()
        values = values / temperature - noise[row, tokens].log()
        scale = scale / temperature
        decided_by = "p over noise"
    margin = float(values[0] - values[1])
    explained = ROUNDING if is_rounding([abs(margin) / 2 / scale], model.dtype) else UNEXPLAINED
    return {**found, "decided by": decided_by, "margin": margin, "explained": explained}


@torch.no_grad()
def _logits_after(
    model: PreTrainedModel, text: torch.Tensor, row: int, inputs: dict[str, torch.Tensor]
) -> torch.Tensor:
    """`[vocabulary]` the logits after the text of a row, from one pass without a cache."""
    device = compat.input_device(model)
    if model.config.is_encoder_decoder:
        source = {name: tensor[row : row + 1].to(device) for name, tensor in inputs.items()}
        output = model(**source, decoder_input_ids=text.to(device))
    else:
        output = model(text[:, int(inputs["attention_mask"][row].argmax()) :].to(device))
    logits: torch.Tensor = output.logits[0, -1].float()
    return logits


class Comparison:
    """The samples of plain `generate`, the first variant, and of others on the same batches.

    Args:
        variants: plain `generate` first.
        requests: number of batches that are measured again and again, in the same order, with the seed of each; 0 if
            each is measured once.

    Attributes:
        different, unexplained: by variant, how many answers differ from those of plain `generate`, and for how many of
            them rounding is no explanation.
    """

    def __init__(self, variants: Sequence[Variant], requests: int = 0):
        self.variants = variants
        self.requests = requests
        self.samples: dict[str, list[Sample]] = {variant.name: [] for variant in variants}
        self.different = Counter[str]()
        self.unexplained = Counter[str]()
        self.device = ""

    @property
    def plain(self) -> list[Sample]:
        """The samples of plain `generate`."""
        return self.samples[self.variants[0].name]

    def measure(
        self, model: PreTrainedModel, inputs: dict[str, torch.Tensor], generation: dict[str, Any]
    ) -> Iterator[str]:
        """Run plain `generate`, then the other variants in turns; yields the name of each before it runs."""
        number = len(self.plain)
        self.device = compat.input_device(model).type
        plain, *others = self.variants
        first = number % max(1, len(others))
        seed = number % self.requests if self.requests else number
        for variant in (plain, *others[first:], *others[:first]):
            yield variant.name
            sample = measure_call(model, inputs, variant, generation, seed)
            self.samples[variant.name].append(sample)
            if difference := first_difference(model, self.plain[-1], sample, generation, seed, inputs):
                self.different[variant.name] += 1
                self.unexplained[variant.name] += difference["explained"] != ROUNDING

    def _times(self, name: str) -> np.ndarray:
        """`[2, requests]` or `[2, repeats, requests]` tokens and seconds of a variant.

        On a CPU they are the seconds in which the thread ran, which other processes do not prolong.
        """
        is_cpu = self.device == "cpu"
        times = [(one.tokens, one.thread_seconds if is_cpu else one.seconds) for one in self.samples[name]]
        columns = np.array(times, dtype=float).T
        return columns.reshape(2, -1, self.requests) if 0 < self.requests < len(times) else columns

    def tokens_per_second(self, name: str) -> float:
        """The throughput of a variant, by the median time of each request."""
        times = self._times(name)
        tokens, seconds = np.median(times, axis=1) if times.ndim == 3 else times
        return float(tokens.sum() / seconds.sum())

    def speed(self, name: str, over: str = "") -> Interval:
        """The speedup of a variant over plain `generate` or another variant."""
        return speedup_interval(*self._times(name), *self._times(over or self.variants[0].name))
