"""Hooks and replaced functions of users: which ones a model has, and the settings that they refer to.

Hooks of this package are registered during a pass by `thread_hooks`, and are none of these.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MemberDescriptorType
from typing import Any, NamedTuple

from torch import nn

from hf_specgen import compat
from hf_specgen.linear_layers import layer_of
from hf_specgen.targets.attention import registered_attention

PLAIN_TYPES = frozenset((bool, int, float, str, type(None)))
SETTING_TYPES = PLAIN_TYPES | {list, tuple}
LIBRARIES = ("torch", "transformers", "transformers_modules", "peft", "accelerate", "builtins", "hf_specgen")
"""Packages whose modules have their settings in plain attributes, and whose functions refer to no other settings."""
OWN_CLASSES = ("torch", "transformers", "peft")
"""Packages whose modules keep nothing that they compute in a pass."""
QUANTIZERS = ("bitsandbytes", "torchao", "compressed_tensors", "gptqmodel", "auto_gptq", "awq", "hqq", "optimum")
"""Packages of quantised layers, which treat each row alike."""
TRAINERS = ("accelerate", "trl")
"""Packages whose hooks and replaced `forward`s move tensors, or compute what training needs, of all rows alike."""
MAX_VALUES = 64
"""Values that are read of a hook's variables; a longer collection holds recorded data, and no settings."""


@contextmanager
def thread_hooks(
    modules: Iterable[nn.Module],
    before: Callable[[Any, Any, Any], Any] | None = None,
    after: Callable[[Any, Any, Any, Any], Any] | None = None,
) -> Iterator[None]:
    """In this context, modules call hooks of PyTorch in the passes of this thread, and of no other.

    Args:
        before: receives the module, its arguments and its keywords; what it returns replaces these.
        after: receives the output too, and may replace it.
    """
    thread = threading.get_ident()

    def of_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
        # PyTorch leaves out the keywords of a hook that another thread is just adding or removing.
        return lambda *arguments: hook(*arguments) if threading.get_ident() == thread else None

    handles: list[Any] = []
    try:
        for module in modules:
            # Each in one statement, so that Ctrl-C leaves no hook without its handle.
            if before is not None:
                handles.append(module.register_forward_pre_hook(of_thread(before), with_kwargs=True))
            if after is not None:
                handles.append(module.register_forward_hook(of_thread(after), with_kwargs=True))
        yield
    finally:
        try:
            _remove(handles)
        except BaseException:  # Ctrl-C in between
            _remove(handles)
            raise


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def changed_functions(module: nn.Module) -> Iterator[Any]:
    """The hooks of a module, and its `forward` if it is not that of its class; not those of this package."""
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        yield from foreign_hooks(getattr(module, name)).values()
    forward = replaced_forward(module)
    if forward is not None:
        yield forward


def replaced_forward(module: nn.Module) -> Any:
    """The `forward` of a module that is neither that of its class nor of this package; None if there is none.

    This package replaces that of linear layers during a pass, which may run in another thread.
    """
    forward = own_attributes(module).get("forward")
    is_replaced = forward is not None and layer_of(forward) is None and not _is_of_class(forward, module)
    return forward if is_replaced else None


def _is_of_class(forward: Any, module: nn.Module) -> bool:
    """Whether a `forward` is that of the module's class, which Accelerate puts back without its decorators."""
    if getattr(forward, "__self__", None) is not module:
        return False
    function: Any = type(module).forward
    while function is not forward.__func__ and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function is forward.__func__


def foreign_hooks(hooks: Mapping[int, Any]) -> dict[int, Any]:
    """The hooks that are not this package's, whose own are registered during a pass."""
    package = package_of(__name__)
    return {
        number: hook for number, hook in hooks.items() if package_of(str(getattr(hook, "__module__", ""))) != package
    }


