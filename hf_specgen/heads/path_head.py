"""Block heads whose logits are corrected by the path: DSpark, DFlash2 and Domino.

A block head predicts every position of a block independently of the others. A correction adds what the tokens drafted
before a position say about it, without a further pass of the layers:

    block of one pass     h0        h1          h2            h: outputs, U = lm_head(h): base logits
    path                  anchor ─► x1 ────────► x2
    corrected logits      U0 + q(h0, anchor)·K   U1 + q(h1, x1)·K   U2 + q(h2, x2)·K

All corrections are the product of a small query, computed from the position's output, the previous token and maybe a
state along the path, with a matrix `K` that has one row for each draft token. They differ in the query alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch

from hf_specgen.heads.base import BoundHead
from hf_specgen.heads.block import BlockHead

Embed = Callable[[torch.Tensor], torch.Tensor]


class Step(NamedTuple):
    """What a correction computes from one token of each path.

    Args:
        query: `[..., rank]`, multiplied with the keys of the draft tokens.
        state: `[..., state_size]` for the next position.
    """

    query: torch.Tensor
    state: torch.Tensor


class Corrected(NamedTuple):
    """Logits along given paths.

    Args:
        base: `[paths, positions, draft_vocab]` without the correction.
        logits: of the same shape, corrected.
        confidence: `[paths, positions]` logits of the confidence head; None for heads without one.
    """

    base: torch.Tensor
    logits: torch.Tensor
    confidence: torch.Tensor | None


class PathHead(BlockHead):
    """Base class of block heads with a correction."""

    state_size = 0
    max_candidates: int | None = None
    """How many of the tokens with the highest base logits are candidates at a position; others are never drafted."""

    @abstractmethod
    def keys(self) -> torch.Tensor:
        """`[draft_vocab, rank]` the matrix that queries are multiplied with."""

    @abstractmethod
    def step(
        self, hidden: torch.Tensor, tokens: torch.Tensor, state: torch.Tensor, depths: torch.Tensor, embed: Embed
    ) -> Step:
        """One position of each path.

        Args:
            hidden: `[..., hidden]` output of the block at the position that proposes.
            tokens: `[...]` the token before the proposed one, as the target's id.
            state: `[..., state_size]` that the step at the token before returned.
            depths: `[...]` draft tokens before the proposed one.
            embed: from the target's token ids to embeddings.
        """

    def first_state(self, hidden: torch.Tensor, anchor: torch.Tensor, embed: Embed, first: int) -> torch.Tensor:
        """`[paths, state_size]` the state before the first proposing position.

        Args:
            hidden: `[paths, block, hidden]` outputs of the whole block.
            anchor: `[paths]` the last known tokens.
            embed: as for `step`.
            first: the first proposing position.
        """
        return hidden.new_zeros(len(hidden), self.state_size)

    def confidence_logits(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor | None:
        """`[...]` logits of the probability that the token proposed at a position is accepted; arguments as `step`."""
        return None

    def correct(self, bound: BoundHead, hidden: torch.Tensor, tokens: torch.Tensor) -> Corrected:
        """Logits along given paths (teacher forcing), with gradients.

        Args:
            bound: this head on its target.
            hidden: `[paths, block, hidden]` outputs of the whole block.
            tokens: `[paths, length]` the anchor and the tokens after it, as the target's ids; the i-th is the token
                before what the i-th proposing position predicts.
        """
        first, keys = self.config.first_proposing_position, self.keys()
        state = self.first_state(hidden, tokens[:, 0], bound.embed, first)
        proposing = hidden[:, first : first + tokens.shape[1]]
        queries = []
        for depth in range(proposing.shape[1]):
            depths = torch.full_like(tokens[:, depth], depth)
            query, state = self.step(proposing[:, depth], tokens[:, depth], state, depths, bound.embed)
            queries.append(query)
        base = bound.logits(proposing)
        logits = base + torch.stack(queries, dim=1) @ keys.T
        if self.max_candidates is not None:
            kept = base.topk(min(self.max_candidates, base.shape[-1]), dim=-1).indices
            logits = torch.full_like(logits, -torch.inf).scatter(-1, kept, logits.gather(-1, kept))
        confidence = self.confidence_logits(proposing, tokens[:, : proposing.shape[1]])
        return Corrected(base, logits, confidence)
