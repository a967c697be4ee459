"""Autoregressive drafting with a network: the loop that draft models and layer skip share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from hf_specgen.candidates.base import DraftSession
from hf_specgen.state import Call
from hf_specgen.tree import DraftTree, chain_parents


class AutoregressiveSession(DraftSession):
    """Drafts a chain for every row at once.

    Args:
        call: the call.
        k: maximum length of a draft.
        confidence_threshold: a row's draft ends behind a token whose probability is below this.
        vocab: size of the target's vocabulary; the draft's may be padded to another size.
    """

    def __init__(self, call: Call, k: int, confidence_threshold: float, vocab: int):
        super().__init__(call)
        self._k, self._threshold, self._vocab = k, confidence_threshold, vocab
        self.budget: Sequence[int] = ()
        """The budget of the current draft."""
        self.drafted = 0
        """How many tokens were drafted for each row in the last step."""
        self.passes: list[int] = []

    def room(self, row: int) -> int:
        """The maximum number of tokens that can be drafted for a row."""
        return self._k

    @abstractmethod
    def first_scores(self) -> torch.Tensor:
        """`[batch, vocab]` logits for the token after each row's last one; adds its forward pass to `passes`."""

    @abstractmethod
    def next_scores(self, tokens: torch.Tensor) -> torch.Tensor:
        """`[batch, vocab]` logits for the token after the draft tokens `tokens` `[batch]`; adds to `passes`."""

    @torch.no_grad()
    def draft(self, budget: Sequence[int]) -> DraftTree:
        self.budget, self.passes = budget, []
        lengths = [min(self._k, depth, self.room(row)) for row, depth in enumerate(budget)]
        self.drafted = 0
        if max(lengths) == 0:
            return DraftTree.empty(len(lengths))
        tokens: list[torch.Tensor] = []
        qs: list[torch.Tensor] = []
        while self.drafted < max(lengths):
            scores = self._warp(self.next_scores(tokens[-1]) if tokens else self.first_scores())
            tokens.append(self._pick(scores))
            if self._wants_q:
                qs.append(torch.nn.functional.pad(scores.softmax(dim=-1), (0, self._vocab - scores.shape[-1])))
            self.drafted += 1
            self._stop_below_threshold(scores, lengths)
        parents = tuple(chain_parents(length) for length in lengths)
        return DraftTree(torch.stack(tokens, dim=1), parents, torch.stack(qs, dim=1) if qs else None)

    def draft_at_prefill(self, budget: Sequence[int]) -> DraftTree:
        return self.draft(budget)

    @property
    def _wants_q(self) -> bool:
        return self.call.verification is not None and self.call.verification.wants_q

    def _warp(self, logits: torch.Tensor) -> torch.Tensor:
        """The draft's logits after the target's score-only processors."""
        scores = logits[:, : self._vocab].float()
        return scores if self.call.processors is None else self.call.processors.warp(scores)

    def _pick(self, scores: torch.Tensor) -> torch.Tensor:
        if self.call.verification is None:
            return scores.argmax(dim=-1)
        steps = [len(text) + self.drafted for text in self.call.state.generated]
        return self.call.verification.sample_draft(scores, steps)

    def _stop_below_threshold(self, scores: torch.Tensor, lengths: list[int]) -> None:
        if not self._threshold:
            return
        confidence = scores.softmax(dim=-1).amax(dim=-1).tolist()
        for row, value in enumerate(confidence):
            if value < self._threshold:
                lengths[row] = min(lengths[row], self.drafted)


def vocabulary_size(model: PreTrainedModel) -> int:
    """The number of logits of a model."""
    return int(cast(Any, model.get_output_embeddings()).weight.shape[0])
