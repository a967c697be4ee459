"""Attention masks for one verification step, in the form that the model's attention implementation expects.

Each row's cache slots hold its cached tokens, then this step's tokens (the row's last token and the draft nodes).
Rows have different lengths, so this step's tokens begin at a different slot in each. Two rows with 3 and 1 cached
tokens `c`, the pending token `P`, and one draft node `d`::

                 row 0: c c c P d        row 1: c P d . .
    query P             1 1 1 1 0               1 1 0 0 0
    query d             1 1 1 1 1               1 1 1 0 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from hf_specgen import compat
from hf_specgen.device_tree import PassTree
from hf_specgen.targets.model_parts import (
    ATTENTION_OF_TYPE,
    MAKES_ITS_MASK,
    MASKS_PADDING,
    WITHOUT_ATTENTION,
    layer_kinds,
    layers_with_images,
    takes_no_mask,
    text_config,
)
from hf_specgen.tree import TreeStructure

DROPPING = ("sliding_attention", "chunked_attention")
"""Types of attention whose layers drop slots that no later token attends to."""
ADDITIVE = ("eager", "flex_attention")
"""Attention implementations whose masks are numbers to add to the scores: that of flex attention is added by its score
function, so that a tree needs no block mask of its own."""


@dataclass(frozen=True)
class StepLayout:
    """Where a step's tokens lie in the cache and in the draft tree; the last of them are queries."""

    starts: int | torch.Tensor  # the first slot of the step's tokens: a number for all rows, otherwise [batch, 1]
    num_slots: int  # how many slots attention reads
    depths: torch.Tensor  # [batch, tokens] in the tree
    ancestors: torch.Tensor  # [batch, queries, tokens] bool
    padding_mask: torch.Tensor | None = None  # [batch, slots] bool, False for padding

    @classmethod
    def after(
        cls,
        lengths: Sequence[int],
        depths: torch.Tensor,
        ancestors: torch.Tensor,
        padding_mask: torch.Tensor | None = None,
    ) -> StepLayout:
        """Of tokens after `lengths` cached ones of the rows."""
        starts: Any = lengths[0]
        if len(set(lengths)) > 1:
            starts = torch.tensor(lengths, device=depths.device)[:, None]
        return cls(starts, max(lengths) + depths.shape[1], depths, ancestors, padding_mask)


def full_mask(layout: StepLayout) -> torch.Tensor:
    """`[batch, 1, queries, num_slots]` bool: tokens attend to cached tokens of the row and to their ancestors."""
    starts = layout.starts
    if isinstance(starts, int) and layout.padding_mask is None:
        return pad(layout.ancestors[:, None], (starts, 0), value=True)
    node, is_node = _node_of_slot(layout)  # [batch, num_slots]
    cached = (torch.arange(layout.num_slots, device=node.device) < starts).expand(len(node), -1)
    if layout.padding_mask is not None:
        prompt = layout.padding_mask.shape[1]  # later slots are never padding
        cached = torch.cat([cached[:, :prompt] & layout.padding_mask, cached[:, prompt:]], dim=1)
    queries = layout.ancestors.shape[1]
    among_nodes = layout.ancestors.gather(2, node[:, None, :].expand(-1, queries, -1))
    return (cached[:, None, :] | (among_nodes & is_node[:, None, :]))[:, None]


def sliding_mask(layout: StepLayout, window: int) -> torch.Tensor:
    """`full_mask`, limited to the last `window` positions (the query's own included)."""
    key, query = _logical_indices(layout)
    return full_mask(layout) & (key > query - window)


def chunked_mask(layout: StepLayout, chunk_size: int) -> torch.Tensor:
    """`full_mask`, limited to keys in the query's own chunk; chunks are counted from the first token after padding."""
    key, query = _logical_indices(layout)
    if layout.padding_mask is not None:
        padding = (layout.padding_mask.cumsum(dim=1) == 0).sum(dim=1)[:, None, None, None]
        key = key - padding
        query = query - padding
    same_chunk = key.div(chunk_size, rounding_mode="floor") == query.div(chunk_size, rounding_mode="floor")
    return full_mask(layout) & same_chunk


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask as an additive bias for eager attention: 0 where True, the dtype's lowest number elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def fixed_mask(mask: Any, batch: int, slots: int) -> Any:
    """Masks, bool or additive, for all rows of a batch and all slots that attention reads: `[batch, 1, new, slots]`."""
    if isinstance(mask, dict):
        return {kind: value if value is None else fixed_mask(value, batch, slots) for kind, value in mask.items()}
    hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    fixed = mask.new_full((batch, 1, mask.shape[2], slots), hidden)
    fixed[..., : mask.shape[3]] = mask
    return fixed


