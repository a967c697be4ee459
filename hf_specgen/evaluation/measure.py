"""Times several generation variants, interleaved in one process, on the same prompts with the same seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_specgen import compat
from hf_specgen.counters import Statistics
from hf_specgen.evaluation.memory import Peak, peak_memory, reset_peak_memory


@dataclass(frozen=True)
class Variant:
    """One way to generate.

    Args:
        name: shown in tables.
        arguments: returns the arguments of `generate` that define the variant; called again for every prompt.
        batched: whether it accepts more than one prompt at a time.
    """

    name: str
    arguments: Callable[[], dict[str, Any]]
    batched: bool = True


@dataclass
class Sample:
    """One variant on one batch of prompts.

    Args:
        tokens: generated tokens, padding left out.
        seconds: wall time of the whole `generate` call; of all calls, for a chat of several turns.
        ids: `[batch, prompt + generated]`.
        speculation: the statistics of this package's variants; None for others.
        first_token: seconds until the first new token.
        peak: peak memory during the call; None if it was not measured.
    """

    tokens: int
    seconds: float
    ids: torch.Tensor
    speculation: Statistics | None
    first_token: float = 0.0
    peak: Peak | None = None


@dataclass
class Total:
    """Sums over samples. Throughput is the sum of tokens divided by the sum of time, never a mean of rates."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    identical: bool = True
    samples: list[Sample] = field(default_factory=list)

    def add(self, sample: Sample, reference: Sample) -> None:
        """Add a sample; `reference` is plain `generate` on the same prompts."""
        self.tokens += sample.tokens
        self.seconds += sample.seconds
        self.identical &= torch.equal(sample.ids, reference.ids)
        self.samples.append(sample)
        if sample.speculation is not None:
            self.steps += sample.speculation.steps
            self.emitted += sum(step.emitted for row in sample.speculation.rows for step in row)
            self.drafted += sample.speculation.drafted
            self.accepted += sample.speculation.accepted

    def __add__(self, other: Total) -> Total:
        names = ("tokens", "seconds", "steps", "emitted", "drafted", "accepted")
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Total(**sums, identical=self.identical and other.identical, samples=self.samples + other.samples)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_step(self) -> float:
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


def interleave(
    model: PreTrainedModel,
    batches: Iterable[dict[str, torch.Tensor]],
    variants: Sequence[Variant],
    settings: dict[str, Any],
    seed: int = 0,
) -> Iterator[dict[str, Sample]]:
    """Run all variants on each batch, one after the other, from the same seed.

    Args:
        model: the target.
        batches: `input_ids` and `attention_mask`, left-padded.
        variants: those that accept one prompt only are skipped for larger batches.
        settings: arguments of `generate` that all variants share.
        seed: of the first batch; it increases by one with every batch.

    Yields:
        For each batch the sample of each variant, by name.
    """
    for number, inputs in enumerate(batches):
        yield measure_round(model, inputs, variants, settings, seed + number, first=number)


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
        model, variants, settings: as for `interleave`.
        inputs: `input_ids` and `attention_mask` `[batch, prompt]`.
        seed: the same for each variant.
        first: index of the variant that runs first, modulo their number; increase it from round to round, so that no
            variant always runs after the same other one.
        followups: for a chat (one row) the tokens `[1, length]` of every further turn, starting at the end of the
            previous answer; each turn continues from the cache of the previous one.

    Returns:
        The sample of each variant, by name, in the order of `variants`.
    """
    inputs = {name: tensor.to(compat.input_device(model)) for name, tensor in inputs.items()}
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
    clock = _FirstToken()
    generator = arguments.get("candidate_generator")
    arguments = {**arguments, "streamer": clock, **({"return_dict_in_generate": True} if followups else {})}
    tokens, speculation = 0, None
    reset_peak_memory(compat.input_device(model))
    wait(compat.input_device(model))
    clock.begin = begin = perf_counter()
    output: Any = None
    for followup in [None, *followups]:
        if followup is not None:
            inputs = _next_turn(output, followup.to(compat.input_device(model)))
        output = cast(Any, model).generate(**inputs, **arguments)
        ids = output.sequences if followups else output
        tokens += _count(model, ids[:, inputs["input_ids"].shape[1] :])
        if generator is not None:
            speculation = generator.speculation if speculation is None else speculation + generator.speculation
    wait(compat.input_device(model))
    seconds = perf_counter() - begin
    return Sample(tokens, seconds, ids.cpu(), speculation, clock.seconds, peak_memory(compat.input_device(model)))


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


def wait(device: torch.device) -> None:
    """Block until all work submitted to the device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
