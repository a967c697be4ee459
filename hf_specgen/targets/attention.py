"""Attention kernels of verification steps: grouped-query attention without copies, and none of cuDNN on a GPU.

In grouped-query attention `groups` query heads share one key/value head. Given a mask, Transformers' SDPA function
first copies keys and values once per query head. Here the heads of a group are folded into the query length instead::

    query   [batch, kv_heads * groups, queries, head_dim]  ->  [batch, kv_heads, groups * queries, head_dim]
    mask    [batch, 1, queries, keys]                      ->  [batch, 1, groups * queries, keys]

The function registered as "sdpa" in the attention interface is wrapped once; the wrapper calls Transformers' own
function unless the calling thread is inside `grouped_attention`.

Source: Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models" (2023), section 2.2.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

UNSUPPORTED_ARGUMENTS = {"softcap", "s_aux", "position_bias", "cache"}
"""Arguments that change the scores (soft cap, attention sinks, biases), and the paged cache: left to Transformers."""

FoldedMasks = dict[tuple[int, int, torch.dtype], tuple[torch.Tensor, torch.Tensor]]


_folded_masks: ContextVar[FoldedMasks | None] = ContextVar("hf_specgen_folded_masks", default=None)
"""Folded masks of the current step by mask id, groups and dtype, with the mask, so that its id is not reused.

Of this thread; None outside `grouped_attention`.
"""
_interface = AttentionInterface()


class grouped_attention:
    """Use grouped attention in the forward passes of this thread, in layers of SDPA models where it applies.

    Masks must not be changed in place between two layers: each is folded once for all layers that get the same tensor.
    A function that another library has registered under "sdpa" is left alone. A class is faster than a generator.
    """

    def __enter__(self) -> None:
        # For good: without any function, another thread would get the eager one.
        if _interface.get("sdpa") is sdpa_attention_forward:
            AttentionInterface.register("sdpa", _sdpa_attention)
        self._token = _folded_masks.set({})

    def __exit__(self, *exception: object) -> None:
        _folded_masks.reset(self._token)


def registered_attention(implementation: str) -> Any:
    """The function that layers with this implementation call: Transformers' own for this package's wrapper of it."""
    function = _interface.get(implementation)
    return sdpa_attention_forward if function is _sdpa_attention else function


def grouped_sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float | None = None
) -> torch.Tensor:
    """SDPA of `[batch, heads, queries, head_dim]` with a mask of `fold_mask`; `[batch, queries, heads, value_dim]`."""
    batch, heads, queries, head_dim = query.shape
    kv_heads = key.shape[1]
    folded = query.reshape(batch, kv_heads, heads // kv_heads * queries, head_dim)
    output = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(batch, heads, queries, value.shape[-1]).transpose(1, 2).contiguous()


def fold_mask(mask: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """`[batch or 1, 1, groups * queries, keys]` numbers to add to the scores, which SDPA would make in every layer."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), -math.inf)
    keys = mask.shape[-1]
    if mask.is_cuda and keys % 8:  # where rows do not begin at multiples of 8, SDPA copies the mask in every layer
        mask = pad(mask, (0, -keys % 8), value=-math.inf)
    return torch.cat([mask] * groups, dim=2)[..., :keys]


@wraps(sdpa_attention_forward)
def _sdpa_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`grouped_sdpa` inside `grouped_attention` where it applies, else (and in compiled models) Transformers' own."""
    folded_masks = None if torch.compiler.is_compiling() else _folded_masks.get()
    if folded_masks is None or args or not _is_foldable(module, query, key, attention_mask, kwargs):
        return sdpa_attention_forward(module, query, key, value, attention_mask, *args, **kwargs)
    mask = None
    if attention_mask is not None:  # folded once for all layers that share it
        shape = id(attention_mask), query.shape[1] // key.shape[1], query.dtype
        if shape not in folded_masks:
            folded_masks[shape] = attention_mask, fold_mask(attention_mask, *shape[1:])
        mask = folded_masks[shape][1]
    return grouped_sdpa(query, key, value, mask, kwargs.get("scaling")), None


def _is_foldable(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> bool:
    """Whether `grouped_sdpa` computes what Transformers' function would, and is not slower."""
    groups = getattr(module, "num_key_value_groups", 1)
    batch, heads, queries, _ = query.shape
    if groups == 1 or heads != groups * key.shape[1] or batch != key.shape[0]:
        return False
    if kwargs.get("dropout") or kwargs.get("output_attentions"):
        return False
    if query.device.type not in ("cpu", "cuda"):  # elsewhere Transformers passes `enable_gqa` or converts masks
        return False
    if any(kwargs[name] is not None for name in UNSUPPORTED_ARGUMENTS & kwargs.keys()):
        return False
    if mask is None:
        # Several queries without a mask are causal. For one query CUDA has a kernel for grouped heads.
        return queries == 1 and query.device.type == "cpu"
    return mask.ndim == 4 and mask.shape[0] in (1, batch) and mask.shape[1:] == (1, queries, key.shape[2])


class _PassesWithoutCudnn:
    """How many passes of all threads run without cuDNN's attention, and whether the first of them turned it off."""

    lock = threading.Lock()
    running = 0
    switched = False


@contextmanager
def without_cudnn_attention(device: torch.device) -> Iterator[None]:
    """In this context SDPA on a GPU uses PyTorch's other kernels, unless they are all turned off.

    cuDNN takes 20 to 60 ms on an H100 to plan each new pair of query and key lengths, and nearly every step has one.
    The setting is the process's: the first of overlapping passes turns cuDNN's attention off, the last one on again.
    """
    if device.type != "cuda":
        yield
        return
    passes = _PassesWithoutCudnn
    kernels = torch.backends.cuda
    with passes.lock:
        passes.running += 1
        has_others = kernels.mem_efficient_sdp_enabled() or kernels.math_sdp_enabled()
        if passes.running == 1 and kernels.cudnn_sdp_enabled() and has_others:
            kernels.enable_cudnn_sdp(False)
            passes.switched = True
    try:
        yield
    finally:
        with passes.lock:
            passes.running -= 1
            if passes.running == 0 and passes.switched:
                kernels.enable_cudnn_sdp(True)
                passes.switched = False
