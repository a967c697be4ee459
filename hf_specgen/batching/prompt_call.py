"""The call of a prompt of `generate_many`: a `generate` call that ends after its prefill, with what its steps need."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from transformers.generation.streamers import BaseStreamer

from hf_specgen import compat
from hf_specgen.batching.shared_steps import SharedSteps
from hf_specgen.decoding import DecodingLoop
from hf_specgen.generate import Speculation
from hf_specgen.targets.fingerprint import computation
from hf_specgen.targets.row_target import RowTarget

NOT_PASSED_ON = {"input_ids", "attention_mask", "labels"}
"""Entries of a prompt that are read here, or that change no token."""


class PromptCall(Speculation):
    """The `generate` call of a prompt: prepared as any other; `run` makes its prefill only, not its steps.

    If it `shares_passes`, they are those of a common target, whose rows are calls that have joined `shared`; otherwise
    it is decoded alone, by `DecodingLoop.decode`.
    """

    joins_shared_target = True
    loop: DecodingLoop  # once the call has run
    stack: ExitStack  # ends its sessions
    shares_passes: bool
    computation: tuple[Hashable, ...]  # fingerprint of what the model computes while `generate` runs

    def __init__(self, index: int, seed: int, shared: SharedSteps, streamer: BaseStreamer | None):
        super().__init__(shared.settings, streamer)
        self._shared = shared
        self.index = index
        self.seed = seed

    @property
    def target(self) -> RowTarget:
        """The target of a joinable row."""
        return cast(RowTarget, self.loop.target)

    def _may_share(self, loop: DecodingLoop) -> bool:
        """Whether a common target can process the row; not if a stateful function would be called for texts in turn."""
        target = loop.target
        if loop.verification.processors.may_be_stateful or loop.outputs.criteria.needs_scores:
            return False
        return target.is_joinable and not self.settings.candidates.target_requirements(target.model).reads_cache

    def run(self, loop: DecodingLoop, stack: ExitStack) -> torch.Tensor:
        """Run the prefill, and keep loop and sessions after `generate` returns, whose output nobody uses."""
        if loop.state.batch != 1:
            raise ValueError("generate_many returns one answer to each prompt; leave num_return_sequences= out")
        loop.prefill()
        self.shares_passes = self._may_share(loop)
        if self.shares_passes:
            self._shared.join(loop)
        loop.measure_latency()
        self.computation = computation(loop.target.model)
        self.loop = loop
        self.stack = stack.pop_all()
        return loop.outputs.output_ids()


def prefilled_calls(
    model: Any,
    prompts: Iterable[Any],
    shared: SharedSteps,
    seed: int | Sequence[int],
    streamer: Callable[[int], BaseStreamer] | None,
    arguments: dict[str, Any],
) -> Iterator[PromptCall]:
    """Calls of the prompts, one by one: each is prefilled when the iterator is advanced."""
    for index, prompt in enumerate(prompts):
        with errors_with_index(index):
            with compat.default_device():
                inputs = _inputs(prompt, model)
            if isinstance(seed, Sequence) and index >= len(seed):  # prompts of an iterator are not counted before
                raise ValueError(f"there is no seed for it, as seed has {len(seed)} entries; give one for each prompt")
            call_seed = int(seed[index]) if isinstance(seed, Sequence) else int(seed) + index
            call = PromptCall(index, call_seed, shared, streamer and streamer(index))
            model.generate(**{**arguments, **inputs}, custom_generate=call)
            if computation(call.loop.target.model) != call.computation:
                call.stack.close()
                raise ValueError(
                    "generate() changes the model while it runs, as PEFT does for adapter_names=, and generate_many "
                    "continues after it has returned; choose one adapter by set_adapter(name), or call generate()"
                )
        yield call


def _inputs(prompt: Any, model: Any) -> dict[str, Any]:
    """The arguments of `generate` for a prompt: its ids, and what a processor returned beside them for this model."""
    ids = _token_ids(prompt)
    is_text = torch.ones_like(ids, dtype=torch.bool)
    inputs: dict[str, Any] = {}
    if isinstance(prompt, Mapping):
        if "attention_mask" in prompt:
            is_text = _mask(prompt["attention_mask"], ids) != 0
        names = prompt.keys() & inspect.signature(compat.unwrapped(model).forward).parameters.keys()
        for name in sorted(names - NOT_PASSED_ON):
            if (value := prompt[name]) is not None:
                value = torch.as_tensor(value)
                # Values by token, such as token types, lose the entries of padding as the ids do.
                is_by_token = value.shape in (ids.shape, ids.shape[1:])
                inputs[name] = value.view(1, -1)[is_text][None] if is_by_token else value
    text = ids[is_text][None].long()
    inputs |= {"input_ids": text, "attention_mask": torch.ones_like(text)}
    return {name: value.to(compat.input_device(model)) for name, value in inputs.items()}


def _token_ids(prompt: Any) -> torch.Tensor:
    """The ids `[1, tokens]` of a prompt, which may be the output of a tokenizer; raises for anything else."""
    is_encoding = isinstance(prompt, Mapping) and "input_ids" in prompt
    values = prompt["input_ids"] if is_encoding else getattr(prompt, "ids", prompt)
    try:
        ids = torch.as_tensor(values)
        is_valid = not (ids.is_floating_point() and ids.numel())  # an empty list becomes an empty tensor of floats
    except (TypeError, ValueError, RuntimeError):
        is_valid = False
    if not is_valid:
        raise TypeError(f"a prompt must be token ids, such as tokenizer(text)['input_ids'], got {prompt!r:.60}")
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or len(ids) != 1:
        raise ValueError(f"a prompt must have the shape [length] or [1, length], got {list(ids.shape)}")
    return ids


def _mask(values: Any, ids: torch.Tensor) -> torch.Tensor:
    """The attention mask of a prompt, `[1, tokens]`; raises `ValueError` if it has another length."""
    mask = torch.as_tensor(values).view(1, -1)
    if mask.shape != ids.shape:
        raise ValueError(
            f"its attention_mask has {mask.shape[1]} values for {ids.shape[1]} tokens; give one for each token"
        )
    return mask


@contextmanager
def errors_with_index(*indices: int) -> Iterator[None]:
    """A context that puts the index of the prompt, or those of all in a pass, in front of the message of an error.

    Some exceptions, such as `OSError`, do not show their argument as the message: these get the index as a note.
    """
    try:
        yield
    except Exception as error:
        arguments = error.args
        prompts = f"prompt{'s' * (len(indices) > 1)} {', '.join(map(str, indices))}"
        message = f"{prompts}: {error}"
        error.args = (message,)
        if str(error) != message:
            error.args = arguments
            error.add_note(prompts)
        raise