def _node_of_slot(layout: StepLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """For every slot the index of this step's token in it, and whether there is one. Both `[batch, num_slots]`."""
    rows, tokens = layout.depths.shape
    node = (torch.arange(layout.num_slots, device=layout.depths.device) - layout.starts).expand(rows, -1)
    return node.clamp(0, tokens - 1), (node >= 0) & (node < tokens)


def _logical_indices(layout: StepLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys `[batch, 1, 1, num_slots]` and queries `[batch, 1, queries, 1]`: indices from the root; siblings agree."""
    node, is_node = _node_of_slot(layout)
    slot = torch.arange(layout.num_slots, device=node.device).expand_as(node)
    index = layout.depths + layout.starts  # [batch, tokens]
    key = torch.where(is_node, index.gather(1, node), slot)
    return key[:, None, None, :], index[:, None, -layout.ancestors.shape[1] :, None]


def chain_mask(lengths: Sequence[int], queries: int, device: torch.device) -> torch.Tensor:
    """`full_mask` of chains: query i of a row sees its slots 0 to `length + i`."""
    return full_mask(StepLayout.after(lengths, *TreeStructure.of_chains(len(lengths), queries - 1, device)))


def _without_padding(rows: int, device: torch.device) -> torch.Tensor:
    return torch.ones(rows, 1, dtype=torch.bool, device=device)


class StepMasks:
    """Builds one mask per type of layer; if `required`, also where every query attends to every key."""

    def __init__(self, model: PreTrainedModel, padding_mask: torch.Tensor | None, required: bool = False):
        self.padding_mask = padding_mask
        self._config: Any = text_config(model)
        self._dtype = model.dtype
        # Such a decoder appends the mask of the encoder's states, which has a batch dimension, to masks of both kinds.
        self._is_appended_to = model.config.is_encoder_decoder and hasattr(self._config, "layer_types")
        self._kinds = layer_kinds(self._config)
        if self._is_appended_to:
            self._kinds |= {"full_attention", "sliding_attention"}
        self._required = required or self._is_appended_to
        self._implementation = compat.attention_implementation(self._config)
        self._additive = self._implementation in ADDITIVE
        self._has_batch_dimension = self._additive or self._is_appended_to or "indexed_attention" in self._kinds
        self.chains_only = takes_no_mask(self._config) is not None
        """Whether a draft must be a chain of a single row: attention takes no mask."""
        self._device = compat.input_device(model)
        # Whether a model takes a mask for each type of layer, or the only mask itself.
        self._is_by_kind = hasattr(self._config, "layer_types")

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows of the batch only."""
        self.padding_mask = None if self.padding_mask is None else self.padding_mask[list(rows)]

    def append_rows(self, rows: int, other: StepMasks, new_rows: int) -> None:
        """Add the rows of another such object to those of this one."""
        if self.padding_mask is None and other.padding_mask is None:
            return
        masks = [_without_padding(rows, self._device) if self.padding_mask is None else self.padding_mask]
        masks.append(_without_padding(new_rows, self._device) if other.padding_mask is None else other.padding_mask)
        slots = max(mask.shape[1] for mask in masks)
        masks = [pad(mask, (0, slots - mask.shape[1]), value=True) for mask in masks]
        self.padding_mask = torch.cat(masks)

    def of_step(self, tree: PassTree, lengths: tuple[int, ...], cached: int, first_visible: int) -> Any:
        """The `attention_mask` of a pass over the pending token and the nodes, of which the first `cached` are cached.

        A tensor, or one for each kind of layer; None where no mask is needed. Layers with a sliding window or chunks
        have dropped the first `first_visible` slots.
        """
        queries = 1 + tree.nodes
        is_equal = len(set(lengths)) == 1 and self.padding_mask is None
        if self.chains_only and not (tree.is_chain and is_equal):
            raise ValueError(
                f"{takes_no_mask(self._config)} takes no mask, so it verifies chains of rows that are equally long, "
                "without padding; load the model with attn_implementation='sdpa'"
            )
        is_single = queries == 1 and is_equal
        masked = [kind for kind in self._kinds if not is_single or self._is_needed(kind, lengths[0])]
        masks: dict[str, torch.Tensor | None] = dict.fromkeys([*self._kinds, *WITHOUT_ATTENTION])
        if masked and not self.chains_only:
            # A row with fewer nodes is padded by a chain whose results are ignored.
            if tree.is_chain:
                structure = TreeStructure.of_chains(tree.batch, tree.nodes, self._device)
            else:
                structure = tree.structure()
            # A row with a longer prompt may have left.
            padding_mask = self.padding_mask
            if padding_mask is not None:
                padding_mask = padding_mask[:, : max(lengths)].to(structure.depths.device)
            layout = StepLayout.after(lengths, *structure, padding_mask)
            for kind in masked:
                mask = self._of_tree(kind, layout).to(self._device)
                masks[kind] = self._ready(mask, tree.batch, queries - cached, first_visible if kind in DROPPING else 0)
        if self._config.model_type in MASKS_PADDING:
            masks["indexed_attention"] = torch.ones(tree.batch, queries - cached, dtype=torch.bool, device=self._device)
        return self._by_kind(masks)

    def of_layout(self, layout: StepLayout) -> Any:
        """As `of_step`, of a captured pass: each kind of layer has a mask, and has dropped nothing."""
        batch, queries = layout.ancestors.shape[:2]
        masks = {kind: self._ready(self._of_tree(kind, layout), batch, queries, 0) for kind in self._kinds}
        return self._by_kind({**masks, **dict.fromkeys(WITHOUT_ATTENTION)})

    def _by_kind(self, masks: dict[str, torch.Tensor | None]) -> Any:
        if not self._kinds or self._config.model_type in MAKES_ITS_MASK:  # or a model without attention
            return None
        if not self._is_by_kind:
            return masks[next(iter(self._kinds))]
        return masks | {of: masks[kind] for of, kind in ATTENTION_OF_TYPE.items() if kind in masks}

    def _is_needed(self, kind: str, length: int) -> bool:
        """Whether a single query after `length` slots needs a mask."""
        # Eager attention may add the mask without asking whether there is one; an indexer reads its numbers.
        if self._required or self._additive or kind in ("indexed_attention", "chunked_attention"):
            return True
        return kind == "sliding_attention" and length >= self._config.sliding_window

    def _of_tree(self, kind: str, layout: StepLayout) -> torch.Tensor:
        if kind == "sliding_attention":
            return sliding_mask(layout, self._config.sliding_window)
        if kind == "chunked_attention":
            return chunked_mask(layout, self._config.attention_chunk_size)
        return full_mask(layout)

    def _ready(self, mask: torch.Tensor, batch: int, queries: int, first_visible: int) -> torch.Tensor:
        if queries < mask.shape[2] or first_visible:
            mask = mask[:, :, -queries:, first_visible:]
        # Eager attention may require the batch dimension where SDPA broadcasts one mask over all rows.
        if self._has_batch_dimension:
            mask = mask.expand(batch, -1, -1, -1)
        return additive(mask, self._dtype) if self._additive else mask


def mask_of_images(model: PreTrainedModel, cache: Any) -> torch.Tensor | None:
    """`[batch, 1, 1, tiles]` ones, where the cache holds images: without a mask SDPA hides some of them from a draft.

    Of several tokens it shows the first one the first key, the second one two, and so on.
    """
    if not (held := layers_with_images(model, cache)):
        return None
    keys: torch.Tensor = held[0].keys
    patches = cast(Any, model.base_model).vision_model.num_patches
    return keys.new_ones(len(keys), 1, 1, keys.shape[2] // patches)
