"""What the forward passes of a model depend on, as values that are equal as long as nothing has changed.

`computation` belongs to the result of a self-check: whatever may change between two calls and alter how a token's
scores depend on the other tokens of a pass. `graph_fingerprint` belongs to captured passes: they refer to addresses of
tensors too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import islice
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specgen import compat
from hf_specgen.linear_layers import layer_of
from hf_specgen.targets import hooks
from hf_specgen.targets.attention import registered_attention
from hf_specgen.targets.model_parts import text_config

PLAIN_TENSORS = frozenset((nn.Parameter, torch.Tensor, type(None)))
STANDARD_ATTRIBUTES = tuple(hooks.own_attributes(nn.Module()))
"""Attributes of every module, which most constructors make before all others: its parts and its hooks."""


SAMPLE = 16
"""Values of a weight by which two trainings are distinguished."""


def computation(model: PreTrainedModel) -> tuple[Hashable, ...]:
    """What the computation of a model depends on beside its weights, their dtype and their device.

    These are the classes of its modules, their hooks, replaced `forward`s and plain attributes, the config, and the
    attention function; of weights that are no plain tensors, as quantised ones, the classes and plain attributes. Of
    hooks and replaced functions also the settings that they refer to, see `function_state`. A module visited in the
    same place, of the same class and with the same attributes, computes the same. Each module has a tuple of its own:
    records that a hook collects during passes move no other value.
    """
    values: list[Hashable] = [compat.global_hooks()]
    skipped = len(STANDARD_ATTRIBUTES)
    settings_of_class: dict[type[nn.Module], Callable[[Iterable[Any]], list[Hashable]]] = {}
    modules: list[Any] = [model]
    visited: set[int] = set()
    while modules:
        module = modules.pop()
        attributes = hooks.own_attributes(module)
        children = attributes["_modules"]
        if children:
            if id(module) in visited:  # a module may be a part of several
                continue
            visited.add(id(module))
            modules += [child for child in children.values() if child is not None]
        module_class = module.__class__
        settings = settings_of_class.get(module_class)
        if settings is None:
            settings = settings_of_class[module_class] = _settings_reader(module_class)
        of_module = [module_class, attributes.get("training")]  # a compiled module has that of its part
        if tuple(islice(attributes, skipped)) == STANDARD_ATTRIBUTES:
            other_attributes: Iterable[Any] = islice(attributes.values(), skipped, None)
        else:  # a constructor may set some before it calls that of `nn.Module`, as BART's positions do
            other_attributes = [value for name, value in attributes.items() if name not in STANDARD_ATTRIBUTES]
        of_module += settings(other_attributes)
        for tensor in (*attributes["_parameters"].values(), *attributes["_buffers"].values()):
            tensor_class: Any = type(tensor)
            if tensor_class not in PLAIN_TENSORS:
                of_module += (tensor_class, tuple(hooks.plain_values([hooks.own_attributes(tensor)])))
        if attributes["_forward_hooks"] or attributes["_forward_pre_hooks"] or "forward" in attributes:
            of_module += map(hooks.function_state, hooks.changed_functions(module))
        values.append(tuple(of_module))
    # Functions of a class may be replaced for all its modules, as kernel libraries do.
    values.append(frozenset((module_class, module_class.forward) for module_class in settings_of_class))
    config = text_config(model)
    implementation = compat.attention_implementation(config)
    values += (implementation, hooks.function_state(registered_attention(implementation)))
    values += (tuple(hooks.plain_values([hooks.own_attributes(one)], limit=None)) for one in (model.config, config))
    return tuple(values)


def _settings_reader(module_class: type[nn.Module]) -> Callable[[Iterable[Any]], list[Hashable]]:
    """What reads the settings among the attributes of modules of a class; lists only where they are settings."""
    package = hooks.package_of(module_class.__module__)
    if package == "peft":  # active and merged adapters
        return lambda attributes: [hooks.text_of(value) for value in attributes if type(value) in hooks.SETTING_TYPES]
    return _plain_attributes if package in hooks.LIBRARIES else hooks.values_by_variable


def _plain_attributes(attributes: Iterable[Any]) -> list[Hashable]:
    plain = hooks.PLAIN_TYPES
    return [value for value in attributes if type(value) in plain]


def weights_sample(model: PreTrainedModel) -> Hashable:
    """Some values of every weight and buffer, with its name, shape, dtype and device: equal for copies of a model.

    Another training of the same architecture has other values: what one of them computes proves nothing for the other.
    Where values cannot be read, as of offloaded weights, the sample is equal to no other.
    """
    device = compat.input_device(model)
    layouts: list[Hashable] = []
    samples: dict[torch.dtype, list[torch.Tensor]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor) not in (nn.Parameter, torch.Tensor) or tensor.is_meta or tensor.layout != torch.strided:
            return object()
        layouts.append((name, tensor.shape, tensor.dtype, tensor.device))
        flat = tensor.detach().view(-1) if tensor.is_contiguous() else tensor.detach()[:1].reshape(-1)
        step = max(1, len(flat) // SAMPLE)
        samples.setdefault(tensor.dtype, []).append(flat[: step * SAMPLE : step].to(device))
    # One conversion for all tensors of a dtype.
    values = [torch.cat(parts).double().cpu().numpy().tobytes() for parts in samples.values()]
    return type(model), tuple(layouts), tuple(values)


def matmul_precision(model: PreTrainedModel) -> torch.dtype:
    """The dtype of matrix products: the model's, unless `torch.autocast` casts their inputs."""
    device = compat.input_device(model).type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype


def graph_fingerprint(module: nn.Module) -> int:
    """A hash of what a captured pass depends on beside its inputs; not of what a hook or another object refers to.

    These are the addresses of weights and buffers, the precision of matrix products, and of each module the class, the
    hooks and plain attributes, such as which adapters are active.
    """
    tensors = [*module.parameters(), *module.buffers()]
    addresses = [(tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in tensors]
    precision = torch.get_float32_matmul_precision()
    attention = compat.attention_implementation(text_config(module)) if isinstance(module, PreTrainedModel) else ""
    return hash((precision, attention, tuple(addresses), tuple(map(_module_state, module.modules()))))


def _module_state(module: nn.Module) -> tuple[Any, ...]:
    attributes = hooks.own_attributes(module)
    names = attributes.keys() - STANDARD_ATTRIBUTES
    plain = [(name, repr(attributes[name])) for name in sorted(names) if hooks.is_plain(attributes[name])]
    registered = [tuple(hooks.foreign_hooks(attributes[name])) for name in ("_forward_hooks", "_forward_pre_hooks")]
    forward = attributes.get("forward")
    replaced = None if layer_of(forward) else id(forward)
    return id(module), type(module), module.training, replaced, *registered, tuple(plain)