def treats_rows_alike(model: nn.Module) -> bool:
    """Whether a model has no hook, function or class of a user, which may hold something for each row."""
    packages = {*LIBRARIES, *QUANTIZERS}
    for module in model.modules():
        is_changed = not all(map(is_of_training_library, changed_functions(module)))
        sources = {package_of(type(module).__module__), package_of(getattr(type(module).forward, "__module__", ""))}
        if is_changed or not sources <= packages:
            return False
    return not compat.global_hooks() and package_of(getattr(_attention(model), "__module__", "")) in packages


def may_keep_results(model: nn.Module, any_class: bool) -> bool:
    """Whether a hook or replaced `forward` may keep what it computes; with `any_class` also a class of others."""
    if any_class and any(package_of(type(module).__module__) not in OWN_CLASSES for module in model.modules()):
        return True
    return any(True for module in model.modules() for _ in changed_functions(module))


def _attention(model: nn.Module) -> Any:
    """The registered attention function of a model; something of this package if it has none."""
    config = getattr(model, "config", None)
    implementation = None if config is None else compat.attention_implementation(config.get_text_config())
    return registered_attention(implementation or "") or registered_attention


def is_of_training_library(function: Any) -> bool:
    """Whether a hook or replaced `forward` is of a library whose functions do the same to all rows."""
    function = getattr(function, "func", function)  # of a partial function
    function = getattr(function, "__func__", function)  # of a bound method
    defined_in = getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", "")
    return package_of(str(defined_in)) in TRAINERS


def function_state(function: Any) -> tuple[Hashable, ...]:
    """The identity of a function, and the plain values in each variable, attribute and global that it refers to.

    So a hook that is switched by a variable has another state afterwards.
    """
    return (_reference(function), *values_by_variable(_variables(function)))


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
        return type(function), id(function)
    return reference


def _variables(function: Any, depth: int = 2) -> list[Any]:
    """The objects that a function, a bound method, a partial or a callable object refers to; none of a library's.

    Of functions among them also the objects that these refer to, `depth` times.
    """
    if isinstance(function, functools.partial):
        return [*function.args, function.keywords, *_variables(function.func, depth)]
    if hasattr(function, "__func__"):
        return [attributes_with_class(function.__self__), *_variables(function.__func__, depth)]
    if not hasattr(function, "__code__"):
        call = type(function).__call__
        return [attributes_with_class(function), *(_variables(call, depth) if hasattr(call, "__code__") else ())]
    if package_of(function.__globals__.get("__name__", "")) in LIBRARIES:
        return []
    # None for what is not defined yet, so that a later value moves no value of other variables.
    cells = map(_contents, function.__closure__ or ())
    global_values = map(function.__globals__.get, function.__code__.co_names)
    objects = [*cells, *(function.__defaults__ or ()), function.__kwdefaults__ or {}, *global_values]
    functions = [value for value in objects if hasattr(value, "__code__") or hasattr(value, "__func__")]
    for inner in functions if depth else ():
        objects += _variables(inner, depth - 1)
    return objects


def _contents(cell: Any) -> Any:
    """The value of a closure variable; None if it has none."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def own_attributes(instance: Any) -> dict[str, Any]:
    """The instance attributes of an object, not those of its class."""
    attributes: dict[str, Any] = getattr(instance, "__dict__", {})
    return attributes


def class_attributes(instance_class: type) -> dict[str, Any]:
    """The plain values, and the descriptors of slots, of a class and its base classes; none of a library's."""
    attributes: dict[str, Any] = {}
    for owner in reversed(instance_class.__mro__):
        if package_of(owner.__module__) not in LIBRARIES:
            found = owner.__dict__.items()
            attributes |= {name: value for name, value in found if not name.startswith("__") and _is_setting(value)}
    return attributes


def _is_setting(value: Any) -> bool:
    return isinstance(value, MemberDescriptorType) or is_plain(value)


def attributes_with_class(instance: Any) -> dict[str, Any]:
    """The attributes of an object: those of its class, see `class_attributes`, its slots, and its own."""
    attributes = class_attributes(type(instance))
    for name, value in attributes.items():
        if isinstance(value, MemberDescriptorType):
            attributes[name] = getattr(instance, name, None)
    return attributes | own_attributes(instance)


