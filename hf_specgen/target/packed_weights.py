"""Packed weights: float32 linear layers on a CPU, with their weights prepacked in oneDNN's layout.

For a few tokens at a time PyTorch's float32 `linear` rearranges the whole weight matrix in every call: with 2 to 16
tokens it takes two to four times as long as with one. oneDNN multiplies with weights that were rearranged once. The
packed copy takes as much memory as the weights, and is kept as long as the model.

During a call the layers have an instance `forward`, which uses packed weights only in threads inside `packed_weights`.

Source: oneDNN's documentation, "Memory format propagation"; PyTorch's inductor packs low-precision weights alike.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import nn
from torch.nn.functional import linear

EXPECTED_TOKENS = 8
"""Tokens of a pass that the layout is chosen for: as fast as the best layout from 2 to 256 tokens, for one token a
third slower."""
SMALL_MATRIX = 2**20
"""Weights of a matrix below which one token is multiplied without packing: plain steps of a 16M target then take 13.8
instead of 14.4 ms. From two tokens on packed weights are faster for such matrices too."""
MAX_DIFFERENCE = 1e-4
"""Largest difference from an ordinary multiplication, relative to the largest result: accumulated float32 rounding is
about 1e-6."""
CHECKSUM_BLOCK = 64
"""Numbers of eight bytes that are summed up before their position counts: so a checksum takes as long as one sum."""

packed_layers: WeakValueDictionary[int, _PackedLayer] = WeakValueDictionary()
"""By the address of the weights."""
_models: WeakKeyDictionary[nn.Module, _PackedModel] = WeakKeyDictionary()
_lock, _packing = threading.Lock(), threading.Lock()


class _Scope(threading.local):
    """The models whose layers this thread has switched to packed weights; None outside of `packed_weights`."""

    models: list[_PackedModel] | None = None


_scope = _Scope()


class _PackedLayer:
    """The `forward` of one linear layer while a call with packed weights runs.

    Args:
        module: the layer.

    Raises:
        ValueError: if the packed weights compute something else than the layer.
    """

    def __init__(self, module: nn.Linear):
        self.module = module
        self._of: tuple[int, int, int] | None = None
        self._is_small = module.weight.numel() < SMALL_MATRIX
        self.refresh()
        x = torch.ones(2, module.in_features, dtype=module.weight.dtype, device=module.weight.device)
        ordinary, packed = linear(x, module.weight), self.linear(x, module.weight, None)
        limit = MAX_DIFFERENCE * max(1.0, ordinary.abs().max().item())
        if ordinary.isfinite().all() and not (ordinary - packed).abs().max() <= limit:
            raise ValueError(f"packed weights of {module} compute something else; leave pack_weights=True out")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or _scope.models is None:
            return linear(x, self.module.weight, self.module.bias)
        return self.linear(x, self.module.weight, self.module.bias)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x @ weight.T + bias`."""
        if torch.is_grad_enabled() or x.dtype != torch.float32 or (self._is_small and x.numel() == weight.shape[1]):
            return linear(x, weight, bias)
        multiply = torch.ops.mkldnn._linear_pointwise.default
        return cast(torch.Tensor, multiply(x, self._packed, bias, "none", [], ""))

    def has(self, weight: torch.Tensor) -> bool:
        """Whether this is the matrix that was packed, and not a part of it or another one at the same address."""
        own = self.module.weight
        return own.data_ptr() == weight.data_ptr() and own.shape == weight.shape and own.stride() == weight.stride()

    def __reduce__(self) -> Any:
        """A model that is copied or pickled while a call runs gets the ordinary `forward`."""
        return getattr, (self.module, "forward")

    def refresh(self) -> None:
        """Pack the weights if they are others than those that were packed.

        Values are compared by a checksum too: PEFT merges adapters into `weight.data`, which the version does not show.
        """
        weight = self.module.weight.detach()
        of = weight.data_ptr(), 0 if weight.is_inference() else weight._version, _checksum(weight)
        if of == self._of:
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED_TOKENS)
        self._of = of
        packed_layers[weight.data_ptr()] = self


