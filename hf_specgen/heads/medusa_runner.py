"""Runs Medusa heads: from the target's hidden states to the logits of each head."""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import PreTrainedModel

from hf_specgen.heads.lora import stacked_deltas
from hf_specgen.heads.medusa import MedusaHeads
from hf_specgen.targets.model_parts import output_logits, output_matrix


class MedusaRunner:
    """A set of heads attached to its target.

    Args:
        heads: on the target's device, in its dtype.
        target: its output matrix and embeddings are shared by the heads.
        lora: the `PeftModel` with the heads' LoRA matrices on the output matrix, if they have any.
    """

    def __init__(self, heads: MedusaHeads, target: PreTrainedModel, lora: Any = None):
        self.heads, self._target = heads, target
        self._embeddings = cast(Any, target.get_input_embeddings()) if heads.config.reads_token else None
        matrix = output_matrix(target).weight
        self._device, self._dtype = matrix.device, matrix.dtype
        self._deltas = None if lora is None else tuple(delta.to(matrix) for delta in stacked_deltas(lora))

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The logits of all heads, scaled and capped like the target's own.

        Args:
            hidden: `[rows, hidden]` the hidden states that predicted each row's last token.
            tokens: `[rows, tokens]` those tokens, and for heads with `reads_path` those after them.

        Returns:
            `[rows, heads, vocab]`; a shared output matrix is read once for all heads.
        """
        states = self.heads(hidden.to(self._device, self._dtype), self._embedded(tokens))  # [rows, heads, hidden]
        return output_logits(self._target, states, self._outputs)

    @torch.no_grad()
    def head_logits(self, head: int, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The logits of one head.

        Args:
            head: which.
            hidden: `[nodes, hidden]` the hidden state that predicted the last token of each node's row.
            tokens: `[nodes, head + 1]` that token and the path to the node, for heads with `reads_path`.

        Returns:
            `[nodes, vocab]`.
        """
        state = self.heads.head_state(head, hidden.to(self._device, self._dtype), self._embedded(tokens))
        return output_logits(self._target, state, lambda states: self._output(head, states))

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor | None:
        if self._embeddings is None:
            return None
        return cast(torch.Tensor, self._embeddings(tokens.to(self._embeddings.weight.device))).to(
            self._device, self._dtype
        )

    def _output(self, head: int, state: torch.Tensor) -> torch.Tensor:
        if self.heads.config.own_outputs:
            return cast(torch.Tensor, self.heads.lm_heads[head](state))
        shared = output_matrix(self._target)(state)
        return cast(
            torch.Tensor,
            shared if self._deltas is None else shared + state @ self._deltas[0][head] @ self._deltas[1][head],
        )

    def _outputs(self, states: torch.Tensor) -> torch.Tensor:
        if self.heads.config.own_outputs:
            return torch.stack([matrix(states[:, head]) for head, matrix in enumerate(self.heads.lm_heads)], dim=1)
        shared = output_matrix(self._target)(states)
        if self._deltas is None:
            return cast(torch.Tensor, shared)
        down, up = self._deltas  # [heads, hidden, rank], [heads, rank, vocab]
        return cast(torch.Tensor, shared + (states.transpose(0, 1) @ down @ up).transpose(0, 1))
