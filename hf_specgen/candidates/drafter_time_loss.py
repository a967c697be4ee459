"""Whether the drafters of a combination save more time than they take, beside its members without a forward pass."""

from __future__ import annotations

from collections.abc import Sequence

from hf_specgen.call import memory
from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.depth.adaptive import FORGETTING, MAX_TIME_LOSS, TIME_LOSS_ALLOWANCE, DraftingTimeLoss
from hf_specgen.tree import DraftTree
from hf_specgen.verification.result import VerificationResult, path_of_tokens

MAX_DRAFTER_TIME_LOSS = MAX_TIME_LOSS / 2
"""What drafters may have lost before they pause, in units of T(1): less than what pauses all drafting."""


class DrafterTimeLoss:
    """Time that drafters have lost, in units of T(1), compared with the same steps without them.

    A step in which they draft loses the time of drafting and of verifying more nodes. It gains the tokens that the
    tree of the other members does not have; each counts as the time that these members take for a token in this call.
    A copied token that merging drops is not counted as a loss: `UnproposedTokens` adjusts the estimate. Drafters pause
    while the loss is too high; each step of a pause reduces it by 0.02, as with `AdaptiveDepth`. Without a latency
    model they never pause.
    """

    def __init__(self, batch: DraftBatch):
        self._batch = batch
        self._model = batch.model if batch.carries_over else None
        self._key = ("drafter time loss", batch.call.drafting.key, batch.call.temperature)
        # The loss of the last call, 0 if it was a gain, and so small that drafters pause for one step at most.
        earlier = memory.recall(self._model, self._key, DraftingTimeLoss)
        self._loss = DraftingTimeLoss(min(earlier.relative_time, MAX_DRAFTER_TIME_LOSS))
        # Every step as it would be without drafters: its time in units of T(1), its tokens. The prior is a plain step.
        self._time_without_drafters = 1.0
        self._tokens_without_drafters = 1.0

    @property
    def is_too_high(self) -> bool:
        """Whether drafters pause."""
        return self._loss.relative_time >= MAX_DRAFTER_TIME_LOSS

    def observe(
        self, result: VerificationResult, tree_without_pass: DraftTree, tree: DraftTree, passes: Sequence[int]
    ) -> float:
        """Count a step; returns by how much its drafts have changed max(0, loss), negative for gains.

        0 for a step without drafts of the drafters, also where a pause reduces the loss.

        Args:
            result: its outcome.
            tree_without_pass: that of the members without a forward pass, also where it was not verified.
            tree: that of the step.
            passes: tokens of each pass of the drafters; empty if they did not draft.
        """
        rows = sum(path is not None for path in result.paths)
        latency = self._batch.step_latency(rows) if rows else None
        if latency is None:
            return 0.0
        plain = latency.target.seconds_of(rows)
        # This step without drafters. Recent steps count more than earlier ones.
        time = latency.target.seconds_of(rows * (1 + tree_without_pass.nodes)) / plain
        paths = map(path_of_tokens, tree_without_pass.token_lists(), tree_without_pass.parents, result.tokens)
        tokens = 1 + sum(map(len, paths)) / rows
        self._time_without_drafters = FORGETTING * self._time_without_drafters + time
        self._tokens_without_drafters = FORGETTING * self._tokens_without_drafters + tokens
        if not passes:
            if self.is_too_high:
                self._loss.add(-TIME_LOSS_ALLOWANCE)
                memory.store(self._model, self._key, self._loss)
            return 0.0
        seconds = latency.target.seconds_of(rows * (1 + tree.nodes)) + latency.draft.draft_seconds(passes)
        added_tokens = max(0.0, sum(map(len, result.tokens)) / rows - tokens)
        gained = added_tokens * self._time_without_drafters / self._tokens_without_drafters
        before = self._loss.relative_time
        self._loss.add(seconds / plain - time - gained)
        memory.store(self._model, self._key, self._loss)
        return max(0.0, self._loss.relative_time) - max(0.0, before)
