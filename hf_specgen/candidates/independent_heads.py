"""Sessions of drafters that predict several depths at once, with one distribution per depth, independent of the path.

The most probable combinations of the depths' tokens form a tree, chosen after one pass of the drafter.

Source: Cai et al., "Medusa" (2024), section 2.3.3.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hf_specgen.candidates.acceptance import MAX_PROBABILITY, CalibratedSession, confidence_by_rank
from hf_specgen.candidates.base import DraftCall, vocabulary_size
from hf_specgen.candidates.draft_window import DraftWindow
from hf_specgen.candidates.growth import Floats
from hf_specgen.candidates.head_sessions import ReadsFeatures
from hf_specgen.candidates.tree_search import SearchLimits, SearchTree, TreeSize, best_first, draft_of, tree_size
from hf_specgen.heads.medusa import MedusaRunner
from hf_specgen.heads.runner import ParallelRunner
from hf_specgen.targets.hidden_states import HiddenStateTarget
from hf_specgen.tree import DraftTree

DEFAULT_NODES = 16
"""Nodes of an "auto" tree without a latency model: most of the gain at a small cost on memory-bound targets."""
MAX_RANKS = 10
"""Tokens of each depth that a tree can hold, of heads that predict several depths at once."""


def default_size(call: DraftCall, size: str | int | None) -> str | int | None:
    """A tree size, in which "auto" stands for `DEFAULT_NODES` without a latency model."""
    has_latency = call.depth is not None and call.depth.latency is not None
    return DEFAULT_NODES if size == "auto" and not has_latency else size


class IndependentHeadsSession(CalibratedSession):
    """Base class: drafts trees from one distribution per depth."""

    def __init__(self, call: DraftCall, depth: int, size: str | int | None, vocab: int):
        super().__init__(call, depth)
        self.ranks = 1 if size is None else min(MAX_RANKS, vocab)
        self._size = size

    @abstractmethod
    def depth_logits(self, depth: int) -> torch.Tensor:
        """Run the head: `[batch, depths, vocab]` float32 logits, for at least `depth` depths."""

    @torch.no_grad()
    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        depths = [min(depth, len(self.calibrations)) for depth in max_depths]
        if max(depths) == 0:
            return self.not_drafted(len(max_depths))
        scores, ranked, confidence = self.ranked_tokens(self.depth_logits(max(depths)))
        size = tree_size(default_size(self.call, self._size), self.call, depths)
        each = [one.acceptance(confidence[:, depth]) for depth, one in enumerate(self.calibrations[: max(depths)])]
        acceptance = np.stack(each, axis=1)
        trees = [best_combinations(ranked[row], acceptance[row], depth, size) for row, depth in enumerate(depths)]
        nodes = size.best_size([tree.probability for tree in trees])
        draft, tags = draft_of(trees, nodes), [np.array(tree.tags[:nodes], dtype=int).reshape(-1, 2) for tree in trees]
        self._features = [
            (tag[:, 1], confidence[row, tag[:, 0] - 1, tag[:, 1]], tag[:, 0]) for row, tag in enumerate(tags)
        ]
        if self.wants_q and draft.nodes:
            draft = with_q(draft, [(tag[:, 0] - 1).tolist() for tag in tags], scores)
        self._tree = draft
        return draft

    def ranked_tokens(self, logits: torch.Tensor) -> tuple[torch.Tensor, NDArray[np.integer[Any]], Floats]:
        """The most preferred tokens of each depth.

        Args:
            logits: `[batch, depths, vocab]`.

        Returns:
            `[batch, depths, vocab]` scores after the score-only processors; `[batch, depths, ranks]` tokens, the most
            preferred first; `[batch, depths, ranks]` confidences.
        """
        verification = self.call.verification
        assert verification is not None
        scores = verification.processors.warp(logits.flatten(0, 1)).view(logits.shape)
        steps = [range(len(text), len(text) + logits.shape[1]) for text in self.call.state.generated]
        weights = verification.draft_weights(scores, steps)
        best, tokens = weights.topk(self.ranks, dim=-1)
        probability = best / weights.sum(dim=-1, keepdim=True)
        if self.wants_q:
            probability = confidence_by_rank(scores.softmax(dim=-1).amax(dim=-1), self.ranks)
        # In one transfer; token ids below 2**24 are exact.
        read = torch.cat([tokens, probability], dim=-1).cpu().numpy().astype(np.float64)
        return scores, read[..., : self.ranks].astype(int), read[..., self.ranks :]


def best_combinations(
    tokens: NDArray[np.integer[Any]], acceptance: Floats, depth: int, size: TreeSize
) -> SearchTree[tuple[int, int]]:
    """The most probable tree of a row whose tokens at a depth do not depend on the path; tags are depth and rank.

    Args:
        tokens, acceptance: `[depths, ranks]` of each depth, most preferred first: the token, and the probability that
            it is accepted, given that the path before it was.

    Example:
        >>> tokens, acceptance = np.array([[5, 6], [7, 8]]), np.array([[0.6, 0.3], [0.9, 0.1]])
        >>> best_combinations(tokens, acceptance, 2, TreeSize(3)).tokens
        [5, 7, 6]
    """
    values = np.minimum(acceptance, MAX_PROBABILITY).tolist()
    ranked = [
        [(token, value, (level, rank)) for rank, (token, value) in enumerate(zip(*pair, strict=True))]
        for level, pair in enumerate(zip(tokens.tolist(), values, strict=True), start=1)
    ]
    return best_first((0, 0), lambda _, level: ranked[level], depth, SearchLimits(size.max_nodes))


def with_q(draft: DraftTree, depths: Sequence[Sequence[int]], scores: torch.Tensor) -> DraftTree:
    """The draft with the probabilities of each node's depth; `scores` are `[batch, depths, vocab]`."""
    sources = [[*row, *[0] * (draft.nodes - len(row))] for row in depths]
    index = torch.tensor(sources, device=scores.device)[..., None].expand(-1, -1, scores.shape[-1])
    return DraftTree(draft.token_lists(), draft.parents, scores.softmax(dim=-1).gather(1, index))


