"""Private Transformers symbols that the package uses, one function each, checked by `tests/unit/test_compat.py`.

Each docstring names the symbol, as it is in Transformers 5.24. Nothing else in the package touches an underscore
attribute of Transformers, but for those of continuous batching in `hf_specgen.batching.transformers_batching`.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from inspect import signature
from typing import Any, cast

import torch
from torch import nn
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
)
from transformers.generation import utils

CACHE = next(
    name
    for name in ("cache", "past_key_values")
    if name in signature(GenerationMixin.prepare_inputs_for_generation).parameters
)
"""The argument of models that takes the key/value cache, and the field of their outputs that holds it: `cache` from
Transformers 5.24 on."""
LIBRARIES = ("hf_specgen", "transformers", "torch", "contextlib", "peft", "accelerate")
"""Packages between the line that calls `generate` and a warning."""


def prefill(model: PreTrainedModel, input_ids: torch.Tensor, config: GenerationConfig, kwargs: dict[str, Any]) -> Any:
    """Run the prompt through the model as `generate` does, maybe in chunks. Symbol: `GenerationMixin._prefill`."""
    return cast(Any, model)._prefill(input_ids, config, kwargs)


def default_generation_settings() -> dict[str, Any]:
    """The values of settings that are not given. Symbol: `GenerationConfig._get_default_generation_params()`."""
    return cast(Any, GenerationConfig)._get_default_generation_params()


def decode_plainly(
    model: PreTrainedModel, input_ids: torch.Tensor, config: GenerationConfig, tokens: int, kwargs: dict[str, Any]
) -> Any:
    """Plain greedy decoding, with its logits, from what `generate` has prepared. Symbol: `GenerationMixin._sample`.

    Tokens that the call suppresses are not generated: models raise at a placeholder without its image.
    """
    settings: Any = copy.deepcopy(config)
    settings._pad_token_tensor = None  # no row ends before the others
    settings.update(do_sample=False, num_return_sequences=1, return_dict_in_generate=True, output_logits=True)
    criteria = StoppingCriteriaList([MaxLengthCriteria(input_ids.shape[1] + tokens)])
    processors = LogitsProcessorList()
    if config.suppress_tokens:
        processors.append(SuppressTokensLogitsProcessor(config.suppress_tokens, device=str(input_ids.device)))
    return cast(Any, model)._sample(input_ids, processors, criteria, settings, **kwargs)


def supports_logits_to_keep(model: PreTrainedModel) -> bool:
    """Whether the forward pass takes `logits_to_keep`. Symbol: `GenerationMixin._supports_logits_to_keep()`."""
    return bool(cast(Any, model)._supports_logits_to_keep())


def is_user_defined(cache: Any) -> bool:
    """Whether the caller passed this cache to `generate`. Symbol: `Cache._is_user_defined`, set by `generate`."""
    return bool(getattr(cache, "_is_user_defined", False))


def pad_token(config: GenerationConfig) -> int | None:
    """The padding token that `generate` resolved. Symbol: `GenerationConfig._pad_token_tensor`."""
    token = cast(Any, config)._pad_token_tensor
    return None if token is None else int(token)


def optimized_for_decoding(model: PreTrainedModel) -> AbstractContextManager[Any]:
    """The context in which `generate` runs decoding steps. Symbol: `GenerationMixin._optimize_model_for_decode()`."""
    return cast(AbstractContextManager[Any], getattr(model, "_optimize_model_for_decode", nullcontext)())


def device_mesh(model: Any) -> Any:
    """The device mesh of a model that Transformers has spread over ranks, else None. Symbol: `_device_mesh`."""
    return getattr(model, "_device_mesh", None)


def logits_processors(model: Any, config: GenerationConfig) -> Any:
    """The logits processors that `generate` makes by these settings. Symbol: `_get_logits_processor`."""
    return model._get_logits_processor(config)


def is_stateful(model: PreTrainedModel) -> bool:
    """Whether the model class keeps a recurrent or convolutional state. Symbol: `PreTrainedModel._is_stateful`."""
    return bool(cast(Any, model)._is_stateful)


def prepared_call(model: Any, **arguments: Any) -> tuple[torch.Tensor, GenerationConfig, dict[str, Any]]:
    """What `generate` with these arguments would give its decoding method: input ids, config and model arguments.

    The encoder of an encoder-decoder model is run. No private symbol: `GenerationMixin.generate` as it was before it
    was patched, also for models that have a `generate` of their own. Settings of the model's generation config that
    need a tokenizer are switched off, and so are static caches: the model remembers the longest one for later calls.
    """
    prepared: list[tuple[torch.Tensor, GenerationConfig, dict[str, Any]]] = []

    def keep(
        model: Any,
        input_ids: torch.Tensor,
        *,
        generation_config: GenerationConfig,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        prepared.append((input_ids, generation_config, model_kwargs))
        return input_ids

    generate: Any = utils.GenerationMixin.generate
    off = {"stop_strings": None, "token_healing": False, "cache_implementation": "dynamic"}
    getattr(generate, "_hf_specgen_original", generate)(model, custom_generate=keep, **{**off, **arguments})
    return prepared[0]


def quantize(layer: Any, states: torch.Tensor, **settings: Any) -> Any:
    """Keys or values as a layer of a `QuantizedCache` stores them. Symbol: `QuantizedLayer._quantize`."""
    return layer._quantize(states, **settings)


def dequantize(layer: Any, states: Any) -> torch.Tensor:
    """What `quantize` returned, multiplied out. Symbol: `QuantizedLayer._dequantize`."""
    return cast(torch.Tensor, layer._dequantize(states))


def quantized_states(layer: Any) -> tuple[Any, Any]:
    """What a layer of a `QuantizedCache` stores. Symbols: `_quantized_keys` and `_quantized_values`."""
    return layer._quantized_keys, layer._quantized_values


def set_quantized_states(layer: Any, keys: Any, values: Any) -> None:
    """Replace what a layer of a `QuantizedCache` stores. Symbols as in `quantized_states`."""
    layer._quantized_keys, layer._quantized_values = keys, values


def mask_columns(config: GenerationConfig, mask: torch.Tensor | None) -> int | None:
    """The columns of a call's mask. Symbol: `GenerationConfig._mask_length`, of a mask that `generate` left out."""
    return mask.shape[1] if mask is not None else getattr(config, "_mask_length", None)