class _PackedModel:
    """The packed layers of a model, and how many calls run with them."""

    def __init__(self, model: nn.Module):
        self.model = ref(model)
        self._layers: dict[nn.Linear, _PackedLayer] = {}
        self._switched: list[_PackedLayer] = []
        self._calls = 0
        self._refreshing = threading.Lock()
        self.refresh()

    def refresh(self) -> None:
        """Pack what has changed since the last call; comparing takes half as long as a forward pass over one token."""
        modules = [cast(nn.Linear, one) for one in cast(nn.Module, self.model()).modules() if is_packable(one)]
        with self._refreshing:
            layers = {module: self._layers.get(module) or _PackedLayer(module) for module in modules}
            for layer in layers.values():
                layer.refresh()
            self._layers = layers

    def switch_on(self) -> None:
        """Give the layers their packed `forward`, unless another call has."""
        with _lock:
            self._calls += 1
            if self._calls == 1:
                # An instance `forward` belongs to a hook, as of accelerate; a copied model has its class's own there.
                self._switched = [one for module, one in self._layers.items() if _has_own_forward(module)]
                for layer in self._switched:
                    layer.module.__dict__["forward"] = layer

    def switch_off(self) -> None:
        """Restore the class's `forward` when the last call ends."""
        with _lock:
            self._calls -= 1
            for layer in self._switched if self._calls == 0 else ():
                if vars(layer.module).get("forward") is layer:
                    del layer.module.__dict__["forward"]


def is_packable(module: nn.Module) -> bool:
    """Whether a module is a linear layer whose weights can be packed."""
    if type(module) is not nn.Linear or not torch.backends.mkldnn.is_available():
        return False
    weight = module._parameters.get("weight")  # pruning computes it anew in every pass
    return type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.dtype == torch.float32


def _has_own_forward(module: nn.Linear) -> bool:
    """Whether the layer computes what its class does."""
    given = vars(module).get("forward")
    return given is None or given == nn.Linear.forward.__get__(module)


def _checksum(weight: torch.Tensor) -> int:
    """Sums of the weights' bits in blocks, times odd numbers, modulo 2**64: half the time of multiplying with them.

    Weights that change places within a block have the same checksum; PyTorch's version shows those, except through
    `weight.data`.
    """
    flat = weight.reshape(-1)
    flat = flat.clone() if flat.storage_offset() % 2 else flat  # int64 views need an even storage offset
    numbers = flat[: len(flat) // 2 * 2].view(torch.int64)
    whole = numbers[: len(numbers) // CHECKSUM_BLOCK * CHECKSUM_BLOCK].view(-1, CHECKSUM_BLOCK).sum(dim=1)
    rest = numbers[len(whole) * CHECKSUM_BLOCK :].sum() + flat[2 * len(numbers) :].view(torch.int32).sum()
    return int((whole * (2 * torch.arange(len(whole)) + 1)).sum() - rest)


def check_packable(model: nn.Module) -> None:
    """Raise unless some weights of the model can be packed.

    Raises:
        ValueError: if none can.
    """
    if any(map(is_packable, model.modules())):
        return
    kinds = sorted({f"{one.dtype} on {one.device}".removeprefix("torch.") for one in model.parameters()})
    raise ValueError(
        f"pack_weights=True works with float32 linear layers on a CPU; {type(model).__name__} has none (its weights: "
        f"{', '.join(kinds)}); leave it out"
    )


@contextmanager
def packed_weights(enabled: bool) -> Iterator[None]:
    """In this context the forward passes of this thread use the packed weights of all models given to `pack`.

    Args:
        enabled: False for a context that does nothing.
    """
    if not enabled:
        yield
        return
    before, _scope.models = _scope.models, []
    try:
        yield
    finally:
        for packed in _scope.models:
            packed.switch_off()
        _scope.models = before


def pack(model: nn.Module) -> None:
    """Use packed weights for a model's linear layers until the end of this thread's `packed_weights`, if it is in one.

    The weights are packed when this is first called for the model.
    """
    if _scope.models is None or any(packed.model() is model for packed in _scope.models):
        return
    packed = packed_model(model)
    packed.switch_on()
    _scope.models.append(packed)


def packed_model(model: nn.Module) -> _PackedModel:
    """The packed layers of a model, with its present weights."""
    with _packing:
        found = _models.get(model)
        if found is None:
            found = _models[model] = _PackedModel(model)
            return found
    found.refresh()
    return found
