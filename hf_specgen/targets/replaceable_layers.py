"""Replaces some layers of a model by modules that return their input, so that a forward pass runs the others only."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

IN_USE = (
    "another thread is running a part of this model's layers (LayerSkipCandidates); run calls with layer skip on one "
    "model one after the other, or use a candidate generator that may run in several threads"
)

_switching = threading.Lock()


class ReplaceableLayers:
    """The layers of a model, any of which can be left out of a pass.

    Args:
        layers: the model's own list. It is changed inside `replaced` only, and keeps its length, as some models look
            their settings up by a layer's index.
    """

    def __init__(self, layers: nn.ModuleList):
        self._layers = layers
        self._pass_through = [_PassThrough(layer) for layer in layers]

    @contextmanager
    def replaced(self, indices: range) -> Iterator[None]:
        """Inside, these layers return their input.

        Raises:
            RuntimeError: if another thread has replaced one of them.
        """
        with _switching:
            originals = [self._layers[index] for index in indices]
            if any(isinstance(layer, _PassThrough) for layer in originals):
                raise RuntimeError(IN_USE)
            for index in indices:
                self._pass_through[index].owner = threading.get_ident()
                self._layers[index] = self._pass_through[index]
        try:
            yield
        finally:
            for index, layer in zip(indices, originals, strict=True):
                self._layers[index] = layer

    def input_of(self, index: int) -> torch.Tensor:
        """The input of a replaced layer in the last pass."""
        state = self._pass_through[index].seen
        assert state is not None
        return state

    @contextmanager
    def detecting_output_type(self) -> Iterator[None]:
        """Inside, a pass of the model detects whether its layers return a tensor or a tuple."""

        def detect(module: nn.Module, args: Any, output: Any) -> None:
            for replacement in self._pass_through:
                replacement.returns_tuple = isinstance(output, tuple)

        handle = self._layers[0].register_forward_hook(detect)
        try:
            yield
        finally:
            handle.remove()


class _PassThrough(nn.Module):
    """Replaces a layer: returns its input, as a tensor or tuple like the layer; other attributes are the layer's."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        object.__setattr__(self, "layer", layer)
        self.returns_tuple = False
        self.seen: torch.Tensor | None = None
        self.owner = 0

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != self.owner:
            raise RuntimeError(IN_USE)
        self.seen = hidden_states
        return (hidden_states,) if self.returns_tuple else hidden_states

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "layer"), name)
