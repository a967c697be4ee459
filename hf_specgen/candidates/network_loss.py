"""Whether the networks of a combination are worth their time beside its members without a forward pass."""

from __future__ import annotations

from collections.abc import Sequence

from hf_specgen.call import memory
from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.depth.adaptive import FORGETTING, LOSS_PER_STEP, MAX_LOSS, DraftingLoss
from hf_specgen.tree import DraftTree
from hf_specgen.verification.result import VerificationResult, path_of_tokens

MAX_NETWORK_LOSS = MAX_LOSS / 2
"""Plain steps that networks may have lost before they pause: less than what pauses all drafting."""


class NetworkLoss:
    """Time that networks have lost, in plain steps, compared with the same steps without them.

    A step with a draft of networks loses the time of drafting and of verifying more nodes. It gains the tokens that the
    tree of the other members does not have; each is worth the time that these members take for a token in this call.
    That the merged tree lacks a copied token is no loss of the networks: `UnproposedTokens` corrects it. Networks pause
    while the loss is too high, and may lose 2% of the steps again, as with `AdaptiveDepth`. Without a latency model
    they never pause.
    """

    def __init__(self, batch: DraftBatch):
        self._batch = batch
        # Begins with the loss of the last call, without its gains.
        self._model = batch.model if batch.carries_over else None
        self._key = ("network loss", batch.call.drafting.key, batch.call.temperature)
        self._loss = memory.recall(self._model, self._key, DraftingLoss)
        # Steps without networks: their time in plain steps, and their tokens. One plain step is assumed.
        self._seconds = 1.0
        self._tokens = 1.0

    @property
    def is_too_high(self) -> bool:
        """Whether networks pause."""
        return self._loss.plain_steps >= MAX_NETWORK_LOSS

    def observe(
        self, result: VerificationResult, copied: DraftTree, verified: DraftTree, passes: Sequence[int]
    ) -> float:
        """Count a step; by how much the loss, where it is not a gain, has grown.

        Args:
            result: its outcome.
            copied: the tree of the members without a forward pass, also where it was not verified.
            verified: the tree that was.
            passes: tokens of each pass of the networks; empty if they did not draft.
        """
        rows = sum(path is not None for path in result.paths)
        latency = self._batch.step_latency(rows) if rows else None
        if latency is None:
            return 0.0
        plain = latency.target.seconds_of(rows)
        seconds = latency.target.seconds_of(rows * (1 + copied.nodes)) / plain
        emitted = sum(map(len, result.tokens)) / rows
        nodes = map(path_of_tokens, copied.token_lists(), copied.parents, result.tokens)
        tokens = 1 + sum(map(len, nodes)) / rows
        # What the other members take for a token, recent steps more than earlier ones.
        self._seconds = FORGETTING * self._seconds + seconds
        self._tokens = FORGETTING * self._tokens + tokens
        before = self._loss.plain_steps
        if passes:
            with_networks = latency.target.seconds_of(rows * (1 + verified.nodes)) + latency.drafter.draft(passes)
            gained = max(0.0, emitted - tokens) * self._seconds / self._tokens
            self._loss.add(with_networks / plain - seconds - gained)
        elif self.is_too_high:
            self._loss.add(-LOSS_PER_STEP)
            before = self._loss.plain_steps
        memory.store(self._model, self._key, self._loss)
        return max(0.0, self._loss.plain_steps) - max(0.0, before)
