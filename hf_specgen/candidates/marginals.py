"""Drafting with heads that predict several depths at once: one distribution per depth, whatever the path.

The most probable combinations of the depths' tokens form a tree. Nodes need no forward passes of their own, so
the whole tree is chosen after one pass of the head.

Sources: Cai et al., "Medusa" (2024), section 2.3.3, for trees of heads; DDTree (2026), https://arxiv.org/abs/2604.12989,
for best-first trees over the distributions of a block.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from hf_specgen.candidates.acceptance import CalibratedSession, confidence_by_rank
from hf_specgen.candidates.base import DraftCall
from hf_specgen.candidates.tree_search import Floats, TreeBuilder, TreeSize, tree_size
from hf_specgen.tree import DraftTree

DEFAULT_NODES = 16
"""Nodes of an "auto" tree without a latency model: most of the gain at a small cost on memory-bound targets."""


class MarginalSession(CalibratedSession):
    """Drafts trees from one distribution per depth.

    Args:
        call: the call.
        depth: how many depths are predicted at most.
        size: number of nodes; "auto" for the fastest tree of each step; None for chains.
        ranks: how many tokens of each depth may be in a tree.
    """

    def __init__(self, call: DraftCall, depth: int, size: str | int | None, ranks: int):
        super().__init__(call, depth)
        self.ranks = 1 if size is None else ranks
        self._size = size

    @abstractmethod
    def depth_logits(self, depth: int) -> torch.Tensor:
        """Run the head.

        Args:
            depth: how many depths are used at most.

        Returns:
            `[batch, depths, vocab]` logits, for at least that many depths, in float32.
        """

    @torch.no_grad()
    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        depths = [min(depth, len(self.calibrations)) for depth in max_depths]
        if max(depths) == 0:
            return self.not_drafted(len(max_depths))
        scores, tokens, confidence = self.ranked_tokens(self.depth_logits(max(depths)))
        size = self.tree_size(depths)
        acceptance = self.acceptance(confidence)
        builder = TreeBuilder.of_parallel_heads(depths, tokens.cpu().numpy(), acceptance, size.max_nodes)
        trees, indices = builder.best(size.nodes(builder))
        draft = DraftTree.from_nodes(trees)
        if self.wants_q and draft.nodes:
            draft = with_q(draft, [(builder.depth[row, i] - 1).tolist() for row, i in enumerate(indices)], scores)
        row = np.arange(len(depths))[:, None]
        return self.verified(draft, builder, indices, confidence[row, np.maximum(builder.depth - 1, 0), builder.rank])

    def tree_size(self, depths: Sequence[int]) -> TreeSize:
        """How large the trees become; without a latency model "auto" stands for `DEFAULT_NODES`."""
        has_latency = self.call.depth is not None and self.call.depth.latency is not None
        return tree_size(DEFAULT_NODES if self._size == "auto" and not has_latency else self._size, self.call, depths)

    def ranked_tokens(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Floats]:
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
        share = best / weights.sum(dim=-1, keepdim=True)
        if self.wants_q:
            share = confidence_by_rank(scores.softmax(dim=-1).amax(dim=-1), self.ranks)
        return scores, tokens, share.cpu().numpy().astype(np.float64)

    def acceptance(self, confidence: Floats) -> Floats:
        """`[batch, depths, ranks]` acceptance probabilities of confidences."""
        used = self.calibrations[: confidence.shape[1]]
        return np.stack([known.acceptance(confidence[:, depth]) for depth, known in enumerate(used)], axis=1)


def with_q(draft: DraftTree, depths: Sequence[Sequence[int]], scores: torch.Tensor) -> DraftTree:
    """The draft with the probabilities of each node's depth.

    Args:
        draft: the draft.
        depths: for each row the depth of each node, from 0 on.
        scores: `[batch, depths, vocab]`.
    """
    sources = [[*row, *[0] * (draft.nodes - len(row))] for row in depths]
    index = torch.tensor(sources, device=scores.device)[..., None].expand(-1, -1, scores.shape[-1])
    return DraftTree(draft.tokens, draft.parents, scores.softmax(dim=-1).gather(1, index))
