"""Drafters with block heads whose positions are independent of each other: DFlash and JetSpec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from hf_specgen.heads.base import BoundHead, HeadOutput
from hf_specgen.heads.block import BlockConfig
from hf_specgen.heads.drafter import HeadDrafter, padded
from hf_specgen.heads.head_text import FeatureSource


class BlockDrafter(HeadDrafter):
    """Drafts with a block head (DFlash, JetSpec): new features extend the context, a block is predicted after it.

    cache              c0 … c(n-1)  |  anchor  mask  mask  mask        c: context, from the target's features
    """

    is_one_pass = True

    def __init__(self, bound: BoundHead, source: FeatureSource, batch: int):
        super().__init__(bound, source, batch)
        self.config = cast(BlockConfig, bound.head.config)
        self.depth = self.config.depth

    def _first(self, features: list[torch.Tensor], tokens: list[list[int]]) -> torch.Tensor:
        return self.bound.target_logits(self._outputs(features, tokens, 1)[:, 0])

    def _outputs(self, features: list[torch.Tensor], tokens: list[list[int]], depth: int) -> torch.Tensor:
        first = self.config.first_proposing_position
        # Unless all attention inside the block is causal, the mask tokens attend to each other: a whole block.
        causal = all(attention.causal for attention in self.config.attention)
        size = min(first + depth, self.config.block_size) if causal else self.config.block_size
        return self._block(features, tokens, size)[:, first : first + depth]

    def _block(self, features: list[torch.Tensor], tokens: Sequence[Sequence[int]], size: int) -> torch.Tensor:
        """`[active, size, hidden]` outputs at the positions of a block after the new accepted ones."""
        head: Any = self.bound.head
        device = self._like.device
        self._anchor = torch.tensor([row[-1] if row else 0 for row in tokens], device=device)
        states = padded(features, [slice(None)] * len(features))
        head.extend(states, self._positions(states.shape[1]), self.cache)
        self._commit([len(row) for row in features])
        blocks = torch.full((len(features), size), self.config.mask_token_id, device=device)
        blocks[:, 0] = self._anchor
        output: HeadOutput = head(self.bound.embed(blocks), self._positions(size), self.cache, self.lengths)
        self.cache.set_lengths(self.lengths)
        return output.output
