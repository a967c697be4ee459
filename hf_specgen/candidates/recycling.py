"""Token Recycling: drafts from the tokens that the target itself considered likely in earlier steps.

Verification computes the target's logits after every node of a draft, also after those that are rejected. The most
likely tokens after each token are kept in a table, one row for each token of the vocabulary. Following the table from
the last token on gives a tree; nothing is trained, and drafting needs no forward pass.

Source: Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling"
(2024). There the tree is a fixed template; here it grows best-first by the probabilities of the tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hf_specgen.call import memory
from hf_specgen.candidates.base import Candidates, Depth, DraftSession, TreeSetting, vocabulary_size
from hf_specgen.candidates.best_first import SearchLimits, SearchSession, SearchTree, best_first
from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.depth import Policy
from hf_specgen.verification.result import TopTokens, VerificationResult

CANDIDATES_PER_TOKEN = 8  # as in the paper: the eighth candidate token is accepted in about 1% of the cases
MAX_DEPTH = 8  # maximum depth of k="auto": the template of the paper has 6 levels
RECYCLED_FRACTION = 0.5
"""Acceptance of a token over the probability that the target last gave it after the same token: 0.45 to 0.5 with
SmolLM2-135M, 0.6 with the bundled model."""
FRACTION_AFTER_RECYCLED = 0.8
"""The same of a token that follows an accepted recycled token: the text then resembles the text that the table is from,
so 0.7 with SmolLM2-135M and 0.95 with the bundled model."""


class RecyclingTable:
    """The `CANDIDATES_PER_TOKEN` most likely next tokens after each token, and their probabilities.

    Takes 48 bytes for each token of the vocabulary: 6 MB at 128,000. Calls that run at the same time share it; each
    reads a row at once.

    Example:
        >>> table = RecyclingTable(vocab_size=100)
        >>> table.update(TopTokens(np.array([5]), np.array([[7, 9]]), np.array([[0.6, 0.3]])))
        >>> table.row(5)[0], table.row(7)
        ([7, 9], ([], []))
    """

    def __init__(self, vocab_size: int):
        self._candidate_tokens: NDArray[np.int32] = np.full((vocab_size, CANDIDATES_PER_TOKEN), -1, dtype=np.int32)
        self._probabilities: NDArray[np.float16] = np.zeros((vocab_size, CANDIDATES_PER_TOKEN), dtype=np.float16)

    def update(self, top: TopTokens) -> None:
        """Overwrite the row of every input token of a step; of a token that occurs twice the last position counts.

        There may be fewer than `CANDIDATES_PER_TOKEN` for each, as in a smaller vocabulary. Tokens that the target
        cannot choose, as in place of images at the end of a prompt, are left out.
        """
        count = top.candidate_tokens.shape[1]
        in_table = (top.tokens >= 0) & (top.tokens < len(self._candidate_tokens))
        tokens = top.tokens[in_table]
        self._candidate_tokens[tokens, :count] = top.candidate_tokens[in_table]
        self._candidate_tokens[tokens, count:] = -1
        with np.errstate(under="ignore"):  # float16 rounds the smallest ones to 0
            self._probabilities[tokens, :count] = top.probabilities[in_table]

    def row(self, token: int) -> tuple[list[int], list[float]]:
        """The candidate tokens after a token, most likely first, and their probabilities; empty if none are stored."""
        if not 0 <= token < len(self._candidate_tokens):
            return [], []
        candidates = self._candidate_tokens[token].tolist()
        probabilities = self._probabilities[token].tolist()
        count = candidates.index(-1) if candidates[-1] < 0 else CANDIDATES_PER_TOKEN
        return candidates[:count], probabilities[:count]


class RecyclingCandidates(Candidates):
    """Drafts with Token Recycling. Needs nothing; what it has learnt about a target is kept from call to call.

    Args:
        k, tree, policy: as for `Candidates`.

    Raises:
        ValueError: if a number is out of range.

    Example:
        >>> RecyclingCandidates(k=6, tree=32)
        RecyclingCandidates(k=6, tree=32)
    """

    negligible_draft_cost = True
    latency_kind = "recycling"

    def __init__(self, k: Depth = "auto", *, tree: TreeSetting = None, policy: Policy | None = None):
        super().__init__(k, policy, tree=tree, max_k=MAX_DEPTH)

    def start(self, batch: DraftBatch) -> DraftSession:
        return RecyclingSession(self, batch)


class RecyclingSession(SearchSession[int]):
    """The state of one call, with the target's table, which it updates."""

    top_tokens = CANDIDATES_PER_TOKEN

    def __init__(self, settings: RecyclingCandidates, batch: DraftBatch):
        super().__init__(batch, settings.k, settings.tree)
        vocab_size = vocabulary_size(batch.model)
        self._table_key = ("recycling", vocab_size)
        # In rejection sampling the text depends on the draft: it must not depend on earlier calls too.
        model = batch.model if batch.call.settings.memory and not batch.wants_q else None
        self._table = memory.recall(model, self._table_key, lambda: RecyclingTable(vocab_size))
        memory.store(model, self._table_key, self._table)  # now, so that requests side by side share it

    def search(self, row: int, depth: int, limits: SearchLimits) -> SearchTree[int]:
        """The most probable candidate tokens after the row's last token."""

        def children(token: int, depth: int) -> list[tuple[int, float, int]]:
            candidates = self.candidate_tokens(token, is_recycled=depth > 0)
            return [(candidate, acceptance, candidate) for candidate, acceptance in candidates]

        return best_first(self.batch.state.last_token(row), children, depth, limits)

    def candidate_tokens(self, token: int, is_recycled: bool) -> list[tuple[int, float]]:
        """Likely next tokens after a token, itself recycled or not, and the probability that each is accepted."""
        tokens, probabilities = self._table.row(token)
        fraction = FRACTION_AFTER_RECYCLED if is_recycled else RECYCLED_FRACTION
        pairs = zip(tokens, probabilities, strict=True)
        return [(candidate, fraction * probability) for candidate, probability in pairs]

    def observe(self, result: VerificationResult) -> None:
        """Store the candidate tokens after every input token of the step."""
        super().observe(result)
        if result.top_tokens is not None:
            self._table.update(result.top_tokens)
