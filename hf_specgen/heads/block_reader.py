"""Runs a block head over a batch: it reads the target's hidden states of accepted positions, then drafts blocks.

cache              c0 … c(n-1)  |  anchor  mask  mask  mask        c: context, from the target's features
                   read ────────┤  draft: one pass, whose entries are dropped again
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.nn.utils.rnn import pad_sequence

from hf_specgen.heads.active_rows import ActiveRows
from hf_specgen.heads.base import AttachedHead
from hf_specgen.heads.block import BlockConfig
from hf_specgen.targets.cache import RaggedCache


class BlockReader:
    """The state of a block head in one call.

    Args:
        attached: the head on its target.
        batch: number of rows.

    Attributes:
        cache: keys and values of the context.
        lengths: positions that each row has read.
        depth: draft tokens of a block.
    """

    def __init__(self, attached: AttachedHead, batch: int):
        self.attached, self.cache, self.lengths = attached, RaggedCache(), [0] * batch
        self._config = cast(BlockConfig, attached.head.config)
        self.depth = self._config.block_size - self._config.first_proposing_position
        self._active = ActiveRows(batch)
        self._like = next(attached.head.parameters())

    @property
    def rows(self) -> list[int]:
        """The rows of the call that have not been dropped; `cache` and `lengths` are of these."""
        return self._active.rows

    def draft(
        self,
        features: Sequence[torch.Tensor],
        next_tokens: Sequence[Sequence[int]],
        needed: Sequence[bool],
        depth: int,
    ) -> torch.Tensor:
        """Read new positions of each row's text, then run a block after it.

        Args:
            features: for each row `[new, taps * target_hidden]`; rows may have different numbers of them.
            next_tokens: for each row the token after each of these positions; the last one is the anchor. Without any,
                the row's logits mean nothing.
            needed: the rows that have not ended; the others are dropped.
            depth: draft tokens to return. Unless attention inside the block is causal, a whole block is computed for
                any depth: its mask tokens attend to each other.

        Returns:
            `[batch, depth, vocab]` logits over the target's vocabulary; zeros for rows that were dropped.
        """
        places = self._active.drop(needed, self.cache)
        self.lengths = [self.lengths[place] for place in places]
        self._read(self._active.select(features))
        first, device = self._config.first_proposing_position, self._like.device
        causal = all(kind.causal for kind in self._config.attention)
        size = min(first + depth, self._config.block_size) if causal else self._config.block_size
        blocks = torch.full((len(places), size), self._config.mask_token_id, device=device)
        blocks[:, 0] = torch.tensor([tokens[-1] if tokens else 0 for tokens in self._active.select(next_tokens)])
        positions = torch.tensor(self.lengths, device=device)[:, None] + torch.arange(size, device=device)
        head: Any = self.attached.head
        output = head(self.attached.embed(blocks), positions, self.cache, self.lengths).output
        self.cache.set_lengths(self.lengths)
        return self._active.spread(self.attached.target_logits(output[:, first : first + depth]))

    def _read(self, features: Sequence[torch.Tensor]) -> None:
        """Add the positions to the context; shorter rows are padded, and the padding is dropped from the cache."""
        states = pad_sequence([row.to(self._like) for row in features], batch_first=True)
        starts = torch.tensor(self.lengths, device=self._like.device)[:, None]
        positions = starts + torch.arange(states.shape[1], device=self._like.device)
        cast(Any, self.attached.head).extend(states, positions, self.cache)
        self.lengths = [length + len(row) for length, row in zip(self.lengths, features, strict=True)]
        self.cache.set_lengths(self.lengths)
