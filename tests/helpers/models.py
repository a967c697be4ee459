"""Tiny random models of every tested architecture, prompts for them, and a record of what they read."""

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.helpers.paths import TINY_ARCHITECTURES

SPEC = json.loads(TINY_ARCHITECTURES.read_text(encoding="utf-8"))
ARCHITECTURES = sorted(SPEC["causal"])
STATEFUL = {**SPEC["convolutional"], **SPEC["indexed"], **SPEC["recurrent"], **SPEC["counting_slots"]}
"""Architectures with convolutions, recurrent states and indexed attention."""
VOCAB = 99
PROMPT_LENGTH = 12
SHARED: WeakSet[Any] = WeakSet()
"""Models that no test changes, so that their plain outputs can be cached; see `comparison.plain_output`."""


@cache
def tiny_model(architecture: str, **overrides: Any) -> Any:
    """A random model with 2 to 4 layers of width 64, shared by the tests of a file: never change it."""
    model = fresh_model(architecture, **overrides)
    SHARED.add(model)
    return model


def fresh_model(architecture: str, **overrides: Any) -> Any:
    """A model like that of `tiny_model`, for a test that changes it."""
    return _from_config(architecture, {**(SPEC["causal"] | SPEC["other"])[architecture], **overrides})


@cache
def stateful_model(architecture: str) -> Any:
    """A random model of `STATEFUL`, shared by the tests of a file: never change it."""
    model = _from_config(architecture, STATEFUL[architecture])
    with torch.no_grad():  # so that logits are far apart: chunked and recurrent kernels round differently
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= 3
    SHARED.add(model)
    return model


def _from_config(architecture: str, arguments: dict[str, Any]) -> Any:
    implementation = "eager" if architecture in SPEC["eager_only"] else None
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = CONFIG_MAPPING[architecture](**arguments)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


def perturbed_copy(model: Any, noise: float = 0.02) -> Any:
    """A draft model, some of whose tokens are accepted: weights are off by noise relative to their mean magnitude."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator) * parameter.abs().mean()
    return draft


@cache
def shared_draft(model: Any, noise: float = 0.02) -> Any:
    """`perturbed_copy` of a shared model, made and checked once for the tests of a file: never change it."""
    return perturbed_copy(model, noise)


def prompts(batch: int, length: int = PROMPT_LENGTH) -> dict[str, torch.Tensor]:
    """Random prompts of different lengths, left-padded; the padding id 0 also occurs as a real token."""
    generator = torch.Generator().manual_seed(7)
    input_ids = torch.randint(1, VOCAB, (batch, length), generator=generator)
    input_ids[:, -3] = 0
    attention_mask = torch.ones_like(input_ids)
    for row in range(batch):
        padding = 4 * row % (length - 3)
        input_ids[row, :padding] = 0
        attention_mask[row, :padding] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask}


@contextmanager
def recorded_inputs(module: Any, measure: Callable[[torch.Tensor], Any] = torch.numel) -> Iterator[list[Any]]:
    """Records what each pass of a module reads inside the context: `measure` of its token ids or states."""
    read: list[Any] = []

    def record(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        read.append(measure(args[0] if args else kwargs["input_ids" if "input_ids" in kwargs else "hidden_states"]))

    record.__module__ = "hf_specgen"  # as a user's hook it would keep ended rows in the batch
    handle = module.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield read
    finally:
        handle.remove()


def width(read: Any) -> int:
    """Tokens per row of ids, of states, or of the inputs of a head."""
    return getattr(read, "embeddings", read).shape[1]


def small_llama(vocab_size: int, seed: int, **settings: Any) -> Any:
    """A random model of one layer with so few tokens that the distribution of its texts can be enumerated."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"pad_token_id": None, "eos_token_id": None, "bos_token_id": None}
    config = LlamaConfig(**{"vocab_size": vocab_size, "initializer_range": 0.5, **sizes, **ends, **settings})
    return LlamaForCausalLM(config).eval()
