"""What the forward passes of a model depend on, as values that are equal as long as nothing has changed.

`computation` belongs to the result of a self-check: whatever may change between two calls and alter how a token's
scores depend on the other tokens of a pass. `graph_fingerprint` belongs to captured passes: they refer to addresses of
tensors too.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specgen import compat
from hf_specgen.targets.attention import registered_attention
from hf_specgen.targets.model_parts import text_config

STANDARD_ATTRIBUTES = tuple(vars(nn.Module()))
"""Attributes of every module, which its constructor makes before all others: its parts and its hooks."""
PLAIN_TYPES = frozenset((bool, int, float, str, type(None)))
SETTING_TYPES = PLAIN_TYPES | {list, tuple}
LIBRARIES = ("torch", "transformers", "transformers_modules", "peft", "accelerate", "builtins", "hf_specgen")
"""Packages whose modules have their settings in plain attributes, and whose functions refer to no other settings."""
MAX_VALUES = 64
"""Values that are read of a hook's variables; a longer collection holds recorded data, and no settings."""


def computation(model: PreTrainedModel) -> tuple[Hashable, ...]:
    """What the computation of a model depends on beside its weights, their dtype and their device.

    These are the classes of its modules, their hooks, replaced `forward`s and plain attributes, the config, and the
    attention function. Of hooks and replaced functions also the settings that they refer to, see `function_state`. A
    module visited in the same place, of the same class and with the same attributes, computes the same.
    """
    values: list[Hashable] = [compat.global_hooks()]
    skipped = len(STANDARD_ATTRIBUTES)
    settings_of_class: dict[type[nn.Module], Callable[[Iterable[Any]], list[Hashable]]] = {}
    modules: list[Any] = [model]
    visited: set[int] = set()
    while modules:
        module = modules.pop()
        if id(module) in visited:
            continue
        visited.add(id(module))
        attributes = module.__dict__
        module_class = module.__class__
        settings = settings_of_class.get(module_class)
        if settings is None:
            settings = settings_of_class[module_class] = _settings_reader(module_class)
        values += (module_class, attributes["training"])
        values += settings(islice(attributes.values(), skipped, None))
        if attributes["_forward_hooks"] or attributes["_forward_pre_hooks"] or "forward" in attributes:
            for function in changed_functions(module):
                values += function_state(function)
        if attributes["_modules"]:
            modules += filter(None, attributes["_modules"].values())
    # Functions of a class may be replaced for all its modules, as kernel libraries do.
    values.append(frozenset((module_class, module_class.forward) for module_class in settings_of_class))
    config = text_config(model)
    implementation = compat.attention_implementation(config)
    values += (implementation, *function_state(registered_attention(implementation)))
    values += _plain_values([vars(model.config), vars(config)], limit=None)
    return tuple(values)


def _settings_reader(module_class: type[nn.Module]) -> Callable[[Iterable[Any]], list[Hashable]]:
    """What reads the settings among the attributes of modules of a class; lists only where they are settings."""
    package = _package(module_class.__module__)
    if package == "peft":  # active and merged adapters
        return lambda attributes: [_text(value) for value in attributes if type(value) in SETTING_TYPES]
    return _plain_attributes if package in LIBRARIES else _plain_values


def _plain_attributes(attributes: Iterable[Any]) -> list[Hashable]:
    return [value for value in attributes if type(value) in PLAIN_TYPES]


def changed_functions(module: nn.Module) -> Iterator[Any]:
    """The hooks of a module that are not this package's, and its `forward` if it is not that of its class."""
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        yield from foreign_hooks(getattr(module, name)).values()
    if "forward" in vars(module):
        yield vars(module)["forward"]


def treats_rows_alike(model: nn.Module) -> bool:
    """Whether a model has no hook, replaced `forward` or class of a user, which may hold something for each row."""
    for module in model.modules():
        functions = (getattr(function, "func", function) for function in changed_functions(module))
        is_changed = any(_package(getattr(function, "__module__", "")) != "accelerate" for function in functions)
        if is_changed or _package(type(module).__module__) not in (*LIBRARIES, "bitsandbytes"):
            return False
    return not compat.global_hooks()


