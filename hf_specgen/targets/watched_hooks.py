"""Finds hooks and replaced functions of users that change results and keep a state of their own between passes."""

from __future__ import annotations

import dis
import functools
import itertools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specgen.targets.hooks import (
    changes,
    foreign_hooks,
    function_state,
    is_of_training_library,
    own_attributes,
    replaced_forward,
)


class WatchedHooks:
    """In this context, a model's hooks that are not this package's, and its replaced `forward`s, are watched.

    Attributes:
        has_stateful_hook: afterwards, whether a function was found that changed the results of its module, or may do
            so in a later pass, as it has a statement that returns a result; and that refers to plain values which it
            changed itself, or another hook between two of its calls.
    """

    def __init__(self, model: PreTrainedModel):
        self.has_stateful_hook = False
        self._watched: list[tuple[dict[Any, Any], Any, Callable[..., Any]]] = []  # where each function is, and itself
        for module in model.modules():
            for registry in (module._forward_hooks, module._forward_pre_hooks):
                self._watched += [(registry, number, hook) for number, hook in foreign_hooks(registry).items()]
            forward = replaced_forward(module)
            if forward is not None and not is_of_training_library(forward):  # which keeps no state
                self._watched.append((own_attributes(module), "forward", forward))

    def __enter__(self) -> WatchedHooks:
        for registry, key, function in self._watched:
            registry[key] = self._watching(function, returns_value=_may_return_a_value(function))
        return self

    def __exit__(self, *exception: object) -> None:
        for registry, key, function in self._watched:
            if key in registry:  # a hook may have removed itself
                registry[key] = function

    def _watching(self, function: Callable[..., Any], returns_value: bool) -> Callable[..., Any]:
        after_last_call: tuple[Hashable, ...] | None = None

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal after_last_call
            state = function_state(function)
            versions = _versions((args, kwargs))
            result = function(*args, **kwargs)
            after = function_state(function)
            has_changed_results = result is not None or _versions((args, kwargs)) != versions
            # Added values are records, such as the shapes of all passes.
            has_changed_values = any(change.replaces_value for change in changes(after_last_call or state, after))
            after_last_call = after
            may_change_results = has_changed_results or returns_value
            if (after != state and has_changed_results) or (has_changed_values and may_change_results):
                self.has_stateful_hook = True
            return result

        call.__module__ = getattr(function, "__module__", None) or ""  # a user's, also for other threads
        return call


def _may_return_a_value(function: Any) -> bool:
    """Whether a function has a return statement with anything but None."""
    if isinstance(function, functools.partial):
        return _may_return_a_value(function.func)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None:
        code = getattr(type(function).__call__, "__code__", None)
    if code is None:  # not written in Python
        return True
    for before, instruction in itertools.pairwise(dis.get_instructions(code)):
        if instruction.opname == "RETURN_CONST" and instruction.argval is not None:
            return True
        returns_none = before.opname == "LOAD_CONST" and before.argval is None and not instruction.is_jump_target
        if instruction.opname == "RETURN_VALUE" and not returns_none:
            return True
    return False


def _versions(value: Any) -> list[int]:
    """How often each tensor in nested collections was changed in place."""
    if isinstance(value, torch.Tensor):
        return [] if value.is_inference() else [value._version]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [version for element in values for version in _versions(element)]