def plain_values(variables: Iterable[Any], limit: int | None = MAX_VALUES) -> list[Hashable]:
    """The plain values among variables and in the collections and objects among them, in order."""
    values: list[Hashable] = []
    for variable in variables:
        if type(variable) in PLAIN_TYPES:
            values.append(variable)
        elif isinstance(variable, dict | list | tuple | set | deque):
            elements = variable.values() if isinstance(variable, dict) else variable
            if limit is None or len(elements) <= limit:
                plain = [value if type(value) in PLAIN_TYPES else _text_of_element(value) for value in elements]
                values += [frozenset(plain)] if isinstance(variable, set) else plain  # a set has no order
        elif package_of(type(variable).__module__) not in LIBRARIES:
            values += [value for value in attributes_with_class(variable).values() if type(value) in PLAIN_TYPES]
    return values


def _text_of_element(value: Any) -> str | None:
    """A collection of plain values, or the plain attributes of a user's object, as text; None for any other."""
    if isinstance(value, dict | list | tuple | set | deque) or package_of(type(value).__module__) in LIBRARIES:
        return text_of(value)
    plain = {name: one for name, one in attributes_with_class(value).items() if type(one) in PLAIN_TYPES}
    return repr(plain) if plain else None


def values_by_variable(variables: Iterable[Any]) -> list[Hashable]:
    """The plain values in each variable: itself, or a tuple of those in a collection or object, see `plain_values`.

    So a collection that grows changes no place of the values of other variables.
    """
    return [one if type(one) in PLAIN_TYPES else tuple(plain_values([one])) for one in variables]


Place = tuple[int, ...]
"""Indices into nested tuples, from the outside in; `~n` as the last one stands for all values from index n on."""


class Change(NamedTuple):
    """A place where nested tuples differ."""

    place: Place
    replaces_value: bool  # if not, values were added or removed
    is_plain: bool  # plain values alone differ: no class, function, or number of variables


def changes(before: Hashable, after: Hashable, place: Place = ()) -> Iterator[Change]:
    """Where nested tuples differ. Of collections of plain values the common indices are compared one by one."""
    if before is after:
        return
    if isinstance(before, tuple) and isinstance(after, tuple):
        is_same_length = len(before) == len(after)
        is_plain = all(type(value) in PLAIN_TYPES for value in (*before, *after))
        if is_same_length or is_plain:
            for index, (one, other) in enumerate(zip(before, after, strict=False)):
                yield from changes(one, other, (*place, index))
        if not is_same_length:
            end = (~min(len(before), len(after)),) if is_plain else ()
            yield Change((*place, *end), False, is_plain)
    elif isinstance(before, frozenset) and isinstance(after, frozenset):
        if before != after:
            is_plain = all(type(value) in PLAIN_TYPES for value in before | after)
            yield Change(place, not before <= after, is_plain)
    elif before != after:  # NaN is itself, as in a comparison of tuples
        yield Change(place, True, type(before) in PLAIN_TYPES and type(after) in PLAIN_TYPES)


def without_places(values: Hashable, places: Iterable[Place]) -> Hashable:
    """Nested tuples without the values in these places; a value that is no tuple any more as it is."""
    if not isinstance(values, tuple):
        return values
    inner: dict[int, list[Place]] = {}
    for index, *rest in places:
        inner.setdefault(index, []).append(tuple(rest))
    end = min((~index for index in inner if index < 0), default=len(values))
    return tuple(
        value if index not in inner else without_places(value, inner[index])
        for index, value in enumerate(values[:end])
        if () not in inner.get(index, ())
    )


def text_of(value: Any) -> str | None:
    """A plain value, or a collection of plain values, as text; None for any other."""
    return repr(value) if is_plain(value) else None


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a string, None, or a collection of such values."""
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    if isinstance(value, list | tuple | set | deque):
        return all(map(is_plain, value))
    return type(value) in PLAIN_TYPES


def package_of(module_name: str) -> str:
    """The package of a module, by their names."""
    return module_name.partition(".")[0]
