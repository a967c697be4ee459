"""`prepacked`: weights of linear layers on a CPU in the layout in which oneDNN multiplies them.

Source: oneDNN's documentation, "Memory format propagation"; PyTorch's inductor prepacks weights by the same operators.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_specgen.linear_layers import LinearLayer, is_replaceable, layer_of, matrix, restore
from hf_specgen.product_choice import is_same_output

PREPACKED_TOKENS = 8  # tokens of a verification pass, for which prepacked weights have to be the fastest

logger = logging.getLogger("hf_specgen")
_lock = threading.Lock()


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
    layers: list[LinearLayer] = []
    try:
        with _lock:
            layers += [layer for group in _groups(model) for layer in _prepacked_layers(group)]
            for layer in layers:
                layer.module.__dict__["forward"] = layer.forward
        yield
    finally:
        restore(layers)


def _groups(model: nn.Module) -> list[list[nn.Module]]:
    """The layers that can be prepacked, and are not, grouped by shape and dtype."""
    groups: dict[tuple[Any, ...], list[nn.Module]] = {}
    with_bfloat16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    dtypes = (torch.float32, torch.bfloat16) if with_bfloat16 else (torch.float32,)
    for module in model.modules():
        if is_replaceable(module, *dtypes):
            weight = matrix(module)
            groups.setdefault((*weight.shape, weight.dtype), []).append(module)
    if not groups and not any(layer_of(one.forward) for one in model.modules()):
        logger.warning_once(  # type: ignore[attr-defined]  # of Transformers
            f"prepacked() does nothing for {type(model).__name__}: it works with linear layers on a CPU, in float32 "
            "or, with AVX-512, in bfloat16"
        )
    return list(groups.values())


def _prepacked_layers(modules: Sequence[nn.Module]) -> list[LinearLayer]:
    """Layers of one shape with prepacked weights; none if that is slower."""
    weight = matrix(modules[0])
    key = (*weight.shape, weight.dtype, type(modules[0]), torch.get_num_threads())
    if _is_prepacked_faster.get(key) is False:
        return []
    reorder = torch.ops.mkldnn._reorder_linear_weight
    copies = [reorder(matrix(module).detach().contiguous(), PREPACKED_TOKENS) for module in modules]
    layers = [LinearLayer(module, copy) for module, copy in zip(modules, copies, strict=True)]
    if key not in _is_prepacked_faster:
        _is_prepacked_faster[key] = _is_faster(layers)
    return layers if _is_prepacked_faster[key] else []


_is_prepacked_faster: dict[tuple[Any, ...], bool] = {}
"""By shape, dtype and number of threads, whether prepacked weights were faster than the others."""


@torch.no_grad()
def _is_faster(layers: Sequence[LinearLayer]) -> bool:
    """Whether prepacked weights are the fastest for layers of one shape, and compute the same."""
    layers = layers[:8]  # several, since the weights of a whole model do not stay in the processor's cache
    weight = matrix(layers[0].module)
    x = torch.linspace(-1, 1, PREPACKED_TOKENS * weight.shape[1], dtype=weight.dtype).view(PREPACKED_TOKENS, -1)
    best = dict.fromkeys(layers[0].products, float("inf"))
    for _ in range(4):
        for product in best:
            began = time.perf_counter()
            for layer in layers:
                product(layer, x)
            best[product] = min(best[product], time.perf_counter() - began)
    is_same = is_same_output(layers[0].prepacked(x), layers[0].ordinary(x))
    return is_same and min(best, key=best.__getitem__) is LinearLayer.prepacked
