"""Passes over several tokens for Mamba-1 layers, whose scan over more than one token begins at an empty state.

Such a layer continues its state in a pass over one token alone. So a pass over a draft gives these layers its tokens
one after the other, while attention and all other layers read them together::

    pass    attention   a b c d        one call
            Mamba-1     a, b, c, d     four calls, each continues the state of the one before
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from hf_specgen.targets.cache import RaggedCache

SCAN = "mamba_selective_scan"
"""The function of Transformers, in a model's own file, that takes no initial state."""


def scanning_layers(model: nn.Module) -> list[Any]:
    """The Mamba-1 layers of a model."""
    return [
        module
        for module in model.modules()
        if type(module).__name__.endswith("Mixer") and hasattr(inspect.getmodule(type(module)), SCAN)
    ]


@contextmanager
def stepped(layers: Sequence[Any], cache: RaggedCache) -> Iterator[None]:
    """In this context, layers that have a state in the cache read the tokens of this thread's passes one by one."""
    with ExitStack() as stack:
        for layer in layers:
            steps = _Steps(layer, cache)
            stack.callback(layer.register_forward_pre_hook(steps.before, with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(steps.after).remove)
        yield


class _Steps:
    """The pre-hook of a layer reads all tokens of a pass but the last; the hook puts their outputs before the last one.

    For the cache they are one pass, which is rolled back as a whole.
    """

    def __init__(self, layer: Any, cache: RaggedCache):
        self._layer = layer
        self._states = cache.layer_states(layer.layer_idx)
        self._start = self._states.present
        self._thread = threading.get_ident()
        self._outputs: list[torch.Tensor] = []

    def before(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Read the first tokens; returns the arguments for the last one."""
        tokens: torch.Tensor = args[0] if args else kwargs["hidden_states"]
        is_ours = threading.get_ident() == self._thread
        if not is_ours or tokens.shape[1] == 1 or not self._states.recurrent:
            return None
        self._start = self._states.present
        *first, last = tokens.split(1, dim=1)
        for token in first:
            arguments, keywords = _with_states(token, args, kwargs)
            self._outputs.append(self._layer.forward(*arguments, **keywords))
        return _with_states(last, args, kwargs)

    def after(self, layer: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """The outputs of all tokens."""
        if threading.get_ident() != self._thread or not self._outputs:
            return output
        self._states.begin_at(self._start)
        outputs = torch.cat([*self._outputs, output], dim=1)
        self._outputs.clear()
        return outputs


def _with_states(
    states: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a layer with other hidden states."""
    return ((states, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": states})
