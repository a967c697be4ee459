"""DFlash2: a block head with short dynamic convolutions around each sublayer, and a selector of pairs of candidates.

The convolution mixes each row of the block with the rows before it, by kernels of which a part is computed from the
row itself for each group of channels. The selector scores candidate c behind token x with `U[c] + (P[x] * H h)·S[c]`,
where c is one of the tokens with the highest base logits U.

Source: DFlash2 (2026), as implemented by z-lab's package dflash and by the package speculators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from hf_specgen.heads.block import BlockConfig, block_options
from hf_specgen.heads.head_file import HeadFile
from hf_specgen.heads.layers import DecoderLayer, LayerConfig
from hf_specgen.heads.path_head import Embed, PathHead, Step

NOT_IN_SPECULATORS = {"output_multiplier", "final_logit_softcapping", "input_embedding_scale"}
"""Fields of `BlockConfig` that have no key in the format of speculators."""


@dataclass(frozen=True, kw_only=True)
class DFlash2Config(BlockConfig):
    """Configuration of `DFlash2Head`."""

    conv_kernel_size: int = 2  # rows that a convolution reads
    conv_group_size: int = 16  # channels that share a dynamic kernel
    selector_rank: int = 256
    selector_top_k: int = 16  # candidates of a position

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"conv_group_size {self.conv_group_size} does not divide the hidden size {self.hidden_size}"
            )
        if self.conv_kernel_size > self.block_size:
            raise ValueError(f"conv_kernel_size {self.conv_kernel_size} exceeds block_size {self.block_size}")


class DynamicConvolution(nn.Module):
    """Kernels before and after a sublayer; rows before the block count as zero."""

    def __init__(self, width: int, kernel_size: int, group_size: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.zeros(2, kernel_size, width))
        self.kernel_projection = nn.Linear(width, 2 * kernel_size * (width // group_size), bias=False)
        self._group_size = group_size

    def forward(self, rows: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The normalised rows `[batch, block, width]` of the block, convolved before and after the sublayer."""
        dynamic = self.kernel_projection(rows).unflatten(-1, (2, self.base_kernel.shape[1], -1))
        kernels = self.base_kernel + dynamic.repeat_interleave(self._group_size, dim=-1)
        before, after = kernels.unbind(dim=2)
        return _convolved(after, sublayer(_convolved(before, rows)))


def _convolved(kernel: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The sum over t of `kernel[..., t, :]` times the rows shifted down by t."""
    length = rows.shape[1]
    shifted = torch.stack([pad(rows, (0, 0, t, 0))[:, :length] for t in range(kernel.shape[2])], dim=2)
    return (kernel * shifted).sum(dim=2)


class DFlash2Layer(DecoderLayer):
    """A decoder layer with a convolution around attention and one around the MLP."""

    def __init__(self, config: LayerConfig, layer_index: int, kernel_size: int, group_size: int) -> None:
        super().__init__(config, layer_index)
        self.attention_conv = DynamicConvolution(config.hidden_size, kernel_size, group_size)
        self.mlp_conv = DynamicConvolution(config.hidden_size, kernel_size, group_size)

    def forward(self, hidden: torch.Tensor, *places: Any) -> torch.Tensor:
        """`[batch, block, hidden]` to the same; `places` as for `Attention`."""
        normed = self.input_layernorm(hidden)
        hidden = hidden + self.attention_conv(normed, lambda rows: self.self_attn(rows, *places))
        return hidden + self.mlp_conv(self.post_attention_layernorm(hidden), self.mlp)


class CandidateSelector(nn.Module):
    """The matrices of the selector."""

    def __init__(self, vocab: int, width: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)


class DFlash2Head(PathHead):
    """A DFlash2 head."""

    config: DFlash2Config

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.max_candidates = config.selector_top_k
        self.candidate_selector = CandidateSelector(config.vocab_size, config.hidden_size, config.selector_rank)

    def make_layer(self, index: int) -> DecoderLayer:
        """A layer with convolutions."""
        config = self.config
        return DFlash2Layer(config.layer, index, config.conv_kernel_size, config.conv_group_size)

    def keys(self) -> torch.Tensor:
        """`[vocab, rank]`."""
        return self.candidate_selector.successor_codebook

    def step(self, hidden: torch.Tensor, tokens: torch.Tensor, state: torch.Tensor, depth: int, embed: Embed) -> Step:
        """The previous token's row of the codebook, weighted by the position's output."""
        selector = self.candidate_selector
        return selector.predecessor_codebook[tokens] * selector.hidden_projection(hidden), state


def load_dflash2(file: HeadFile) -> DFlash2Head:
    """A DFlash2 head of z-lab or speculators; sliding layers of the latter are bidirectional unless configured."""
    fields = file.fields
    sizes = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    options = block_options(file)
    options |= {name: fields.integer(name) for name in sizes if fields.get(name) is not None}
    return file.build(DFlash2Head, DFlash2Config(**options))
