"""Timing several ways to generate against each other: the same prompts, one process, taking turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from hf_specgen.statistics import Statistics


@dataclass(frozen=True)
class Contender:
    """One way to generate.

    Args:
        name: for tables.
        arguments: gives the arguments of `generate` that make the difference; called anew for every prompt.
        batched: whether it takes more than one prompt at a time.
    """

    name: str
    arguments: Callable[[], dict[str, Any]]
    batched: bool = True


@dataclass
class Sample:
    """One contender on one batch of prompts.

    Args:
        tokens: generated tokens, padding left out.
        seconds: wall time of the whole `generate` call.
        ids: `[batch, prompt + generated]`.
        speculation: statistics, from contenders that are ours.
    """

    tokens: int
    seconds: float
    ids: torch.Tensor
    speculation: Statistics | None


@dataclass
class Total:
    """Sums over samples. Throughput is the sum of tokens over the sum of time, never a mean of rates."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    identical: bool = True
    samples: list[Sample] = field(default_factory=list)

    def add(self, sample: Sample, reference: Sample) -> None:
        """Count a sample; `reference` is plain `generate` on the same prompts."""
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


def take_turns(
    model: PreTrainedModel,
    batches: Iterable[dict[str, torch.Tensor]],
    contenders: Sequence[Contender],
    settings: dict[str, Any],
    seed: int = 0,
) -> Iterator[dict[str, Sample]]:
    """Let the contenders generate for each batch, one after the other, all from the same seed.

    Args:
        model: the target.
        batches: `input_ids` and `attention_mask`, left-padded.
        contenders: those that cannot take a batch are left out for it.
        settings: arguments of `generate` that all share.
        seed: the first batch's; the next batch has the next.

    Yields:
        for each batch the sample of each contender, by name.
    """
    for number, inputs in enumerate(batches):
        inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        able = [c for c in contenders if c.batched or len(inputs["input_ids"]) == 1]
        # The order rotates, so that no contender is always the one that runs after a certain other.
        turns = able[number % len(able) :] + able[: number % len(able)]
        yield {c.name: _run(model, inputs, {**settings, **c.arguments()}, seed + number) for c in turns}


def _run(model: PreTrainedModel, inputs: dict[str, torch.Tensor], arguments: dict[str, Any], seed: int) -> Sample:
    torch.manual_seed(seed)
    wait(model.device)
    begin = perf_counter()
    ids = cast(Any, model).generate(**inputs, **arguments)
    wait(model.device)
    seconds = perf_counter() - begin
    generator = arguments.get("candidate_generator")
    speculation = None if generator is None else generator.speculation
    return Sample(_count(model, ids[:, inputs["input_ids"].shape[1] :]), seconds, ids.cpu(), speculation)


def _count(model: PreTrainedModel, generated: torch.Tensor) -> int:
    """Tokens up to and including the first end token of each row; the same way for every contender."""
    ends: Any = cast(Any, model).generation_config.eos_token_id
    if ends is None:
        return generated.numel()
    is_end = torch.isin(generated, torch.as_tensor(ends, device=generated.device))
    before_end = is_end.long().cumsum(dim=1) - is_end.long() == 0
    return int(before_end.sum())


def wait(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
