"""Domino: a block head whose logits are corrected by a GRU over the embeddings of the path.

With the state s after the anchor and the tokens drafted so far, the correction of a position with output h is
`embed_proj([h; s])`, two linear layers around SiLU; the first `pure_draft_prefix_len` draft tokens have none.

Source: Domino (2026), https://arxiv.org/abs/2605.29707, as implemented by SpecForge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from hf_specgen.heads.block import BlockConfig, block_options
from hf_specgen.heads.head_file import HeadFile
from hf_specgen.heads.path_head import Embed, PathHead, Step


@dataclass(frozen=True, kw_only=True)
class DominoConfig(BlockConfig):
    """Configuration of `DominoHead`."""

    emb_dim: int  # rank of the correction
    gru_hidden_dim: int
    pure_draft_prefix_len: int = 0  # draft tokens without a correction


class DominoHead(PathHead):
    """A Domino head."""

    config: DominoConfig

    def __init__(self, config: DominoConfig) -> None:
        super().__init__(config)
        width, self.state_size = config.hidden_size, config.gru_hidden_dim
        self.prefix_gru = nn.GRU(width, config.gru_hidden_dim, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(
            nn.Linear(width + config.gru_hidden_dim, config.emb_dim, bias=False),
            nn.SiLU(),
            nn.Linear(config.emb_dim, config.draft_vocab_size, bias=False),
        )

    def keys(self) -> torch.Tensor:
        """`[draft_vocab, emb_dim]`."""
        return cast(nn.Linear, self.embed_proj[2]).weight

    def step(self, hidden: torch.Tensor, tokens: torch.Tensor, state: torch.Tensor, depth: int, embed: Embed) -> Step:
        """The GRU reads the token, then the position's output and the state make the query."""
        read, weights = embed(tokens.view(len(tokens), -1)).flatten(0, 1), dict(self.prefix_gru.named_parameters())
        flat = torch.gru_cell(read, state.flatten(0, -2), weights["weight_ih_l0"], weights["weight_hh_l0"])
        state = flat.view(state.shape)
        query = self.embed_proj[:2](torch.cat((hidden, state), dim=-1))
        return Step(query * (depth >= self.config.pure_draft_prefix_len), state)


def load_domino(file: HeadFile) -> DominoHead:
    """A Domino head of SpecForge or ModelOpt; without `shift_label` position j of the block proposes token j."""
    fields, options = file.fields, block_options(file)
    config = DominoConfig(
        **options,
        max_draft_tokens=options["block_size"] - 1,
        emb_dim=fields.integer("emb_dim"),
        gru_hidden_dim=fields.integer("gru_hidden_dim"),
        pure_draft_prefix_len=fields.optional_integer("pure_draft_prefix_len") or 0,
    )
    return file.build(DominoHead, config)
