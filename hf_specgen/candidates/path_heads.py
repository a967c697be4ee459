"""The session of block heads whose logits are corrected by the path: DSpark, DFlash2, Domino.

One pass of the head gives base logits for all depths. A draft tree grows by the corrected logits after each node, which
need no further pass: all levels together cost about as much as the pass alone.

Source: DDTree (2026), https://arxiv.org/abs/2604.12989, for best-first trees over a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from hf_specgen.candidates.autoregressive import AutoregressiveSession
from hf_specgen.candidates.base import DraftCall, vocabulary_size
from hf_specgen.candidates.draft_window import DraftWindow
from hf_specgen.candidates.head_sessions import FeatureQueue
from hf_specgen.candidates.tree_search import MAX_CHILDREN, TreeSize, tree_size
from hf_specgen.grown_tree import GrownTree
from hf_specgen.heads.base import BoundHead
from hf_specgen.heads.block import BlockHead
from hf_specgen.heads.path_head import LayoutVotes, PathRunner
from hf_specgen.memory import memory
from hf_specgen.targets.hidden_states import HiddenStateTarget
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult

CONFIDENCE_LEVELS = 4
"""Ranges of a confidence head's estimate, of equal width, with acceptance counts of their own."""


class PathSession(AutoregressiveSession):
    """The state of one call.

    Attributes:
        runner: the head's cache, and its passes.
    """

    def __init__(
        self,
        call: DraftCall,
        target: HiddenStateTarget,
        bound: BoundHead,
        k: int,
        tree: str | int | None,
        window: DraftWindow | None = None,
    ):
        assert call.model is not None and isinstance(bound.head, BlockHead)
        config = bound.head.config
        levels = CONFIDENCE_LEVELS if getattr(config, "enable_confidence_head", False) else 1
        super().__init__(call, min(k, config.depth), tree, 0.0, vocabulary_size(call.model), levels)
        self._votes, self._block_size = None, config.block_size
        self._key = ("layout", call.drafting.key)
        if config.measures_layout:
            guess = config.first_proposing_position
            model = call.model if self.remembers else None
            self._votes = memory.recall(model, self._key, lambda: LayoutVotes(guess))
        self.runner = PathRunner(bound, call.state.batch, self.wants_q, self._votes)
        self._queue = FeatureQueue(call, target, bound.aux_hidden_state_layers, window, self.runner.restart)
        self._drafting: list[bool] = []

    def draft_at_prefill(self, max_depths: Sequence[int]) -> DraftTree:
        """An empty draft: the target has not computed any hidden states yet."""
        return self.not_drafted(len(max_depths))

    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        if self._queue.is_empty:
            self._queue.receive()
        self._drafting = [depth > 0 for depth in max_depths]
        return super().draft(max_depths)

    def observe(self, result: VerificationResult) -> None:
        """Count acceptance, and receive the hidden states of the tokens that were accepted."""
        super().observe(result)
        self._queue.receive()

    def end(self) -> None:
        super().end()
        if self._votes is not None and self.remembers:
            memory.store(self.call.model, self._key, self._votes)

    def first_scores(self) -> torch.Tensor:
        """Process the text since the last draft with the target's features, and run the block; ended rows are dropped.

        Rows that do not draft keep their features: being ahead of slower rows, they may have no new token to continue.
        """
        features, tokens = self._queue.take(self._drafting)
        active = self._queue.active_rows()
        self.passes.append(sum(active) * self._block_size)
        return self.runner.first_logits(features, tokens, active)

    def next_scores(self, tree: GrownTree, new: int) -> torch.Tensor:
        return self.runner.next_logits(tree, new)

    def tree_size(self, tree: str | int | None, depths: Sequence[int], children: int) -> TreeSize:
        """As for other drafters, but deeper levels cost nothing."""
        children = min(children, self.runner.max_candidates)
        return tree_size(tree, self.call, depths, children, only_pass=self._block_size)

    def calibration_of(self) -> torch.Tensor | None:
        """With a confidence head, by its estimate: how often tokens are accepted is counted for each of its levels."""
        if self.runner.confidence is None:
            return None
        return torch.bucketize(self.runner.confidence, _level_edges(self.runner.confidence.device))

    def _grow(self, max_depths: Sequence[int], tree: str | int | None, children: int = MAX_CHILDREN) -> DraftTree:
        draft = super()._grow(max_depths, tree, children)
        self.passes = self.passes[:1]
        return draft


@lru_cache(maxsize=16)
def _level_edges(device: torch.device) -> torch.Tensor:
    """Logits between the levels of a confidence head's estimate."""
    return (torch.arange(1, CONFIDENCE_LEVELS) / CONFIDENCE_LEVELS).logit().to(device)
