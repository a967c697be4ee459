"""Passes over several tokens for Mamba layers whose scan over them computes something else than one token at a time.

| layer | its scan over several tokens | so a pass over a draft |
|---|---|---|
| Mamba-1 | begins at an empty state | gives it the tokens one after the other |
| Mamba-2 with a limit of the time step | limits the time step, unlike passes over one token | lifts the limit |

Attention and all other layers read the tokens of a pass together::

    pass    attention   a b c d        one call
            Mamba-1     a, b, c, d     four calls, each continues the state of the one before
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from hf_specgen.targets.cache import RaggedCache
from hf_specgen.targets.hooks import own_attributes, thread_hooks
from hf_specgen.targets.model_parts import sharing_copy

SCAN = "mamba_selective_scan"
"""The function of Transformers, in a model's own file, that takes no initial state."""
LIMIT = "time_step_limit"
"""The attribute of Mamba-2 layers with the lowest and the highest time step, which their scan alone reads."""
NO_LIMIT = (0.0, math.inf)


def scanning_layers(model: nn.Module) -> list[Any]:
    """The layers of a model that this file is about."""
    mixers = [module for module in model.modules() if type(module).__name__.endswith("Mixer")]
    return [layer for layer in mixers if hasattr(inspect.getmodule(type(layer)), SCAN) or _has_limit(layer)]


def _has_limit(layer: Any) -> bool:
    return tuple(getattr(layer, LIMIT, NO_LIMIT)) != NO_LIMIT


def _without_limit(layer: Any) -> Any:
    """A Mamba-2 layer with the same weights, whose scan computes what passes over one token do.

    None for another layer, and where another library has replaced the layer's `forward`, which a copy would not have.
    """
    if not _has_limit(layer) or "forward" in own_attributes(layer):
        return None
    unlimited = sharing_copy(layer)
    setattr(unlimited, LIMIT, NO_LIMIT)
    return unlimited


@contextmanager
def stepped(layers: Sequence[Any], cache: RaggedCache) -> Iterator[None]:
    """In this context, layers that have a state in the cache process this thread's passes as in the table."""
    with ExitStack() as stack:
        for layer in layers:
            steps = _Steps(layer, cache)
            stack.enter_context(thread_hooks([layer], steps.before, steps.after))
        yield


class _Steps:
    """The pre-hook of a layer reads all tokens of a pass but the last; the hook puts their outputs before the last one.

    For the cache they are one pass, which is rolled back as a whole.
    """

    def __init__(self, layer: Any, cache: RaggedCache):
        self._layer = layer
        self._unlimited = _without_limit(layer)
        self._states = cache.layer_states(layer.layer_idx)
        self._outputs: list[torch.Tensor] = []

    def before(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Read the first tokens; returns the arguments for the last one."""
        tokens: torch.Tensor = args[0] if args else kwargs["hidden_states"]
        if tokens.shape[1] == 1 or not self._states.recurrent:
            return None
        self._start = self._states.present
        *first, last = tokens.split(1, dim=1) if self._unlimited is None else (tokens[:, :-1], tokens[:, -1:])
        for part in first:
            arguments, keywords = _with_states(part, args, kwargs)
            self._outputs.append((self._unlimited or self._layer).forward(*arguments, **keywords))
        return _with_states(last, args, kwargs)

    def after(self, layer: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
        """The outputs of all tokens."""
        if not self._outputs:
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
