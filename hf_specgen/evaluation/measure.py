"""Timing several ways to generate against each other: the same prompts, one process, taking turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_specgen.evaluation.memory import Peak, peak_memory, reset_peak_memory
from hf_specgen.statistics import Statistics


@dataclass(frozen=True)
class Variant:
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
    """One variant on one batch of prompts.

    Args:
        tokens: generated tokens, padding left out.
        seconds: wall time of the whole `generate` call; of all calls, for a chat of several turns.
        ids: `[batch, prompt + generated]`.
        speculation: statistics, from variants that are ours.
        first_token: seconds until the first new token is there.
        peak: most memory in use while it ran; None if that was not measured.
    """

    tokens: int
    seconds: float
    ids: torch.Tensor
    speculation: Statistics | None
    first_token: float = 0.0
    peak: Peak | None = None


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


def interleave(
    model: PreTrainedModel,
    batches: Iterable[dict[str, torch.Tensor]],
    variants: Sequence[Variant],
    settings: dict[str, Any],
    seed: int = 0,
) -> Iterator[dict[str, Sample]]:
    """Let the variants generate for each batch, one after the other, all from the same seed.

    Args:
        model: the target.
        batches: `input_ids` and `attention_mask`, left-padded.
        variants: those that cannot take a batch are left out for it.
        settings: arguments of `generate` that all share.
        seed: the first batch's; the next batch has the next.

    Yields:
        for each batch the sample of each variant, by name.
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
    """One round: every variant that can generates for the same inputs.

    Args:
        model, variants, settings: as for `interleave`.
        inputs: `input_ids` and `attention_mask` `[batch, prompt]`.
        seed: for each variant alike.
        first: who begins; counts on from round to round, so that no variant always runs after a certain other.
        followups: for a chat (one row) the tokens `[1, length]` of every further turn, from the end of the answer
            before it; each turn goes on from the cache of the one before.

    Returns:
        the sample of each variant, by name, in the order of `variants`.
    """
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    able = [c for c in variants if c.batched or len(inputs["input_ids"]) == 1]
    turns = able[first % len(able) :] + able[: first % len(able)]
    samples = {c.name: _run(model, inputs, followups, {**settings, **c.arguments()}, seed) for c in turns}
    return {c.name: samples[c.name] for c in able}


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
    reset_peak_memory(model.device)
    wait(model.device)
    clock.begin = begin = perf_counter()
    output: Any = None
    for followup in [None, *followups]:
        if followup is not None:
            inputs = _next_turn(output, followup.to(model.device))
        output = cast(Any, model).generate(**inputs, **arguments)
        ids = output.sequences if followups else output
        tokens += _count(model, ids[:, inputs["input_ids"].shape[1] :])
        if generator is not None:
            speculation = generator.speculation if speculation is None else speculation + generator.speculation
    wait(model.device)
    seconds = perf_counter() - begin
    return Sample(tokens, seconds, ids.cpu(), speculation, clock.seconds, peak_memory(model.device))


def _next_turn(output: Any, followup: torch.Tensor) -> dict[str, Any]:
    """The inputs of a chat's next turn; an end token that the answer already has is not repeated."""
    text = output.sequences
    if int(text[0, -1]) == int(followup[0, 0]):
        followup = followup[:, 1:]
    ids = torch.cat([text, followup], dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "past_key_values": output.past_key_values}


class _FirstToken(BaseStreamer):
    """Notes when the first token comes: what is put first is the prompt."""

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
    """Tokens up to and including the first end token of each row; the same way for every variant."""
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