def attention_implementation(config: Any) -> str:
    """The attention kernel in use: "sdpa", "eager", … Symbol: `PreTrainedConfig._attn_implementation`."""
    return str(config._attn_implementation)


def stacklevel_of_user() -> int:
    """The `stacklevel` with which a warning of our caller names the line that called `generate`."""
    frame = sys._getframe(1)
    level = 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in LIBRARIES:
        frame = frame.f_back
        level = level + 1
    return level


def input_device(model: PreTrainedModel) -> torch.device:
    """Where input ids belong: the device that the embeddings compute on.

    `PreTrainedModel.device` is the device of the first parameter, "meta" where weights are offloaded. Symbol:
    `_hf_hook` of accelerate's dispatched modules, whose `execution_device` is where offloaded weights are used. A model
    without embeddings raises NotImplementedError.
    """
    try:
        module: Any = model.get_input_embeddings()
        device = module.weight.device
    except NotImplementedError:
        module = model
        device = model.device
    if device.type != "meta":
        return cast(torch.device, device)
    hook = getattr(module, "_hf_hook", None)
    devices = [getattr(part, "execution_device", None) for part in getattr(hook, "hooks", [hook])]
    return torch.device(next((device for device in devices if device is not None), "cpu"))


def default_device(device: torch.device | None = None) -> AbstractContextManager[Any]:
    """The context in which tensors are made on a device, the CPU if left out, unless they name another one.

    Nothing where that is so already: PyTorch's own context costs a microsecond for each operation.
    """
    device = torch.device("cpu") if device is None else device
    return nullcontext() if torch.get_default_device() == device else device


def without_compilation(model: PreTrainedModel) -> AbstractContextManager[Any]:
    """Runs compiled parts of a model eagerly: each new length of a cache would be compiled anew."""
    return _eager_stance() if has_compiled_parts(model) else nullcontext()


class _EagerCalls:
    """How many calls of all threads run compiled parts eagerly; `stack` restores the stance after the last of them."""

    lock = threading.Lock()
    running = 0
    stack = ExitStack()


