"""Drafters with block heads whose positions are independent of each other: DFlash and JetSpec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import torch

from hf_specgen.drafter import DepthLogits
from hf_specgen.heads.base import BoundHead, DraftHead, HeadOutput
from hf_specgen.heads.block import BlockConfig, BlockHead
from hf_specgen.heads.drafter import HeadDrafter, padded
from hf_specgen.heads.head_text import FeatureSource, HeadText

COMPARED_BLOCKS = 8
"""Blocks of a text that the head proposes with both values of a setting."""
CLEAR_LEAD = 4
"""Correct tokens that one value must have more than the other before no more are compared; a wrong one has few."""


@dataclass
class SettingEvidence:
    """Which of two values of an ambiguous setting is right, inferred from texts; shared by all calls with a head."""

    lead: int = 0  # how many more correct tokens the head has proposed with the second value than with the first

    @property
    def is_clear(self) -> bool:
        """Whether no further drafts are compared."""
        return abs(self.lead) >= CLEAR_LEAD


@dataclass
class RotationChoice:
    """Chooses the rotation of a head whose config.json does not specify the paired channels, by the first text."""

    other_head: DraftHead  # the same head with the other rotation
    evidence: SettingEvidence

    def chosen(self, bound: BoundHead, source: FeatureSource, features: torch.Tensor, tokens: list[int]) -> BoundHead:
        """The head with more correct tokens in blocks of a text, given as features and the token after each of them."""
        first = cast(BlockConfig, bound.head.config).first_proposing_position
        other = bound.of_head(self.other_head)
        size = cast(BlockConfig, bound.head.config).block_size
        ends = [] if self.evidence.is_clear else range(len(tokens) - 1, 0, -size)[:COMPARED_BLOCKS]
        for end, (candidate, sign) in product(ends, ((bound, -1), (other, 1))):
            output = BlockDrafter(candidate, source, 1).run_block([features[:end]], [tokens[:end]], size)[0, first:]
            proposed = bound.head.target_ids(bound.logits(output).argmax(dim=-1)).tolist()
            right = [token == known for token, known in zip(proposed, tokens[end:], strict=False)]
            self.evidence.lead += sign * sum(right)
        return other if self.evidence.lead > 0 else bound


class BlockDrafter(HeadDrafter):
    """Drafts with a block head (DFlash, JetSpec): new features extend the context, a block is predicted after it.

    cache              c0 … c(n-1)  |  anchor  mask  mask  mask        c: context, from the target's features
    """

    is_one_pass = True
    rotation: RotationChoice | None = None
    """For a head whose rotation is not configured, until the first text has decided."""

    def __init__(self, bound: BoundHead, source: FeatureSource, batch: int):
        super().__init__(bound, source, batch)
        self.config = cast(BlockConfig, bound.head.config)
        self.max_depth = self.config.depth

    def forward_depths(self, text: HeadText, depth: int) -> DepthLogits:
        features, tokens = self._new(text)
        head = cast(BlockHead, self.bound.head)
        hidden = self._outputs(features, tokens, self.config.depth if head.reads_all_positions else depth)
        logits, candidates = head.depth_logits(self.bound, hidden, features, depth)
        return DepthLogits(self._scatter(logits), None if candidates is None else self._scatter(candidates))

    def _first(self, features: list[torch.Tensor], tokens: list[list[int]]) -> torch.Tensor:
        return self.bound.target_logits(self._outputs(features, tokens, 1)[:, 0])

    def _outputs(self, features: list[torch.Tensor], tokens: list[list[int]], depth: int) -> torch.Tensor:
        first = self.config.first_proposing_position
        # Unless all attention inside the block is causal, the mask tokens attend to each other: a whole block.
        causal = all(attention.causal for attention in self.config.attention)
        size = min(first + depth, self.config.block_size) if causal else self.config.block_size
        return self.run_block(features, tokens, size)[:, first : first + depth]

    def run_block(self, features: list[torch.Tensor], tokens: Sequence[Sequence[int]], size: int) -> torch.Tensor:
        """`[active, size, hidden]` outputs at the positions of a block after the new accepted ones."""
        if self.rotation is not None and features and len(features[0]):
            self.bound = self.rotation.chosen(self.bound, self._source, features[0], list(tokens[0]))
            self.rotation = None
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
