"""Medusa heads at work: from the target's states to each head's scores."""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import PreTrainedModel

from hf_specgen.heads.lora import stacked_deltas
from hf_specgen.heads.medusa import MedusaHeads
from hf_specgen.target.model_parts import output_logits, output_matrix


class MedusaReader:
    """A set of heads on its target.

    Args:
        heads: on the target's device, in its dtype.
        target: whose output matrix and embeddings the heads share.
        lora: the `PeftModel` of the heads' deltas on that matrix, if there is one.
    """

    def __init__(self, heads: MedusaHeads, target: PreTrainedModel, lora: Any = None):
        self.heads, self._target = heads, target
        self._embeddings = cast(Any, target.get_input_embeddings()) if heads.config.reads_token else None
        matrix = output_matrix(target).weight
        self._device, self._dtype = matrix.device, matrix.dtype
        self._deltas = None if lora is None else tuple(delta.to(matrix) for delta in stacked_deltas(lora))

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The heads' logits, scaled and capped as the target's own.

        Args:
            hidden: `[rows, hidden]` the states that each row's last token was chosen from.
            tokens: `[rows]` those tokens.

        Returns:
            `[rows, heads, vocab]`; the shared output matrix is read once for all of them.
        """
        embedded = None
        if self._embeddings is not None:
            embedded = self._embeddings(tokens.to(self._embeddings.weight.device)).to(self._device, self._dtype)
        states = self.heads(hidden.to(self._device, self._dtype), embedded)  # [rows, heads, hidden]
        return output_logits(self._target, states, self._outputs)

    def _outputs(self, states: torch.Tensor) -> torch.Tensor:
        if self.heads.config.own_outputs:
            return torch.stack([matrix(states[:, head]) for head, matrix in enumerate(self.heads.lm_heads)], dim=1)
        shared = output_matrix(self._target)(states)
        if self._deltas is None:
            return cast(torch.Tensor, shared)
        down, up = self._deltas  # [heads, hidden, rank], [heads, rank, vocab]
        return cast(torch.Tensor, shared + (states.transpose(0, 1) @ down @ up).transpose(0, 1))
