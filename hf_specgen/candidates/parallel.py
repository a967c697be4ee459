"""The session of heads that draft all depths in one pass from the target's hidden states: DFlash, JetSpec, P-EAGLE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from hf_specgen.candidates.base import DraftCall
from hf_specgen.candidates.features import UnreadFeatures, unfinished_rows
from hf_specgen.candidates.marginals import MarginalSession
from hf_specgen.heads.acceptance import RANKS
from hf_specgen.heads.base import AttachedHead
from hf_specgen.targets.hidden_states import HiddenStateTarget
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult


class ParallelDraft(Protocol):
    """Reads text and drafts with a head that drafts in one pass: `BlockReader` or `ParallelReader`."""

    def draft(
        self,
        features: Sequence[torch.Tensor],
        next_tokens: Sequence[Sequence[int]],
        needed: Sequence[bool],
        depth: int,
    ) -> torch.Tensor:
        """Read new positions, and draft the tokens after them; `[batch, depth, vocab]` logits.

        Args:
            features, next_tokens: as `UnreadFeatures.take` returns them.
            needed: rows that have not ended.
            depth: how many tokens to draft.
        """


class ParallelSession(MarginalSession):
    """The state of one call.

    Args:
        call: the call.
        target: keeps the hidden states of its passes.
        attached: the head on its target.
        reader: the head's cache, and its passes.
        depth: how many tokens are drafted at most.
        tree: number of nodes; "auto"; None for chains.
    """

    def __init__(
        self,
        call: DraftCall,
        target: HiddenStateTarget,
        attached: AttachedHead,
        reader: ParallelDraft,
        depth: int,
        tree: str | int | None,
    ):
        super().__init__(call, depth, tree, min(RANKS, attached.head.config.draft_vocab_size))
        self.reader = reader
        self._unread = UnreadFeatures(call, target, attached)
        self.passes: list[int] = []
        self._drafting: list[bool] = []

    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        if self._unread.is_empty:
            self._unread.receive()
        self.passes, self._drafting = [], [depth > 0 for depth in max_depths]
        return super().draft(max_depths)

    def observe(self, result: VerificationResult) -> None:
        """Count acceptance, and receive the hidden states of the tokens that were accepted."""
        super().observe(result)
        self._unread.receive()

    def depth_logits(self, depth: int) -> torch.Tensor:
        """Read the text since the last draft with the target's features, and draft; ended rows are dropped.

        Only rows that draft read: the others, which are ahead of slower rows, may have no new token to continue.
        """
        features, tokens = self._unread.take(self._drafting)
        needed = unfinished_rows(self.call)
        self.passes = [sum(needed) * depth]
        return self.reader.draft(features, tokens, needed, depth).float()
