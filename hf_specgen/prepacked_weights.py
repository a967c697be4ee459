"""`with prepacked(model):` linear layers on a CPU use weights in oneDNN's layout, where that was timed to be faster.

PyTorch's `linear` may rearrange the whole weight matrix in every call, which takes longer than the product of a few
tokens. A matrix that was rearranged once does not need it. Whether that is faster depends on the machine, the dtype and
the shape of the matrix, so each shape is timed in both forms.

Source: oneDNN's documentation, "Memory format propagation"; PyTorch's inductor prepacks weights by the same operators.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

TOKENS = (1, 8)
"""Tokens of the passes that are timed: of a plain step, and of a verification step, which the layout is made for."""

logger = logging.getLogger("hf_specgen")
_lock = threading.Lock()
_decisions: dict[tuple[Any, ...], bool] = {}
"""By shape, dtype and number of threads, whether prepacked weights were faster."""


@contextmanager
def prepacked(model: nn.Module) -> Iterator[None]:
    """In this context the linear layers of a model use prepacked weights where these are faster, in any forward pass.

    For plain `generate` as for speculative decoding. It works on a CPU in float32 and, with AVX-512, in bfloat16;
    elsewhere it logs a warning and does nothing. Entering it copies and times the weights, which takes about a second
    per GiB, so one block should hold many calls; the copies take the memory of the weights again until it ends. Results
    differ by rounding only, as they do between batch sizes. Other threads that run the model meanwhile use the copies
    too. The outermost of nested blocks decides.

    The values of the weights must not be changed inside the block, as by training or by merging an adapter; the copies
    would not follow.

    Args:
        model: any module with `nn.Linear` layers, or `Conv1D` layers as in GPT-2.

    Raises:
        TypeError: if it is no module.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4))
        >>> with prepacked(model):
        ...     outputs = model(torch.ones(1, 4))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"prepacked takes a model, got {model!r}")
    layers: list[_PrepackedLayer] = []
    try:
        with _lock:
            layers += [layer for group in _groups(model) for layer in _prepacked_layers(group)]
            for layer in layers:
                # An instance attribute, which hooks and `Module.__call__` use as they use the method of the class.
                layer.module.forward = layer
        yield
    finally:
        for layer in layers:
            if layer.module.forward is layer:
                del layer.module.forward


class _PrepackedLayer:
    """The `forward` of one layer inside the context; `prepacked` are its weights in oneDNN's layout."""

    def __init__(self, module: nn.Module, prepacked: torch.Tensor):
        self.module = module
        self._prepacked = prepacked
        self._weight = module.weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        module = cast(Any, self.module)
        is_usable = x.dtype == self._weight.dtype and module.weight is self._weight and not torch.is_grad_enabled()
        if not is_usable or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
            return cast(torch.Tensor, type(module).forward(module, x))
        return self.multiply(x)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output, from the prepacked weights."""
        bias = cast(Any, self.module).bias
        product = torch.ops.mkldnn._linear_pointwise.default
        return cast(torch.Tensor, product(x, self._prepacked, bias, "none", [], ""))

    def __reduce__(self) -> Any:
        """A model that is copied or pickled inside the context gets the ordinary `forward`."""
        return getattr, (self.module, "forward")


def _groups(model: nn.Module) -> list[list[nn.Module]]:
    """The layers that can be prepacked, and are not, grouped by shape and dtype."""
    groups: dict[tuple[Any, ...], list[nn.Module]] = {}
    for module in model.modules():
        if _can_be_prepacked(module):
            weight = _matrix(module)
            groups.setdefault((*weight.shape, weight.dtype), []).append(module)
    if not groups and not any(isinstance(one.forward, _PrepackedLayer) for one in model.modules()):
        logger.warning_once(  # type: ignore[attr-defined]  # of Transformers
            f"prepacked() does nothing for {type(model).__name__}: it works with linear layers on a CPU, in float32 "
            "or, with AVX-512, in bfloat16"
        )
    return list(groups.values())


def _can_be_prepacked(module: nn.Module) -> bool:
    """Whether a module is a plain linear layer on a CPU, in a dtype that oneDNN multiplies on this machine."""
    if type(module) not in (nn.Linear, Conv1D) or not torch.backends.mkldnn.is_available():
        return False
    weight = module._parameters.get("weight")  # not there where pruning computes it anew in every pass
    if type(weight) is not nn.Parameter or weight.device.type != "cpu" or weight.layout is not torch.strided:
        return False
    # An instance `forward` belongs to somebody else, as of accelerate; in a copied model it is the class's own.
    if module.forward != type(module).forward.__get__(module):
        return False
    with_bfloat16 = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.numel() > 0 and (weight.dtype == torch.float32 or with_bfloat16)


def _matrix(module: nn.Module) -> torch.Tensor:
    """The weights of a layer, `[outputs, inputs]`."""
    weight = cast(torch.Tensor, module.weight).detach()
    return weight.t() if type(module) is Conv1D else weight


def _prepacked_layers(modules: Sequence[nn.Module]) -> list[_PrepackedLayer]:
    """Layers of one shape with prepacked weights; none if that is slower."""
    weight = _matrix(modules[0])
    key = (*weight.shape, weight.dtype, type(modules[0]), torch.get_num_threads())
    if _decisions.get(key) is False:
        return []
    reorder = torch.ops.mkldnn._reorder_linear_weight
    layers = [_PrepackedLayer(module, reorder(_matrix(module).contiguous(), TOKENS[-1])) for module in modules]
    if key not in _decisions:
        _decisions[key] = _is_faster(layers)
    return layers if _decisions[key] else []


@torch.no_grad()
def _is_faster(layers: Sequence[_PrepackedLayer]) -> bool:
    """Whether layers of one shape are faster with prepacked weights over both sizes, and compute the same.

    A single token may take at most 5% longer, as plain steps have one.
    """
    layers = layers[:8]  # several, since the weights of a whole model do not stay in the processor's cache
    weight = _matrix(layers[0].module)
    best = {(tokens, is_prepacked): float("inf") for tokens in TOKENS for is_prepacked in (False, True)}
    for _ in range(4):
        for tokens, is_prepacked in best:
            x = torch.linspace(-1, 1, tokens * weight.shape[1], dtype=weight.dtype).view(tokens, -1)
            began = time.perf_counter()
            for layer in layers:
                layer.multiply(x) if is_prepacked else type(layer.module).forward(layer.module, x)
            best[tokens, is_prepacked] = min(best[tokens, is_prepacked], time.perf_counter() - began)
    ordinary, ours = (sum(best[tokens, is_prepacked] for tokens in TOKENS) for is_prepacked in (False, True))
    expected = type(layers[0].module).forward(layers[0].module, x).float()
    is_same = (layers[0].multiply(x).float() - expected).norm() <= 0.02 * expected.norm()
    return bool(is_same) and ours < ordinary and best[1, True] <= 1.05 * best[1, False]
