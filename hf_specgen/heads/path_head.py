"""Block heads whose logits are corrected by the path, and their drafter: DSpark, DFlash2 and Domino.

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
from collections.abc import Callable, Sequence
from typing import cast

import torch

from hf_specgen.device_tree import Frontier
from hf_specgen.drafter import DepthLogits
from hf_specgen.heads.base import BoundHead
from hf_specgen.heads.block import BlockHead
from hf_specgen.heads.block_drafter import BlockDrafter, SettingEvidence
from hf_specgen.heads.head_text import FeatureSource, HeadText

MAX_CANDIDATES = 2048
"""Tokens of a position that are corrected, as in SGLang's drafter for Domino."""
PAIR_CANDIDATES = 256
PAIR_PREVIOUS = 128
"""Tokens of a depth that can be drafted, and those that can be continued, where the previous token alone corrects."""
Embed = Callable[[torch.Tensor], torch.Tensor]
Step = tuple[torch.Tensor, torch.Tensor]
"""What a correction computes from one token of each path: the query `[..., rank]`, which is multiplied with the keys of
the draft tokens, and the state `[..., state_size]` for the next position."""


class PathHead(BlockHead):
    """Base class of block heads with a correction."""

    state_size = 0
    max_candidates: int | None = None
    """How many of the tokens with the highest base logits are candidates at a position; others are never drafted."""

    @abstractmethod
    def keys(self) -> torch.Tensor:
        """`[draft_vocab, rank]` the matrix that queries are multiplied with."""

    @abstractmethod
    def step(self, hidden: torch.Tensor, tokens: torch.Tensor, state: torch.Tensor, depth: int, embed: Embed) -> Step:
        """One position of each path.

        Args:
            hidden: `[..., hidden]` output of the block at the position that proposes, of a shape that broadcasts.
            tokens: `[...]` the token before the proposed one, as the target's id.
            state: `[..., state_size]` that the step at the token before returned.
            depth: draft tokens before the proposed one.
            embed: from the target's token ids to embeddings.
        """

    def first_state(
        self, hidden: torch.Tensor, anchor: torch.Tensor, embed: Embed, first: int | None = None
    ) -> torch.Tensor:
        """`[paths, state_size]` the state before the first proposing position.

        Args:
            hidden: `[paths, block, hidden]` outputs of the whole block.
            anchor: `[paths]` the last known tokens.
            embed: as for `step`.
            first: the first proposing position, if not the configured one.
        """
        return hidden.new_zeros(len(hidden), self.state_size)