def foreign_hooks(hooks: Mapping[int, Any]) -> dict[int, Any]:
    """The hooks that are not this package's, whose own are registered during a pass."""
    package = _package(__name__)
    return {number: hook for number, hook in hooks.items() if _package(str(getattr(hook, "__module__", ""))) != package}


def _package(module_name: str) -> str:
    return module_name.partition(".")[0]


def function_state(function: Any) -> tuple[Hashable, ...]:
    """The identity of a function, and the plain values among the variables, attributes and globals that it refers to.

    So a hook that is switched by a variable has another state afterwards.
    """
    return (_reference(function), *_plain_values(_variables(function)))


def _reference(function: Any) -> Hashable:
    """A weak reference, which is equal to none of an object that takes its address later."""
    if isinstance(function, functools.partial):
        return _reference(function.func)
    if hasattr(function, "__func__"):  # bound methods are made anew each time
        return _reference(function.__func__), _reference(function.__self__)
    try:
        reference = weakref.ref(function)
        hash(reference)
    except TypeError:
        return id(function)
    return reference


def _variables(function: Any) -> list[Any]:
    """The objects that a function, a bound method, a partial or a callable object refers to; none of a library's."""
    if isinstance(function, functools.partial):
        return [*function.args, function.keywords, *_variables(function.func)]
    if hasattr(function, "__func__"):
        return [_attributes(function.__self__), *_variables(function.__func__)]
    if not hasattr(function, "__code__"):
        return [_attributes(function)]
    if _package(function.__globals__.get("__name__", "")) in LIBRARIES:
        return []
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    names = function.__code__.co_names
    global_values = [function.__globals__[name] for name in names if name in function.__globals__]
    return [*cells, *(function.__defaults__ or ()), function.__kwdefaults__ or {}, *global_values]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _attributes(instance: Any) -> Any:
    return getattr(instance, "__dict__", {})


def _plain_values(variables: Iterable[Any], limit: int | None = MAX_VALUES) -> list[Hashable]:
    """The plain values among variables and in the collections and objects among them, in order."""
    values: list[Hashable] = []
    for variable in variables:
        if type(variable) in PLAIN_TYPES:
            values.append(variable)
        elif isinstance(variable, dict | list | tuple | set):
            elements = variable.values() if isinstance(variable, dict) else variable
            if limit is None or len(elements) <= limit:
                values += [value if type(value) in PLAIN_TYPES else _text(value) for value in elements]
        elif _package(type(variable).__module__) not in LIBRARIES:
            values += [value for value in _attributes(variable).values() if type(value) in PLAIN_TYPES]
    return values


def _text(value: Any) -> str | None:
    """A plain value, or a collection of plain values, as text; None for any other."""
    return repr(value) if _is_plain(value) else None


def graph_fingerprint(module: nn.Module) -> int:
    """A hash of what a captured pass depends on beside its inputs; not of what a hook or another object refers to.

    These are the addresses of weights and buffers, the precision of matrix products, and of each module the class, the
    hooks and plain attributes, such as which adapters are active.
    """
    tensors = [*module.parameters(), *module.buffers()]
    places = [(tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in tensors]
    precision = torch.get_float32_matmul_precision()
    attention = compat.attention_implementation(text_config(module)) if isinstance(module, PreTrainedModel) else ""
    return hash((precision, attention, tuple(places), tuple(map(_module_state, module.modules()))))


def _module_state(module: nn.Module) -> tuple[Any, ...]:
    attributes = vars(module)
    names = attributes.keys() - STANDARD_ATTRIBUTES
    plain = [(name, repr(attributes[name])) for name in sorted(names) if _is_plain(attributes[name])]
    hooks = [tuple(foreign_hooks(attributes[name])) for name in ("_forward_hooks", "_forward_pre_hooks")]
    return id(module), type(module), module.training, id(attributes.get("forward")), *hooks, tuple(plain)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    return type(value) in PLAIN_TYPES
