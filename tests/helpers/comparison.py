"""Comparison with plain `generate`: the same tokens, and the random generator in the same state."""

import json
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import LogitsProcessorList

from hf_specgen import Candidates, SpeculativeOutput, Statistics
from hf_specgen.settings import KEYWORDS
from tests.helpers.models import SHARED

SEED = 11
Inputs = dict[str, torch.Tensor]
Strategy = Candidates | Callable[[torch.Tensor], Candidates]
"""A strategy, or what builds one from the `[batch, generated]` tokens of plain `generate`."""
Processors = Callable[[], LogitsProcessorList] | None
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20}}
END: dict[str, Any] = {"eos_token_id": list(range(30, 40)), "pad_token_id": 0}


def plain_and_speculative(
    model: Any, inputs: Inputs, candidates: Strategy, *, make_processors: Processors = None, **arguments: Any
) -> tuple[torch.Tensor, SpeculativeOutput]:
    """The ids of plain `generate`, without settings of speculation such as `policy=`, and the speculative output."""
    settings = {name: arguments.pop(name) for name in KEYWORDS if name in arguments}
    plain, after_plain = plain_output(model, inputs, make_processors, **arguments)
    strategy: Any = candidates(answers(model, inputs, plain)) if callable(candidates) else candidates
    output = _generate(model, inputs, make_processors, {**arguments, **settings, "candidate_generator": strategy})
    if model.config.is_encoder_decoder:  # `generate` of Whisper makes an output of its own
        object.__setattr__(output, "speculation", strategy.speculation)
    assert torch.equal(torch.rand(3), after_plain), "the random generator is not where plain generate left it"
    return plain, output


def assert_same_tokens(model: Any, inputs: Inputs, candidates: Strategy, **arguments: Any) -> Statistics:
    """Assert that `plain_and_speculative` gives the same tokens twice; returns the statistics."""
    plain, output = plain_and_speculative(model, inputs, candidates, **arguments)
    assert plain.tolist() == output.sequences.tolist()
    return output.speculation


_plain: WeakKeyDictionary[Any, dict[Any, tuple[torch.Tensor, torch.Tensor]]] = WeakKeyDictionary()


def plain_output(
    model: Any, inputs: Inputs, make_processors: Processors = None, **arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids of plain `generate` from `SEED`, and the next three random numbers.

    Many tests compare one plain call with different strategies. It is cached where no test changes the model and every
    argument is a plain value, or the tokenizer, which is the same one in all tests.
    """
    key = _key(inputs, arguments), make_processors
    calls = {} if key[0] is None or model not in SHARED else _plain.setdefault(model, {})
    if key not in calls:
        calls[key] = _generate(model, inputs, make_processors, arguments).sequences, torch.rand(3)
    ids, following = calls[key]
    return ids.clone(), following


def _key(inputs: Inputs, arguments: dict[str, Any]) -> str | None:
    """The cache key of a call; None if an argument is a function or an object, which may keep a state."""
    values = {**arguments, "tokenizer": "tokenizer" in arguments}
    try:
        return json.dumps([{name: tensor.tolist() for name, tensor in inputs.items()}, values], sort_keys=True)
    except TypeError:
        return None


def _generate(model: Any, inputs: Inputs, make_processors: Processors, arguments: dict[str, Any]) -> Any:
    processors = {} if make_processors is None else {"logits_processor": make_processors()}
    seed(SEED)
    return model.generate(**inputs, **{**arguments, "return_dict_in_generate": True}, **processors)


def seed(number: int) -> None:
    """Seed the CPU's generator alone: `torch.manual_seed` takes a millisecond for each unused kind of accelerator."""
    torch.default_generator.manual_seed(number)


def answers(model: Any, inputs: Inputs, ids: torch.Tensor) -> torch.Tensor:
    """The generated part of what `generate` returned; an encoder-decoder begins with one token of its decoder."""
    if not model.config.is_encoder_decoder:
        return ids[:, inputs["input_ids"].shape[1] :]
    return ids[:, inputs["decoder_input_ids"].shape[1] if "decoder_input_ids" in inputs else 1 :]
