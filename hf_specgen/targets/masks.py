"""Attention masks for one verification step, as pure functions of small tensors.

Each row's cache slots hold its cached tokens, then this step's tokens (the row's last token and the draft nodes).
Rows have different lengths, so this step's tokens begin at a different slot in each. Two rows with 3 and 1 cached
tokens `c`, the pending token `P`, and one draft node `d`::

                 row 0: c c c P d        row 1: c P d . .
    query P             1 1 1 1 0               1 1 0 0 0
    query d             1 1 1 1 1               1 1 1 0 0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hf_specgen.tree import DraftTree, ancestor_matrix, chain_parents


@dataclass(frozen=True)
class StepLayout:
    """The positions of one verification step's tokens in the cache and in the draft tree.

    Args:
        lengths: `[batch]` cached slots of each row.
        depths: `[batch, queries]` distance of each query token from the row's pending token (which has 0).
        ancestors: `[batch, queries, queries]` bool, which of this step's tokens each one attends to.
        visible: `[batch, slots]` bool, False for padding among the cached slots; None if there is none.
        width: number of key slots.
    """

    lengths: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor
    visible: torch.Tensor | None
    width: int


def full_mask(layout: StepLayout) -> torch.Tensor:
    """Every token attends to its row's cached tokens and to its own ancestors.

    Returns:
        `[batch, 1, queries, width]` bool, True where the query attends to the key.
    """
    node, is_node = _node_of_slot(layout)  # [batch, width]
    cached = torch.arange(layout.width, device=node.device) < layout.lengths[:, None]
    if layout.visible is not None:
        cached[:, : layout.visible.shape[1]] &= layout.visible
    queries = layout.depths.shape[1]
    among_nodes = layout.ancestors.gather(2, node[:, None, :].expand(-1, queries, -1))
    return (cached[:, None, :] | (among_nodes & is_node[:, None, :]))[:, None]


def sliding_mask(layout: StepLayout, window: int) -> torch.Tensor:
    """`full_mask`, limited to the last `window` positions (the query's own included)."""
    key, query = _logical_indices(layout)
    return full_mask(layout) & (key > query - window)


def chunked_mask(layout: StepLayout, chunk_size: int) -> torch.Tensor:
    """`full_mask`, limited to keys in the query's own chunk; chunks are counted from the first token after padding."""
    key, query = _logical_indices(layout)
    if layout.visible is not None:
        padding = layout.visible.int().argmax(dim=1)[:, None, None, None]
        key, query = key - padding, query - padding
    same_chunk = key.div(chunk_size, rounding_mode="floor") == query.div(chunk_size, rounding_mode="floor")
    return full_mask(layout) & same_chunk


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask as an additive bias for eager attention: 0 where True, the dtype's lowest number elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def _node_of_slot(layout: StepLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """For every slot the index of this step's token in it, and whether there is one. Both `[batch, width]`."""
    node = torch.arange(layout.width, device=layout.lengths.device) - layout.lengths[:, None]
    queries = layout.depths.shape[1]
    return node.clamp(0, queries - 1), (node >= 0) & (node < queries)


def _logical_indices(layout: StepLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """The index of each key and query in its own root-to-node sequence; siblings share an index.

    Returns:
        keys `[batch, 1, 1, width]` and queries `[batch, 1, queries, 1]`.
    """
    node, is_node = _node_of_slot(layout)
    slot = torch.arange(layout.width, device=node.device).expand_as(node)
    query = layout.lengths[:, None] + layout.depths  # [batch, queries]
    key = torch.where(is_node, query.gather(1, node), slot)
    return key[:, None, None, :], query[:, None, :, None]


ATTENTION_OF_TYPE = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
"""The kind of attention in layers that combine it with a recurrent state."""
WITHOUT_ATTENTION = {"conv", "linear_attention", "moe", "mlp", "dummy"}
"""Types of layers without attention."""


def layer_kinds(config: Any) -> set[str]:
    """The kinds of attention in the model's layers, under the names of Transformers' mask functions."""
    if hasattr(config, "layer_types"):
        return {ATTENTION_OF_TYPE.get(kind, kind) for kind in config.layer_types} - WITHOUT_ATTENTION
    if getattr(config, "sliding_window", None) is not None:
        return {"sliding_attention"}
    if getattr(config, "attention_chunk_size", None) is not None:
        return {"chunked_attention"}
    return {"full_attention"}


def layer_windows(config: Any) -> list[int | None]:
    """The sliding window of each layer; None for layers with full or chunked attention."""
    count = config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or [*layer_kinds(config)] * count
    return [window if kind == "sliding_attention" else None for kind in kinds]


def ancestors(tree: DraftTree) -> torch.Tensor:
    """`[batch, 1 + nodes, 1 + nodes]` ancestor matrices; padding nodes continue the row as a chain."""
    return torch.stack([ancestor_matrix(_padded(parents, tree.nodes)) for parents in tree.parents])


def _padded(parents: tuple[int, ...], nodes: int) -> tuple[int, ...]:
    return parents if len(parents) == nodes else parents + chain_parents(nodes)[len(parents) :]
