"""Block heads (DFlash, JetSpec): predict a whole block of tokens in one pass from the target's hidden states.

The block starts with the last known token, the anchor, followed by mask tokens. Every layer attends from the block to
the block itself and to the *context*: one key and value per accepted position, projected directly from the target's
features. Context entries do not depend on the head's layers, so the prefill costs a few matrix products and no
attention:

    context (features of accepted positions)   |  block
    c0   c1   c2   c3                          |  x4 (anchor)  mask  mask  mask
                                                                d5    d6    d7      d6 is predicted independently of d5

DFlash attends in both directions inside the block; JetSpec only backwards, so that a pass over a block whose first
masks have been replaced by tokens predicts the tokens after them. Block entries are dropped after each pass, context
entries stay.

Sources: DFlash (2026), https://arxiv.org/abs/2602.06036; JetSpec (2026), https://arxiv.org/abs/2606.18394.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from transformers.cache_utils import Cache

from hf_specgen.heads.aux_hidden_states import block_layers
from hf_specgen.heads.base import DraftHead, HeadConfig, HeadOutput
from hf_specgen.heads.layers import Attention, DecoderLayer, LayerConfig, RotaryEmbedding


@dataclass(frozen=True)
class BlockAttention:
    """The attention pattern of one layer inside a block.

    Args:
        causal: attend only backwards inside the block; otherwise in both directions.
        window: sliding window in positions; None for all.
        window_from_anchor: measure the window from the anchor for the whole block, not from each position
            (speculators).
    """

    causal: bool = False
    window: int | None = None
    window_from_anchor: bool = False


@dataclass(frozen=True, kw_only=True)
class BlockConfig(HeadConfig):
    """Configuration of `BlockHead`.

    Args:
        layer: configuration of each decoder layer.
        attention: attention pattern of each layer; its length is the number of layers.
        block_size: positions of a block, the anchor included.
        mask_token_id: the input token at the positions to predict.
        first_proposing_position: 1 if position i of a block predicts its own token and the anchor nothing (DFlash);
            0 if position i predicts the token after it (`sample_from_anchor`).
    """

    layer: LayerConfig
    attention: tuple[BlockAttention, ...]
    block_size: int
    mask_token_id: int
    first_proposing_position: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.attention:
            raise ValueError("a block head has at least one layer, got none")
        if not 2 <= self.block_size <= 1024:  # rejects damaged configs; published heads have blocks of 8 to 16 tokens
            raise ValueError(f"block_size must be between 2 and 1024, got {self.block_size}")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id must be a token of the target, below {self.vocab_size}: {self.mask_token_id}"
            )

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.attention)


class BlockHead(DraftHead):
    """DFlash and JetSpec heads, in the formats of their authors and of speculators.

    To draft, call `extend` with the features of newly accepted positions, then `forward` over the block, then drop the
    block's cache entries.
    """

    config: BlockConfig

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(config.num_aux_hidden_states * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.layer.norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(config.layer, index) for index in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.layer.norm_eps)
        self.rotary = RotaryEmbedding(config.layer)

    def default_layers(self, num_layers: int) -> tuple[int, ...]:
        """Spread evenly over the target, one for each layer of the head."""
        return block_layers(num_layers, self.config.num_layers)

    def extend(self, features: torch.Tensor, position_ids: torch.Tensor, cache: Cache) -> None:
        """Add accepted positions to the context."""
        context = self.hidden_norm(self.fc(features))
        rotary = self.rotary(context, position_ids)
        for layer in self.layers:
            attention = cast(Attention, layer.self_attn)
            cache.update(*attention.keys_values(context, rotary), attention.layer_index)

    def forward(
        self,
        embeddings: torch.Tensor,
        position_ids: torch.Tensor,
        cache: Cache,
        context_lengths: Sequence[int] | None = None,
    ) -> HeadOutput:
        """One pass over a block.

        Args:
            embeddings: `[batch, block, hidden]` of the anchor and the mask tokens, or of tokens in place of masks.
            position_ids: `[batch, block]`; the anchor follows the last context position.
            cache: holds the context; the block's entries are appended and have to be dropped afterwards.
            context_lengths: the number of context entries of each row; None if it is the same for all rows.

        Returns:
            The states before and after the final norm, of all positions of the block.
        """
        batch, block = embeddings.shape[:2]
        lengths = [cache.get_seq_length()] * batch if context_lengths is None else context_lengths
        equal_lengths = len(set(lengths)) == 1
        masks = {
            # Without a mask, attention can use its fastest kernels.
            attention: None
            if attention == BlockAttention() and equal_lengths
            else block_mask(attention, lengths, block, embeddings.device)
            for attention in set(self.config.attention)
        }
        rotary, states = self.rotary(embeddings, position_ids), embeddings
        for layer, attention in zip(self.layers, self.config.attention, strict=True):
            states = layer(states, rotary, masks[attention], cache)
        return HeadOutput(states, self.norm(states))


def block_mask(
    attention: BlockAttention, lengths: Sequence[int], block: int, device: torch.device | str | None = None
) -> torch.Tensor:
    """The mask of a pass over a block, for a batch whose rows have different numbers of context entries.

    Returns:
        `[batch, 1, block, max(lengths) + block]` bool, True where a position sees a cache slot.

    Example:
        >>> block_mask(BlockAttention(causal=True, window=2, window_from_anchor=True), [3], 2).int()[0, 0].tolist()
        [[0, 1, 1, 1, 0], [0, 1, 1, 1, 1]]
    """
    slots = torch.arange(max(lengths) + block, device=device)
    anchor = torch.tensor(lengths, device=device)[:, None, None]
    positions = anchor + torch.arange(block, device=device)[:, None]
    visible = slots <= positions if attention.causal else (slots < anchor + block).expand(-1, block, -1)
    if attention.window is not None and attention.window_from_anchor:
        visible = visible & (slots >= anchor - attention.window)
    elif attention.window is not None:
        visible = visible & (positions - slots < attention.window)
        visible = visible if attention.causal else visible & (slots - positions < attention.window)
    return visible[:, None]
