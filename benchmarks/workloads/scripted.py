"""A target that generates a given text."""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import GenerationMixin, LlamaConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_specgen.compat import CACHE


class ScriptedTarget(PreTrainedModel, GenerationMixin):
    """A model without layers whose logits always point to the next token of `script`; counts its `forwards`."""

    config_class = LlamaConfig
    main_input_name = "input_ids"
    _supports_sdpa = True
    _no_split_modules: list[str] = []

    def __init__(self, vocab_size: int):
        super().__init__(
            LlamaConfig(
                vocab_size=vocab_size,
                hidden_size=8,
                num_hidden_layers=1,
                num_attention_heads=1,
                max_position_embeddings=10**6,
                eos_token_id=None,
            )
        )
        self.anchor = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
        self.script = torch.zeros(1, dtype=torch.long)
        self.forwards = 0

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **arguments: Any,
    ) -> CausalLMOutputWithPast:
        """Logits that are 1 at the token of the script after each position, 0 elsewhere."""
        self.forwards += 1
        assert position_ids is not None
        states = torch.zeros(*input_ids.shape, 1)[:, None]
        cache = arguments[CACHE]
        cache.update(states, states, 0)
        following = self.script[(position_ids + 1).clamp(max=len(self.script) - 1)]
        logits = torch.zeros(*input_ids.shape, self.config.vocab_size).scatter_(2, following[..., None], 1.0)
        return CausalLMOutputWithPast(logits=cast(Any, logits), **{CACHE: cache})