class PathDrafter(BlockDrafter):
    """Drafts with a block head with a correction: one pass of the block, then logits after any path without another.

    Attributes:
        layout: for a head whose layout is not configured; else None.
        proposes_from: the first position of the last block that proposes a token.
        max_candidates: how many tokens of a position can be drafted: those with the highest base logits.
    """

    def __init__(self, bound: BoundHead, source: FeatureSource, batch: int, layout: SettingEvidence | None = None):
        super().__init__(bound, source, batch)
        self._head = cast(PathHead, bound.head)
        self.layout = layout
        self.proposes_from = self.config.first_proposing_position
        self.is_one_pass = not self._head.state_size
        # Deeper levels need no further pass of the block.
        self.single_pass_tokens = self.config.block_size
        limit = self._head.max_candidates or MAX_CANDIDATES
        self.max_candidates = min(limit, self.config.draft_vocab_size)
        self._proposed: dict[int, list[int]] = {}
        self._hidden: torch.Tensor = self._like  # outputs of the block from the first proposing position on
        self._draft_ids: torch.Tensor | None = None
        if (ids := self._head.draft_to_target) is not None:
            self._draft_ids = ids.new_zeros(self.config.vocab_size).scatter(0, ids, torch.arange(len(ids)).to(ids))

    def forward_depths(self, text: HeadText, depth: int) -> DepthLogits:
        """As `BlockDrafter.forward_depths`, corrected by the previous token: for heads without a state along the path.

        The likeliest tokens of each depth are corrected after each of the likeliest tokens of the depth before; those
        of the first depth all follow the last known token.
        """
        features, tokens = self._new(text)
        self._run_block(features, tokens)
        hidden = self._hidden[:, :depth]
        base = self._scatter(self.bound.target_logits(hidden)).float()
        hidden = self._scatter(hidden)[:, :, None]
        base, candidates = base.topk(min(PAIR_CANDIDATES, self.max_candidates), dim=-1)
        count = min(PAIR_PREVIOUS, candidates.shape[-1])
        anchors = self._scatter(self._anchor)[:, None, None].expand(-1, 1, count)
        previous = torch.cat([anchors, candidates[:, :-1, :count]], dim=1)
        query, _ = self._head.step(hidden, previous, hidden[..., :0], 0, self.bound.embed)
        keys = self._head.keys()[candidates if self._draft_ids is None else self._draft_ids[candidates]]
        return DepthLogits(base[:, :, None] + query @ keys.transpose(2, 3), candidates)

    def _first(self, features: list[torch.Tensor], tokens: list[list[int]]) -> torch.Tensor:
        block = self._run_block(features, tokens)
        state = self._head.first_state(block, self._anchor, self.bound.embed, self.proposes_from)
        self._base, ids = self.bound.logits(self._hidden).topk(self.max_candidates, dim=-1)
        # Of each position's candidates.
        self._keys = self._head.keys()[ids]
        self._tokens = self._head.target_ids(ids)
        return self._step(self._anchor[:, None], 0, state[:, None])[:, 0]

    def keep_rows(self, kept: Sequence[int]) -> None:
        super().keep_rows(kept)
        self._proposed = {}

    def append_rows(self, new: int) -> None:
        super().append_rows(new)
        self._proposed = {}

    def _next(self, frontier: Frontier) -> torch.Tensor:
        states = frontier.gather_parents(self._states)
        return self._step(frontier.tokens.to(self._like.device), frontier.depth, states)

    def _run_block(self, features: list[torch.Tensor], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Run the block after new accepted positions: `[active, block, hidden]`."""
        block = self.run_block(features, tokens, self.config.block_size)
        if self.layout is not None:
            if not self.layout.is_clear:
                self.layout.lead += self._counted(block, tokens)
            lead = self.layout.lead
            self.proposes_from = int(lead > 0) if lead else self.config.first_proposing_position
        self._hidden = block[:, self.proposes_from :]
        if self.proposes_from > self.config.first_proposing_position:  # the block is one token shorter than configured
            self._hidden = torch.cat((self._hidden, block[:, -1:]), dim=1)
        return block

    def _step(self, tokens: torch.Tensor, depth: int, states: torch.Tensor) -> torch.Tensor:
        """Logits after nodes of one depth, of these tokens and states of their parents, both `[active, nodes, …]`."""
        hidden = self._hidden[:, depth, None].expand(-1, tokens.shape[1], -1)
        query, self._states = self._head.step(hidden, tokens, states, depth, self.bound.embed)
        corrected = self._base[:, depth, None] + query @ self._keys[:, depth].transpose(1, 2)
        logits = corrected.new_full((*tokens.shape, self.config.vocab_size), -torch.inf)
        return logits.scatter_(2, self._tokens[:, depth, None].expand_as(corrected), corrected)

    def _counted(self, block: torch.Tensor, tokens: Sequence[Sequence[int]]) -> int:
        """Compare what both layouts proposed after each row's last anchor with the token that followed it."""
        lead = 0
        logits = []
        for row, known in zip(self.rows, tokens, strict=True):
            if known and row in self._proposed:
                zero, one = (token == known[0] for token in self._proposed[row])
                lead += one - zero
        for first in (0, 1):
            state = self._head.first_state(block, self._anchor, self.bound.embed, first)
            query, _ = self._head.step(block[:, first], self._anchor, state, 0, self.bound.embed)
            logits.append(self.bound.logits(block[:, first]) + query @ self._head.keys().T)
        best = self._head.target_ids(torch.stack(logits, dim=1).argmax(dim=-1)).tolist()
        self._proposed = dict(zip(self.rows, best, strict=True))
        return lead