class ParallelSession(ReadsFeatures, IndependentHeadsSession):
    """The state of one call with a head that drafts all depths in one pass: DFlash, JetSpec, P-EAGLE."""

    def __init__(
        self,
        call: DraftCall,
        target: HiddenStateTarget,
        runner: ParallelRunner,
        depth: int,
        tree: str | int | None,
        window: DraftWindow | None = None,
    ):
        super().__init__(call, depth, tree, runner.bound.head.config.draft_vocab_size)
        self.connect(target, runner, runner.bound.aux_hidden_state_layers, window)
        self.passes = []

    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        self.passes = []
        return super().draft(max_depths)

    def depth_logits(self, depth: int) -> torch.Tensor:
        """As `PathSession.first_scores`."""
        features, tokens = self.queue.take(self.drafting)
        active = self.queue.active_rows()
        self.passes = [sum(active) * depth]
        return self.runner.draft(features, tokens, active, depth).float()


class MedusaSession(IndependentHeadsSession):
    """The state of one call with Medusa heads that do not read the path."""

    passes = ()  # heads run once per draft: the overhead of a draft
    rows_can_change = True

    def __init__(
        self, call: DraftCall, target: HiddenStateTarget, runner: MedusaRunner, k: int, tree: str | int | None
    ):
        assert call.model is not None
        super().__init__(call, min(k, runner.num_heads), tree, vocabulary_size(call.model))
        self._target, self._runner = target, runner

    def depth_logits(self, depth: int) -> torch.Tensor:
        """All heads read the state that chose each row's last token."""
        states = self._target.states_of(self._runner.bound.aux_hidden_state_layers)
        return self._runner.all_logits(states, self.call.state.pending(), depth).float()
