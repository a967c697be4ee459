"""Multi-token prediction (MTP) layers, which are part of the checkpoint of some targets.

An MTP layer is one more decoder layer of the target's own kind, with inputs as those of an EAGLE-1 head. Layer k drafts
the token k + 2 places ahead from the output of layer k - 1; a single layer is applied to its own output again.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers.cache_utils import Cache

from hf_specgen.heads.base import DraftHead, HeadConfig, HeadOutput
from hf_specgen.heads.layers import causal_default

LINKS = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
"""Modules around the decoder layer, by their names in DeepSeek-V3: the norms of embedding and state, the projection of
both, the final norm."""


@dataclass(frozen=True, kw_only=True)
class MTPConfig(HeadConfig):
    """Configuration of `MTPHead`."""

    num_layers: int


class MTPLayer(nn.Module):
    """Norms, the projection of embedding and state, a decoder layer of the target's class, and a final norm."""

    def __init__(self, links: Mapping[str, nn.Module], block: nn.Module) -> None:
        super().__init__()
        self.embedding_norm, self.hidden_norm, self.projection, self.final_norm = (links[name] for name in LINKS)
        self.block = block


class MTPHead(DraftHead):
    """The MTP layers of a checkpoint; made by `mtp_format.load_mtp`."""

    config: MTPConfig

    def __init__(self, config: MTPConfig, layers: list[MTPLayer], rotary: nn.Module, float_masks: bool) -> None:
        super().__init__(config)
        self.layers, self.rotary, self.float_masks = nn.ModuleList(layers), rotary, float_masks

    def forward(
        self,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        step: int = 0,
    ) -> HeadOutput:
        """One pass of one layer; its output after its final norm is for the next step and for the output matrix."""
        index = step % self.config.num_layers
        layer = cast(Any, self.layers[index])
        both = torch.cat((layer.embedding_norm(embeddings), layer.hidden_norm(hidden)), dim=-1)
        states = layer.projection(both)
        mask = causal_default(attention_mask, states, cache, index)
        if mask is not None and self.float_masks:
            mask = torch.zeros_like(mask, dtype=states.dtype).masked_fill(~mask, torch.finfo(states.dtype).min)
        states = layer.block(
            states,
            position_embeddings=self.rotary(states, position_ids),
            attention_mask=mask,
            position_ids=position_ids,
            past_key_values=cache,
        )
        normed = layer.final_norm(states[0] if isinstance(states, tuple) else states)
        return HeadOutput(normed, normed)
