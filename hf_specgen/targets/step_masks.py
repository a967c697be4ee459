"""The attention mask of a verification step, in the form that the model's attention implementation expects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specgen import compat
from hf_specgen.targets import masks
from hf_specgen.targets.chain_masks import ChainMasks
from hf_specgen.targets.model_parts import text_config
from hf_specgen.targets.support import is_causal_kernel
from hf_specgen.tree import DraftTree, chain_parents

UNMASKED = ("conv", "linear_attention")
"""Kinds of layers without a mask: no generated token is padding."""
DROPPING = ("sliding_attention", "chunked_attention")
"""Kinds of attention whose layers drop slots that no later token attends to."""
ADDITIVE = ("eager", "flex_attention")
"""Attention implementations whose masks are numbers to add to the scores: that of flex attention is added by its score
function, so that a tree needs no block mask of its own."""


class StepMasks:
    """Builds one mask per kind of layer; chains are cut from a template.

    Args:
        model: the model.
        visible: `[batch, slots]` bool, False for padding among the slots of the prompt; None if there is none.
        required: make a mask also where every query attends to every key.
    """

    def __init__(self, model: PreTrainedModel, visible: torch.Tensor | None, required: bool = False):
        self._config: Any = text_config(model)
        self._dtype, self._visible, self._required = model.dtype, visible, required
        self._implementation = compat.attention_implementation(self._config)
        self._additive = self._implementation in ADDITIVE
        self.chains_only = is_causal_kernel(self._implementation)
        """Whether a draft must be a chain: the attention kernel takes no mask."""
        self._kinds = masks.layer_kinds(self._config)
        windows = {"sliding_attention": getattr(self._config, "sliding_window", None)}
        self._device = compat.input_device(model)
        self._templates = {kind: ChainMasks(self._device, windows.get(kind)) for kind in self._kinds}
        # Whether a model takes a mask for each kind of layer, or the only mask itself.
        self._is_by_kind = hasattr(self._config, "layer_types")

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows of the batch only."""
        self._visible = None if self._visible is None else self._visible[list(rows)]

    def of_step(self, tree: DraftTree, lengths: tuple[int, ...], cached: int, first_visible: int) -> Any:
        """The `attention_mask` argument of a forward pass over the pending token and the nodes of a tree.

        Args:
            tree: the draft.
            lengths: cached slots of each row before the pending token.
            cached: how many of these tokens are cached already; the mask is for the others.
            first_visible: slots that layers with a sliding window or chunks have dropped.

        Returns:
            A tensor, or one for each kind of layer; None where no mask is needed.
        """
        # A row with fewer nodes is padded by a chain whose results are ignored.
        chains = all(parents == chain_parents(len(parents)) for parents in tree.parents)
        if self.chains_only:
            if not chains or self._visible is not None or len(set(lengths)) > 1:
                raise ValueError(
                    f"attention implementation {self._implementation!r} takes no mask, so it verifies chains of rows "
                    "that are equally long, without padding"
                )
            return dict.fromkeys([*self._kinds, *UNMASKED]) if self._is_by_kind else None
        if chains and "chunked_attention" not in self._kinds:
            made = {kind: self._of_chains(kind, lengths, 1 + tree.nodes) for kind in self._kinds}
        else:
            layout = masks.StepLayout(
                lengths=torch.tensor(lengths),
                depths=torch.tensor([tree.depths(row) for row in range(tree.batch)]),
                ancestors=masks.ancestors(tree),
                visible=None if self._visible is None else self._visible.cpu(),
                width=max(lengths) + 1 + tree.nodes,
            )
            # On the CPU: launching a GPU's kernels for so few numbers takes longer than sending the mask.
            made = {kind: self._of_tree(kind, layout).to(self._device) for kind in self._kinds}
        ready = {
            kind: self._ready(mask, tree.batch, cached, first_visible if kind in DROPPING else 0)
            for kind, mask in made.items()
        }
        return {**dict.fromkeys(UNMASKED), **ready} if self._is_by_kind else next(iter(ready.values()))

    def _of_chains(self, kind: str, lengths: tuple[int, ...], queries: int) -> torch.Tensor | None:
        template = self._templates[kind]
        # Eager attention may add the mask without asking whether there is one; an indexer reads its numbers.
        is_needed = self._required or self._additive or kind == "indexed_attention"
        if self._visible is None and not is_needed and template.is_all_seen(lengths, queries):
            return None
        return template.cut(lengths, queries, self._visible)

    def _of_tree(self, kind: str, layout: masks.StepLayout) -> torch.Tensor:
        if kind == "sliding_attention":
            return masks.sliding_mask(layout, self._config.sliding_window)
        if kind == "chunked_attention":
            return masks.chunked_mask(layout, self._config.attention_chunk_size)
        return masks.full_mask(layout)

    def _ready(self, mask: torch.Tensor | None, batch: int, cached: int, first_visible: int) -> torch.Tensor | None:
        if mask is None:
            return None
        if cached or first_visible:
            mask = mask[:, :, cached:, first_visible:]
        if not self._additive:
            return mask
        # Eager attention may require the batch dimension where SDPA broadcasts one mask over all rows.
        return masks.additive(mask, self._dtype).expand(batch, -1, -1, -1)
