"""The prompt of a call: its tokens and what `generate` prepared for them, and how a draft is appended to them."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_specgen import compat
from hf_specgen.tree import DraftTree


class Prompt:
    """A prompt that can be read together with draft tokens.

    Args:
        input_ids: `[batch, prompt]`, left-padded.
        config, kwargs: as prepared by `generate`.
        last_position: the last position of the model's position table.
        mask: the name of the argument that marks padding among these tokens.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        config: GenerationConfig,
        kwargs: dict[str, Any],
        last_position: int,
        mask: str = "attention_mask",
    ):
        self.input_ids, self.config, self.kwargs, self.last_position = input_ids, config, kwargs, last_position
        self._mask = mask

    @property
    def padding(self) -> torch.Tensor | None:
        """`[batch, slots]` bool, False for padding; None if there is none."""
        mask = self.kwargs.get(self._mask)
        return None if mask is None or bool((mask != 0).all()) else mask != 0

    def takes_drafts(self, cached: int) -> bool:
        """Whether a draft can be read with it: not in chunks, and if there is a token that is not cached."""
        mask = self.kwargs.get(self._mask)
        width = compat.mask_length(self.config) if mask is None else mask.shape[1]
        nothing_unread = width == self.input_ids.shape[1] <= cached
        return self.config.prefill_chunk_size is None and not nothing_unread

    def read(self, model: PreTrainedModel, cache: Any, draft: DraftTree) -> torch.Tensor:
        """The logits of a pass over the prompt and the columns of draft tokens after it."""
        kwargs = {**self.kwargs, "past_key_values": cache, **self.longer(draft.nodes)}
        input_ids = torch.cat([self.input_ids, draft.tokens.to(self.input_ids)], dim=1)
        config: Any = copy.copy(self.config)
        if kwargs.get("attention_mask") is None and draft.nodes:
            # By this length `generate` decides whether the prompt begins in the cache.
            compat.set_mask_length(config, compat.mask_length(config) + draft.nodes)
        outputs = compat.prefill(model, input_ids, config, kwargs)
        return cast(torch.Tensor, outputs.logits)

    def check_read(self, positions: int) -> None:
        """Raise if a pass over the prompt cached more positions than it has tokens, or none."""
        tokens = self.input_ids.shape[1]
        if not 0 < positions <= tokens:
            raise ValueError(
                f"the model cached {positions} positions for a prompt of {tokens} tokens; models that add "
                "positions of their own (prefix or prompt tuning) do not work with candidate_generator="
            )

    def longer(self, columns: int) -> dict[str, Any]:
        """Positions, attention mask and `logits_to_keep` of the prompt, extended by columns for draft tokens.

        Only decoder-only models draft in prefill (`Target.supports_prefill_drafts`), so the mask is `attention_mask`.
        """
        longer: dict[str, Any] = {}
        if columns == 0:
            return longer
        mask, positions = self.kwargs.get("attention_mask"), self.kwargs["position_ids"]
        more = positions[..., -1:] + torch.arange(1, columns + 1, device=positions.device)
        within_table = positions[..., -1:] <= self.last_position
        more = torch.where(within_table, more.clamp(max=self.last_position), more)
        longer["position_ids"] = torch.cat([positions, more], dim=-1)
        if mask is not None:
            longer["attention_mask"] = torch.cat([mask, mask.new_ones(len(mask), columns)], dim=1)
        if "logits_to_keep" in self.kwargs:
            longer["logits_to_keep"] = 1 + columns
        return longer
