"""Block heads (DFlash, JetSpec): predict a whole block of tokens in one pass from the target's hidden states.

The block is the last known token, the anchor, and mask tokens. Every layer attends to the block and to the *context*:
one key and value per accepted position, projected from the target's features without the head's layers:

    context (features of accepted positions)   |  block
    c0   c1   c2   c3                          |  x4 (anchor)  mask  mask  mask
                                                                d5    d6    d7      d6 is predicted independently of d5

DFlash attends in both directions inside the block, JetSpec only backwards. Block entries are dropped after each pass.

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
    """The attention pattern of one layer inside a block."""

    causal: bool = False  # attend only backwards inside the block
    window: int | None = None  # sliding window in positions; None for all
    window_from_anchor: bool = False  # one window for the whole block (speculators), not one from each position


@dataclass(frozen=True, kw_only=True)
class BlockConfig(HeadConfig):
    """Configuration of `BlockHead`."""

    layer: LayerConfig
    attention: tuple[BlockAttention, ...]  # of each layer
    block_size: int  # positions, the anchor included
    mask_token_id: int
    first_proposing_position: int = 1  # 0: position i predicts the token after it (`sample_from_anchor`)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.attention:
            raise ValueError("a block head has at least one layer, got none")
        if not 2 <= self.block_size <= 1024:  # rejects damaged configs; published heads have blocks of 8 to 16 tokens
            raise ValueError(f"block_size must be between 2 and 1024, got {self.block_size}")

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.attention)


class BlockHead(DraftHead):
    """DFlash and JetSpec heads: `extend` with accepted positions, `forward` over the block, drop its cache entries."""

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
        """One pass over a block, `[batch, block, hidden]`, after a context of `context_lengths` entries in each row."""
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
    """`[batch, 1, block, max(lengths) + block]` bool, True where a position sees a cache slot."""
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
