"""Packed weights: linear layers on a CPU, with their weights prepacked in oneDNN's layout.

PyTorch's `linear` rearranges the whole weight matrix in every call. For a few tokens that takes longer than the product
itself: with weights that were rearranged once, 2 to 16 tokens take a quarter to a half of the time in float32, and a
third to two thirds in bfloat16. The packed copy takes as much memory as the weights, and is kept as long as the model.

Which models of a call are packed is decided in `hf_specgen.targets.packing`.

During a call the layers have an instance `forward`, which uses packed weights only in the threads that asked for it.

Source: oneDNN's documentation, "Memory format propagation"; PyTorch's inductor packs low-precision weights alike.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary, ref

import torch
from torch import nn
from torch.nn.functional import linear

from hf_specgen.targets.checksum import checksum
from hf_specgen.targets.packable import is_packable

EXPECTED_TOKENS = 8
"""Tokens of a pass that the layout is chosen for: from 2 to 256 tokens it is as fast as the best layout, for one token
a third slower."""
SMALL_MATRIX = 2**20
"""Weights of a float32 matrix below which a single token takes the ordinary product: plain steps of a 16M target then
take 13.8 instead of 14.4 ms. From two tokens on packed weights are faster for such matrices too."""
MAX_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest difference from an ordinary product, relative to the norms of its factors: accumulated float32 rounding is
about 1e-6, a bfloat16 result may be rounded to either neighbour, 4e-3 away."""
logger = logging.getLogger("hf_specgen")
packed_layers: WeakValueDictionary[int, _PackedLayer] = WeakValueDictionary()
"""By the address of the weights."""
_models: WeakKeyDictionary[nn.Module, _PackedModel] = WeakKeyDictionary()
_changing: WeakSet[nn.Module] = WeakSet()
"""Models that are packed on request only: those that cannot be packed, and those whose weights have changed since they
were packed, as in training: packing them in every call takes longer than it saves."""
_lock, _packing = threading.Lock(), threading.Lock()


class _Scope(threading.local):
    """The models that this thread has switched to packed weights, and their layers; None outside `packed_weights`."""

    models: list[_PackedModel] | None = None
    layers: frozenset[nn.Module] = frozenset()


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
        weight = module.weight
        self._is_small = weight.dtype == torch.float32 and weight.numel() < SMALL_MATRIX
        self.refresh()
        x = torch.linspace(-1, 1, 2 * module.in_features, dtype=weight.dtype, device=weight.device).view(2, -1)
        with torch.no_grad():
            ordinary, packed = linear(x, weight), self.linear(x, weight, None)
            norms = torch.linalg.vector_norm(x, dim=1).max(), torch.linalg.vector_norm(weight, dim=1).max()
            limit = MAX_DIFFERENCE[x.dtype] * norms[0] * norms[1]
        if ordinary.isfinite().all() and not (ordinary - packed).abs().max() <= limit:
            raise ValueError(
                f"packed weights of {module} compute something else than the layer; leave pack_weights=True and "
                "compile=True out"
            )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or self.module not in _scope.layers:
            return linear(x, self.module.weight, self.module.bias)
        return self.linear(x, self.module.weight, self.module.bias)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x @ weight.T + bias`."""
        if torch.is_grad_enabled() or x.dtype != weight.dtype or torch.is_autocast_enabled("cpu"):
            return linear(x, weight, bias)
        if self._is_small and x.numel() == weight.shape[1]:
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

    def refresh(self, repack: bool = True) -> bool:
        """Pack the weights if they are others than those that were packed; returns whether they are packed.

        Values are compared by a checksum too: PEFT merges adapters into `weight.data`, which the version does not show.
        With `repack=False` weights with other values are left as they are.
        """
        weight = self.module.weight.detach()
        of = weight.data_ptr(), 0 if weight.is_inference() else weight._version, checksum(weight)
        if of != self._of:
            if not repack and self._of is not None and of[2] != self._of[2]:
                return False
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED_TOKENS)
            self._of = of
        packed_layers[weight.data_ptr()] = self
        return True


class _PackedModel:
    """The packed layers of a model, and how many calls run with them."""

    def __init__(self, model: nn.Module):
        self.model = ref(model)
        self._layers: dict[nn.Linear, _PackedLayer] = {}
        self._switched: list[_PackedLayer] = []
        self._calls = 0
        self._refreshing = threading.Lock()
        self.refresh()

    def refresh(self, repack: bool = True) -> bool:
        """Pack what has changed since the last call; comparing takes half as long as a forward pass over one token.

        With `repack=False` stops at the first layer that was packed and has changed, and returns False.
        """
        modules = [cast(nn.Linear, one) for one in cast(nn.Module, self.model()).modules() if is_packable(one)]
        with self._refreshing:
            if not all(self._layers[module].refresh(repack) for module in modules if module in self._layers):
                return False
            self._layers = {module: self._layers.get(module) or _layer(module) for module in modules}
        return True

    @property
    def layers(self) -> Set[nn.Module]:
        """The layers that were packed."""
        return self._layers.keys()

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


def _layer(module: nn.Linear) -> _PackedLayer:
    """The packed layer, shared by models that have the module in common."""
    found = packed_layers.get(module.weight.data_ptr())
    if found is None or found.module is not module:
        return _PackedLayer(module)
    found.refresh()
    return found


def _has_own_forward(module: nn.Linear) -> bool:
    """Whether the layer computes what its class does."""
    given = vars(module).get("forward")
    return given is None or given == nn.Linear.forward.__get__(module)


@contextmanager
def packed_weights() -> Iterator[None]:
    """In this context the forward passes of this thread use the packed weights of the models given to `pack`."""
    before = _scope.models, _scope.layers
    _scope.models, _scope.layers = [], frozenset()
    try:
        yield
    finally:
        for packed in _scope.models:
            packed.switch_off()
        _scope.models, _scope.layers = before


def pack(model: nn.Module, repack: bool = True) -> bool:
    """Use packed weights for a model's linear layers until the end of this thread's `packed_weights`, if it is in one.

    The weights are packed when this is first called for the model.

    Args:
        model: the model.
        repack: pack weights again that have changed since; if False, such a model runs with ordinary weights for good.

    Returns:
        whether packed weights are used.
    """
    if _scope.models is None:
        return False
    if not any(packed.model() is model for packed in _scope.models):
        packed = packed_model(model, repack)
        if packed is None:
            return False
        packed.switch_on()
        _scope.models.append(packed)
        _scope.layers = _scope.layers.union(packed.layers)
    return True


def runs_packed(module: nn.Module) -> bool:
    """Whether a layer runs with packed weights in this thread."""
    return module in _scope.layers


def packed_model(model: nn.Module, repack: bool = True) -> _PackedModel | None:
    """The packed layers of a model, with its present weights; None if they have changed and `repack` is False."""
    with _packing:
        if not repack and model in _changing:
            return None
        found = _models.get(model)
        if found is None:
            found = _models[model] = _PackedModel(model)
            return found
    if found.refresh(repack):
        return found
    logger.info("%s is not packed any more by default, as its weights change", type(model).__name__)
    leave_unpacked(model)
    return None


def leave_unpacked(model: nn.Module) -> None:
    """Free the packed weights of a model, and pack it on request only."""
    with _packing:
        _models.pop(model, None)
        _changing.add(model)
