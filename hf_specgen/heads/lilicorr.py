"""LiLiCorr: a block head that scores all pairs of neighbouring candidates in one pass.

The block (DFlash, or DFlash2's layers with convolutions) proposes the K likeliest tokens of each position. A small
transformer reads all of these candidates side by side, and gives each of them an outgoing and an incoming vector:

    position          1             2             3
    candidates    a  b  c       d  e  f       g  h  i        one row of the transformer each
    scores      start·in(a)   out(a)·in(d)  out(d)·in(g)     scaled cosines: [K], then [K, K] for each further position

All scores exist before a token is chosen, so a tree costs no further pass. The block's logits are not added to them.

Source: LiLiCorr (2026), https://arxiv.org/abs/2608.20530, as implemented by SGLang.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import normalize, silu

from hf_specgen.drafter import DepthLogits
from hf_specgen.heads.base import BoundHead
from hf_specgen.heads.block import BlockConfig, BlockHead, block_options
from hf_specgen.heads.dflash2 import DFlash2Layer
from hf_specgen.heads.head_file import HeadFile
from hf_specgen.heads.layers import DecoderLayer

SIZES = ("candidate_topk", "num_layers", "num_heads", "factor_dim")
"""Integers that config.json must have, under these names after `lilicorr_`."""
NUMBERS = ("mlp_ratio", "vector_eps", "logit_scale")
"""Other numbers that it must have, under names of the same form."""


@dataclass(frozen=True, kw_only=True)
class LiLiCorrConfig(BlockConfig):
    """Configuration of `LiLiCorrHead`."""

    candidate_topk: int  # candidates of a position
    lattice_size: int  # width of the transformer over the candidates
    num_layers: int
    num_heads: int
    factor_dim: int  # width of the vectors whose cosines are the scores
    mlp_ratio: float
    vector_eps: float  # least norm by which a vector is divided
    logit_scale: float
    conv_kernel_size: int = 0  # as for DFlash2; 0: layers without convolutions
    conv_group_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.candidate_topk <= min(16, self.vocab_size):
            most = min(16, self.vocab_size)
            raise ValueError(f"lilicorr_candidate_topk must be between 1 and {most}, got {self.candidate_topk}")
        if self.first_proposing_position != 1:
            raise ValueError("a LiLiCorr head whose anchor's position proposes a token is not supported")
        if self.lattice_size % self.num_heads:
            raise ValueError(f"lilicorr_num_heads {self.num_heads} does not divide the width {self.lattice_size}")


def two_layers(width: int, inner: int, out: int) -> nn.Module:
    """Two linear layers around SiLU."""
    return nn.Sequential(OrderedDict(up_proj=nn.Linear(width, inner), act=nn.SiLU(), down_proj=nn.Linear(inner, out)))


class LatticeLayer(nn.Module):
    """A layer of the transformer over the candidates."""

    def __init__(self, config: LiLiCorrConfig) -> None:
        super().__init__()
        width = config.lattice_size
        self.attn_norm = nn.RMSNorm(width, eps=config.layer.rms_norm_eps)
        self.attn = nn.MultiheadAttention(width, config.num_heads, batch_first=True)
        self.mlp_norm = nn.RMSNorm(width, eps=config.layer.rms_norm_eps)
        self.mlp = two_layers(width, int(width * config.mlp_ratio), width)

    def forward(self, rows: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """`[batch, rows, width]` to the same; `bias` `[batch * heads, rows, rows]` is added to attention scores."""
        normed = self.attn_norm(rows)
        rows = rows + self.attn(normed, normed, normed, attn_mask=bias, need_weights=False)[0]
        return rows + self.mlp(self.mlp_norm(rows))


class CandidateLattice(nn.Module):
    """Scores each candidate of a position after each candidate of the position before."""

    def __init__(self, config: LiLiCorrConfig) -> None:
        super().__init__()
        self._config = config
        hidden = config.hidden_size
        width = config.lattice_size
        self.token_proj = nn.Identity() if width == hidden else nn.Linear(hidden, width)
        self.pass_hidden_proj = nn.Linear(hidden, width)
        self.context_proj = nn.Linear(hidden, width)
        self.feature_norm = nn.LayerNorm(5)
        self.feature_mlp = two_layers(5, width, width)
        self.slot_embedding = nn.Parameter(torch.zeros(config.block_size - 1, 1, width))
        self.rank_embedding = nn.Parameter(torch.zeros(config.candidate_topk, width))
        self.relative_slot_bias = nn.Parameter(torch.zeros(config.num_heads, 2 * config.block_size - 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(config.num_heads))
        self.layers = nn.ModuleList(LatticeLayer(config) for _ in range(config.num_layers))
        self.output_norm = nn.RMSNorm(width, eps=config.layer.rms_norm_eps)
        self.anchor_norm = nn.RMSNorm(width, eps=config.layer.rms_norm_eps)
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head = nn.Linear(width, config.factor_dim)
        self.in_head = nn.Linear(width, config.factor_dim)
        self.anchor_out_head = nn.Linear(width, config.factor_dim)

    def forward(
        self, embeddings: torch.Tensor, log_probabilities: torch.Tensor, hidden: torch.Tensor, context: torch.Tensor
    ) -> torch.Tensor:
        """The scores of each position's candidates after each candidate of the position before.

        Args:
            embeddings: `[batch, positions, K, hidden]` of the candidates, the most probable one first.
            log_probabilities: `[batch, positions, K]` of the candidates, in the whole vocabulary.
            hidden: `[batch, positions, hidden]` outputs of the block.
            context: `[batch, hidden]` the context entry of the newest position that the target has processed.

        Returns:
            `[batch, positions, K, K]`, the last dimension for the candidates that are scored. At the first position all
            K rows are the scores after the anchor.
        """
        positions, count = log_probabilities.shape[1:]
        rows = self.token_proj(embeddings) + self.pass_hidden_proj(hidden)[:, :, None]
        rows = rows + self.feature_mlp(self.feature_norm(_features(log_probabilities).to(rows)))
        rows = (rows + self.slot_embedding[:positions] + self.rank_embedding).flatten(1, 2)
        bias = self._bias(positions, count).repeat(len(rows), 1, 1)
        for layer in self.layers:
            rows = layer(rows, bias)
        rows = self.output_norm(rows)
        anchor = self.anchor_norm(self.context_proj(context))[:, None]
        inputs = torch.cat((rows, anchor.expand_as(rows), rows * anchor), dim=-1)
        factors = silu(self.factor_input_proj(inputs)).unflatten(1, (positions, count))
        start = self.anchor_out_head(anchor)[:, None].expand(-1, -1, count, -1)
        parts = torch.cat((start, self.out_head(factors[:, :-1])), dim=1), self.in_head(factors)
        before, after = (normalize(part, dim=-1, eps=self._config.vector_eps) for part in parts)
        return self._config.logit_scale * (before @ after.transpose(2, 3)).float()

    def _bias(self, positions: int, count: int) -> torch.Tensor:
        """`[heads, rows, rows]` what is added to attention scores, by the distance of two candidates' positions."""
        place = torch.arange(positions, device=self.same_slot_bias.device).repeat_interleave(count)
        distance = place[:, None] - place
        bias = self.relative_slot_bias[:, distance + self._config.block_size - 1]
        return bias + (distance == 0) * self.same_slot_bias[:, None, None]


