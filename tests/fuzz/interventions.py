"""What is changed on one model object between two calls: hooks, adapters, precision, arguments, settings."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from hf_specgen.targets.model_parts import decoder_layers
from tests.fuzz.cases import Case
from tests.fuzz.models import VOCAB
from tests.fuzz.situations import LORA

STRENGTH = 1.0
"""Standard deviation of the vectors that steer a layer, whose states are about as large."""
LATER = 5
"""More steps than the self-check takes."""


@dataclass
class Changed:
    """A model as calls of one stage get it.

    Args:
        caller: what `generate` is called on: the model, or a wrapper of it.
        arguments: more arguments of the plain and of the speculative call.
    """

    caller: Any
    arguments: dict[str, Any] = field(default_factory=dict)


def stages(case: Case) -> tuple[int, ...]:
    """The stages of a case, one for each pair of calls: 0 without its intervention; 1, and for adapters 2, with it."""
    if not case.intervention:
        return (0,)
    changed = (1, 2) if case.intervention in ("lora", "lora_rows") else (1,)
    return (*changed, 0) if case.changed_first else (0, *changed, 0)


@contextlib.contextmanager
def changed(case: Case, model: Any, stage: int, prompt: torch.Tensor) -> Iterator[Changed]:
    """The model in one stage; afterwards it is what it was."""
    if stage == 0 or case.intervention == "again":
        yield Changed(model)
        return
    name, _, detail = case.intervention.partition(" ")
    if name in HOOKING:
        with HOOKING[name](_layer(case, model), _steering(case, detail, stage)):
            yield Changed(model)
    elif name == "saved":
        with _attribute(model, "generation_config", _saved(model, detail)):
            yield Changed(model)
    else:
        change = _adapted if name in LORA else CHANGES[name]
        with change(case, model, stage, prompt) as result:
            yield result


def _layer(case: Case, model: Any) -> nn.Module:
    """A decoder layer; the embeddings of a model without a list of them."""
    try:
        layers = decoder_layers(model)
    except (ValueError, AttributeError):
        return model.get_input_embeddings()
    return layers[case.seed % len(layers)]


@contextlib.contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of this one object, as long as the block runs."""
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


# Steering: a vector is added to the states of one layer

Steering = Callable[[torch.Tensor], torch.Tensor]


def _steering(case: Case, where: str, stage: int) -> Steering:
    """Adds a vector to states `[..., rows, tokens, hidden]`."""
    rows, passes = len(case.lengths) * case.num_return_sequences, 0

    def steer(states: torch.Tensor) -> torch.Tensor:
        nonlocal passes
        generator = torch.Generator().manual_seed(case.seed + stage)
        vectors = STRENGTH * torch.randn(rows, 1, states.shape[-1], generator=generator).to(states)
        tokens = states.shape[-2]
        if where == "last":
            return torch.cat([states[..., :-1, :], states[..., -1:, :] + vectors[0]], dim=-2)
        if where in ("decoding", "prompt"):
            return states + vectors[0] if (tokens == 1) == (where == "decoding") else states
        if where == "later":
            passes = passes + 1 if tokens == 1 else 0  # the prompt begins a text
            return states + vectors[0] if passes > LATER else states
        if where == "rows":
            return states + vectors[: states.shape[-3]]
        return states + (vectors if where == "exact_rows" else vectors[0])

    return steer


def _replace_first(values: Any, steer: Steering) -> Any:
    """The output or the arguments of a layer with steered states: a tensor, or a tuple that begins with it."""
    return steer(values) if isinstance(values, torch.Tensor) else (steer(values[0]), *values[1:])


@contextlib.contextmanager
def _hook(layer: nn.Module, steer: Steering) -> Iterator[None]:
    with layer.register_forward_hook(lambda _, args, output: _replace_first(output, steer)):
        yield