@contextmanager
def _eager_stance() -> Iterator[None]:
    """Inside, `torch.compiler` has the stance "force_eager", which is the process's."""
    calls = _EagerCalls
    with calls.lock:
        if calls.running == 0:
            calls.stack.enter_context(torch.compiler.set_stance("force_eager"))
        calls.running += 1
    try:
        yield
    finally:
        with calls.lock:
            calls.running -= 1
            if calls.running == 0:
                calls.stack.close()


def has_compiled_parts(model: nn.Module) -> bool:
    """Whether something of the model is compiled. Symbols: what `Module.compile()` and `torch.compile` leave behind."""
    return any(
        module._compiled_call_impl is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
        or hasattr(module, "_orig_mod")
        for module in model.modules()
    )


def global_hooks() -> tuple[int, ...]:
    """The numbers of the hooks that every module of the process runs. Symbols: private ones of PyTorch."""
    return (*nn.modules.module._global_forward_hooks, *nn.modules.module._global_forward_pre_hooks)


def has_device_hooks(model: PreTrainedModel) -> bool:
    """Whether weights or activations are moved between devices. Symbol: `_hf_hook` of accelerate."""
    return any(hasattr(module, "_hf_hook") for module in model.modules())


def unwrapped(model: Any) -> Any:
    """The model that `torch.compile` returned a wrapper of. Symbol: `OptimizedModule._orig_mod`."""
    return getattr(model, "_orig_mod", model)


def forward_pre_hooks(module: nn.Module) -> dict[int, Any]:
    """The hooks of a module that run before its forward pass. Symbol of PyTorch: `Module._forward_pre_hooks`."""
    return dict(module._forward_pre_hooks)


def remove_forward_pre_hook(module: nn.Module, number: int) -> None:
    """Remove a hook without its handle. Symbols: `Module._forward_pre_hooks` and `_forward_pre_hooks_with_kwargs`."""
    module._forward_pre_hooks.pop(number)
    module._forward_pre_hooks_with_kwargs.pop(number, None)


def prefix_function(processor: PrefixConstrainedLogitsProcessor) -> Any:
    """What was given to `generate` as `prefix_allowed_tokens_fn`.

    Symbol: `PrefixConstrainedLogitsProcessor._prefix_allowed_tokens_fn`.
    """
    return processor._prefix_allowed_tokens_fn


def replaced_methods(model: PreTrainedModel) -> list[str]:
    """The names of methods that plain decoding calls in each step, and that a class of a user has replaced.

    Symbols: `GenerationMixin._sample` and `_update_model_kwargs_for_generation`.
    """
    names = ("_sample", "_update_model_kwargs_for_generation", "prepare_inputs_for_generation")
    modules = {name: getattr(getattr(model, name), "__module__", "") for name in names}
    return [name for name, module in modules.items() if module.partition(".")[0] not in ("transformers", "peft")]


def has_own_decoding(model: PreTrainedModel) -> bool:
    """Whether a model class of Transformers decodes by a loop of its own. Symbol: `GenerationMixin._sample`."""
    owner = cast(Any, type(model))._sample.__module__
    return bool(owner != GenerationMixin.__module__ and owner.partition(".")[0] == "transformers")


def uses_activation_checkpointing(model: PreTrainedModel) -> bool:
    """Whether activations are recomputed, which switches the cache off; `is_gradient_checkpointing` before 5.23."""
    name = "is_activation_checkpointing"
    return bool(getattr(model, name if hasattr(type(model), name) else "is_gradient_checkpointing"))


def is_sharded(model: PreTrainedModel) -> bool:
    """Whether several processes hold parts of the parameters, so that all of them must run the same forward passes.

    Symbols: `is_fsdp_managed_module`, `is_deepspeed_zero3_enabled` and `_get_torch_distributed_world_size`, as
    `generate` uses them to decide on `synced_gpus`, which it does not pass on.
    """
    names = cast(Any, utils)
    if names._get_torch_distributed_world_size() == 1:
        return False
    return bool(names.is_deepspeed_zero3_enabled() or names.is_fsdp_managed_module(model))