def _features(log_probabilities: torch.Tensor) -> torch.Tensor:
    """`[..., K, 5]` features of candidates with these log-probabilities `[..., K]`, likeliest first."""
    count = log_probabilities.shape[-1]
    rank = torch.arange(count, device=log_probabilities.device).expand_as(log_probabilities)
    gap = log_probabilities - log_probabilities[..., :1]
    parts = (log_probabilities, log_probabilities.exp(), gap, rank / max(1, count - 1), (rank == 0).float())
    return torch.stack(parts, dim=-1)


class LiLiCorrHead(BlockHead):
    """A LiLiCorr head."""

    config: LiLiCorrConfig
    reads_all_positions = True

    def __init__(self, config: LiLiCorrConfig) -> None:
        super().__init__(config)
        self.lilicorr = CandidateLattice(config)

    def make_layer(self, index: int) -> DecoderLayer:
        """A layer, with convolutions if the config has their sizes."""
        sizes = self.config.conv_kernel_size, self.config.conv_group_size
        return DFlash2Layer(self.config.layer, index, *sizes) if sizes[0] else super().make_layer(index)

    def depth_logits(
        self, bound: BoundHead, hidden: torch.Tensor, features: Sequence[torch.Tensor], depth: int
    ) -> DepthLogits:
        """Scores of the candidates of each depth after each candidate of the depth before."""
        values, candidates = bound.target_logits(hidden).float().log_softmax(-1).topk(self.config.candidate_topk)
        # A row without new features drafts again from the same text; it is scored without a context entry.
        last = torch.stack([row[-1] if len(row) else row.new_zeros(row.shape[1:]) for row in features])
        context = self.hidden_norm(self.fc(last))
        embeddings = bound.embed(candidates.flatten(1)).unflatten(1, candidates.shape[1:])
        scores = self.lilicorr(embeddings, values, hidden, context)
        return DepthLogits(scores[:, :depth], candidates[:, :depth])


def load_lilicorr(file: HeadFile) -> LiLiCorrHead:
    """A LiLiCorr head of SGLang's layout."""
    fields = file.fields
    if fields.get("lilicorr_enabled") is False:
        raise ValueError("lilicorr_enabled is false, but there are tensors lilicorr.*; remove these, or the field")
    options = block_options(file)
    options |= {name: fields.integer(f"lilicorr_{name}") for name in SIZES}
    options |= {name: fields.number(f"lilicorr_{name}") for name in NUMBERS}
    options["lattice_size"] = fields.integer("lilicorr_hidden_size", 0) or options["hidden_size"]
    options |= {name: fields.optional_integer(name) or 0 for name in ("conv_kernel_size", "conv_group_size")}
    options |= {name: fields.number(name) for name in ("input_embedding_scale",) if fields.get(name) is not None}
    return file.build(LiLiCorrHead, LiLiCorrConfig(**options))
