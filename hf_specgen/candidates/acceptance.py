"""Acceptance: a drafter's probability of a token is taken for the probability that the target accepts it.

With samples it is the softmax of `VerificationSession.draft_scores`.
"""

from __future__ import annotations

from collections import Counter

import torch

from hf_specgen.call import memory
from hf_specgen.candidates.base import DraftCall, DraftSession
from hf_specgen.candidates.draft_window import warn_of_length
from hf_specgen.tree import DraftTree
from hf_specgen.verification.result import VerificationResult

MIN_PROBABILITY, MAX_PROBABILITY = 0.001, 0.999
"""Limits of an acceptance probability: every node is strictly less likely than its parent, and none impossible."""


class NetworkSession(DraftSession):
    """Base class of drafters with a network. Warns where acceptance falls with the length of the texts."""

    def __init__(self, call: DraftCall):
        super().__init__(call)
        self.wants_q = call.verification is not None and call.verification.wants_q
        self._tree = DraftTree.empty(call.state.batch)
        self._by_length: Counter[tuple[int, bool]] | None = None
        self._length_key = "length", call.drafting.key

    def watch_length(self) -> None:
        """Warn if acceptance falls with the length of the texts: of a drafter that could have a window."""
        self._by_length = memory.recall(self.call.model if self.call.remembers else None, self._length_key, Counter)

    def not_drafted(self, batch: int) -> DraftTree:
        """An empty draft."""
        self._tree = DraftTree.empty(batch)
        return self._tree

    def observe(self, result: VerificationResult) -> None:
        """Count by the length of the texts which drafts had an accepted token."""
        if self._by_length is None or not self._tree.nodes:
            return
        for row, path in enumerate(result.paths):
            if path is not None and self._tree.parents[row]:
                length = len(self.call.state.prompts[row]) + len(self.call.state.generated[row])
                self._by_length[length.bit_length(), result.accepted[row] > 0] += 1

    def end(self) -> None:
        if self._by_length is not None:
            warn_of_length(self._by_length, self.call.drafting.name)
            if self.call.remembers:
                memory.store(self.call.model, self._length_key, self._by_length)


def finite(scores: torch.Tensor) -> torch.Tensor:
    """A drafter's logits with NaN as the lowest one, which `topk` would rank first, and without infinity.

    One that overflows would make all probabilities NaN; and some logits processors refuse both.
    """
    return scores.nan_to_num(-1e20, 1e20, -1e20)


def confidence_by_rank(largest: torch.Tensor, ranks: int) -> torch.Tensor:
    """`[…]` largest probabilities of distributions to `[…, ranks]` confidences in samples drawn from them.

    In rejection sampling a node must not be left out because of its token, only because of its rank: otherwise the
    sampled tokens would not have the distribution q.
    """
    rest = 1 - largest.clamp(max=0.95)
    return largest[..., None] * rest[..., None] ** torch.arange(ranks, device=largest.device)