@contextlib.contextmanager
def _pre_hook(layer: nn.Module, steer: Steering) -> Iterator[None]:
    def before(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if args:  # token ids, where the layer is an embedding
            return (args if not args[0].is_floating_point() else _replace_first(args, steer)), kwargs
        return args, {**kwargs, "hidden_states": steer(kwargs["hidden_states"])}

    with layer.register_forward_pre_hook(before, with_kwargs=True):
        yield


@contextlib.contextmanager
def _forward(layer: nn.Module, steer: Steering) -> Iterator[None]:
    forward = layer.forward

    @functools.wraps(forward)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return _replace_first(forward(*args, **kwargs), steer)

    with _attribute(layer, "forward", replaced):
        yield


HOOKING = {"hook": _hook, "pre_hook": _pre_hook, "forward": _forward}


# Parts that are replaced, arguments that change from step to step, tokens without finite embeddings


@contextlib.contextmanager
def _other_attention(case: Case, model: Any, *_: Any) -> Iterator[Changed]:
    before = model.config._attn_implementation
    with contextlib.suppress(ValueError, ImportError):  # not every model has SDPA
        model.set_attn_implementation("eager" if before == "sdpa" else "sdpa")
    try:
        yield Changed(model)
    finally:
        model.set_attn_implementation(before)


@contextlib.contextmanager
def _replaced_model_forward(case: Case, model: Any, *_: Any) -> Iterator[Changed]:
    """Scores of the last position that depend on how many tokens a pass has."""
    forward = model.forward

    @functools.wraps(forward)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = torch.cat([output.logits[:, :-1], output.logits[:, -1:].roll(1, dims=-1)], dim=1)
        return output

    with _attribute(model, "forward", replaced):
        yield Changed(model)


@contextlib.contextmanager
def _changed_weights(case: Case, model: Any, *_: Any) -> Iterator[Changed]:
    """Weights of a layer are multiplied in place, as training does it."""
    parameters = list(_layer(case, model).parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter *= 1.2
    try:
        yield Changed(model)
    finally:
        with torch.no_grad():
            for parameter, values in zip(parameters, before, strict=True):
                parameter.copy_(values)


@contextlib.contextmanager
def _other_output_matrix(case: Case, model: Any, *_: Any) -> Iterator[Changed]:
    """Another module as output matrix, whose rows are shifted by one token."""
    before = model.get_output_embeddings()
    if before is None:
        yield Changed(model)
        return
    other = copy.deepcopy(before)
    other.weight.data = before.weight.data.roll(1, dims=0)
    model.set_output_embeddings(other)
    try:
        yield Changed(model)
    finally:
        model.set_output_embeddings(before)


def _scheduled(strength: Any, counts: bool = False) -> Any:
    """A subclass with an argument that falls from step to step, or that is made of the length of the text."""

    @contextlib.contextmanager
    def change(case: Case, model: Any, *_: Any) -> Iterator[Changed]:
        base = type(model)

        class Scheduled(base):  # type: ignore[misc, valid-type]
            def forward(self, *args: Any, strength: Any = None, **kwargs: Any) -> Any:
                output = super().forward(*args, **kwargs)
                if strength is not None:
                    bias = torch.zeros(output.logits.shape[-1]).to(output.logits)
                    bias[::3] = float(strength)
                    output.logits = output.logits + bias
                return output

            def _update_model_kwargs_for_generation(self, outputs: Any, kwargs: Any, *args: Any, **more: Any) -> Any:
                kwargs = super()._update_model_kwargs_for_generation(outputs, kwargs, *args, **more)
                if kwargs.get("strength") is not None:
                    kwargs["strength"] = kwargs["strength"] * 0.6
                return kwargs

            def prepare_inputs_for_generation(self, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
                inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
                return {**inputs, "strength": 3.0 * (input_ids.shape[1] % 3)} if counts else inputs

        signature = inspect.signature(base.forward)
        parameter = inspect.Parameter("strength", inspect.Parameter.KEYWORD_ONLY, default=None)
        parameters = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        variable = [one for one in signature.parameters.values() if one.kind is one.VAR_KEYWORD]
        given = signature.replace(parameters=[*parameters, parameter, *variable])
        vars(Scheduled.forward)["__signature__"] = given
        Scheduled.__name__ = base.__name__
        model.__class__ = Scheduled
        try:
            yield Changed(model, {} if counts else {"strength": copy.copy(strength)})
        finally:
            model.__class__ = base

    return change


def _not_finite(value: float) -> Any:
    """Embeddings of tokens that plain `generate` neither reads nor writes."""

    @contextlib.contextmanager
    def change(case: Case, model: Any, stage: int, prompt: torch.Tensor) -> Iterator[Changed]:
        present = {*prompt.flatten().tolist(), case.pad_id}
        tokens = [token for token in range(3, VOCAB, 4) if token not in present]
        weight = model.get_input_embeddings().weight
        before = weight.detach().clone()
        with torch.no_grad():
            weight[tokens] = value
        try:
            yield Changed(model, {"suppress_tokens": tokens})
        finally:
            with torch.no_grad():
                weight.copy_(before)

    return change


# Half precision, adapters, saved settings


@contextlib.contextmanager
def _autocast(case: Case, model: Any, *_: Any) -> Iterator[Changed]:
    with torch.autocast(model.device.type, torch.bfloat16):
        yield Changed(model)


@contextlib.contextmanager
def _prepared(case: Case, model: Any, *_: Any) -> Iterator[Changed]:
    """`forward` runs under autocast, and its outputs are float32."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    forward = vars(model).get("forward")
    try:
        accelerator = Accelerator(cpu=model.device.type == "cpu", mixed_precision="bf16")
        yield Changed(accelerator.prepare_model(model))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        for name in ("forward", "_original_forward"):
            vars(model).pop(name, None)
        if forward is not None:
            model.forward = MethodType(forward, model)


@contextlib.contextmanager
def _adapted(case: Case, model: Any, stage: int, prompt: torch.Tensor) -> Iterator[Changed]:
    """LoRA: one adapter, then another one; both and none in one batch; or one that acts from some tokens on."""
    from peft import LoraConfig, get_peft_model

    settings: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
    if case.intervention == "activated_lora":
        row = prompt[0][-max(case.lengths[0], 1) :].tolist()
        settings |= {"task_type": "CAUSAL_LM", "alora_invocation_tokens": row[len(row) // 2 :][:2]}
    names, arguments = ["first", "second"], dict[str, Any]()
    with torch.random.fork_rng():
        torch.manual_seed(case.seed)
        adapted = get_peft_model(model, LoraConfig(**settings), adapter_name=names[0])
        adapted.add_adapter(names[1], LoraConfig(**settings))
    adapted.eval()
    adapted.set_adapter(names[stage - 1])
    if case.intervention == "lora_rows":
        mixed = [*names, "__base__"]
        arguments["adapter_names"] = [mixed[(row + stage) % 3] for row in range(len(case.lengths))]
    try:
        yield Changed(adapted, arguments)
    finally:
        adapted.unload()


SAVED_SETTINGS: dict[str, dict[str, Any]] = {
    "attentions": {"output_attentions": True},
    "beams": {"num_beams": 2},
    "forced_bos": {"forced_bos_token_id": 12},
    "hidden_states": {"output_hidden_states": True},
    "min_length": {"min_length": 100},
    "no_cache": {"use_cache": False},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
    "static": {"cache_implementation": "static"},
}


def _saved(model: Any, name: str) -> GenerationConfig:
    """The model's generation config with more settings, as a checkpoint may hold them."""
    return GenerationConfig.from_dict({**model.generation_config.to_dict(), **SAVED_SETTINGS[name]})


CHANGES: dict[str, Any] = {
    "attention": _other_attention,
    "model_forward": _replaced_model_forward,
    "output_matrix": _other_output_matrix,
    "weights": _changed_weights,
    "scheduled_number": _scheduled(8.0),
    "scheduled_tensor": _scheduled(torch.tensor(8.0)),
    "prepared_inputs": _scheduled(None, counts=True),
    "nan_tokens": _not_finite(float("nan")),
    "inf_tokens": _not_finite(float("inf")),
    "autocast": _autocast,
    "prepared": _prepared,
}
