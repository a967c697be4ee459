"""Drafting with a network that predicts one token at a time: chains, and trees that grow by a pass per level.

Each pass of the drafter runs on the most likely nodes that were not expanded yet, and proposes their children. What it
computes for a node stays in its cache, so that nothing is recomputed when the node is accepted.

Source: Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees" (2024), section 4.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from hf_specgen.candidates.acceptance import CalibratedSession, confidence_by_rank
from hf_specgen.candidates.base import DraftCall
from hf_specgen.candidates.tree_search import MAX_CHILDREN, Floats, Ints, Proposals, TreeBuilder, TreeSize, tree_size
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult


class _Scored(NamedTuple):
    """What the network proposes after the nodes of a pass: `[batch, nodes, children]`, q `[batch, nodes, vocab]`."""

    tokens: Ints
    confidence: Floats
    expandable: NDArray[np.bool_] | None
    q: torch.Tensor | None


class AutoregressiveSession(CalibratedSession):
    """Drafts trees with a network.

    Args:
        call: the call.
        k: maximum depth of a draft.
        tree: "auto" for the tree with the highest expected tokens per second, by the latency model of the policy; a
            number of nodes; None for chains.
        confidence_threshold: nodes whose token has a lower probability are not expanded.
        vocab: size of the target's vocabulary; the drafter's may be padded to another size.

    Attributes:
        expanded_nodes_first: whether the nodes of a tree begin with those that were expanded.
        max_depths: of the current draft.
        passes: tokens, over all rows, of each pass of the drafter in the current draft.
    """

    expanded_nodes_first = False

    def __init__(self, call: DraftCall, k: int, tree: str | int | None, confidence_threshold: float, vocab: int):
        super().__init__(call)
        chains_only = call.target is not None and call.target.verifies_chains_only
        self._k, self._size, self._vocab = k, None if chains_only else tree, vocab
        self._threshold = confidence_threshold
        self._expanded: Ints = np.zeros((call.state.batch, 0), dtype=np.int64)
        self._nodes: list[list[int]] = []
        self.max_depths: Sequence[int] = ()
        self.passes: list[int] = []

    def max_draft_tokens(self, row: int) -> int:
        """How deep a row's draft can be at most."""
        return self._k

    @abstractmethod
    def first_scores(self) -> torch.Tensor:
        """Run the drafter on what is new in the rows' texts; adds the pass to `passes` unless it reads the prompt.

        Returns:
            `[batch, vocab]` logits for the token after each row's last one.
        """

    @abstractmethod
    def next_scores(self, tree: DraftTree, new: int) -> torch.Tensor:
        """Run the drafter on the last `new` nodes of each row; `[batch, new, vocab]` logits after each of them."""

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep what was computed for these nodes of the last tree, and drop the others."""

    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        return self._grow(max_depths, self._size)

    def draft_at_prefill(self, max_depths: Sequence[int]) -> DraftTree:
        # The prefill pass verifies chains.
        return self._grow(max_depths, "auto" if self._size == "auto" else None, children=1)

    def observe(self, result: VerificationResult) -> None:
        """Count acceptance, and keep what was computed for accepted nodes."""
        super().observe(result)
        if not self._expanded.shape[1]:
            return
        paths = []
        for row, path in enumerate(result.paths):
            computed = {node: index for index, node in reversed(list(enumerate(self._expanded[row].tolist())))}
            nodes = [computed.get(self._nodes[row][node]) for node in path or ()]
            # The nodes of a path that were expanded come first: a child is expanded after its parent.
            paths.append([node for node in nodes if node is not None])
        self.commit(paths)

    @torch.no_grad()
    def _grow(self, max_depths: Sequence[int], tree: str | int | None, children: int = MAX_CHILDREN) -> DraftTree:
        self.max_depths, self.passes, self._nodes = max_depths, [], []
        depths = [min(self._k, depth, self.max_draft_tokens(row)) for row, depth in enumerate(max_depths)]
        rows, active = len(depths), sum(depth > 0 for depth in depths)
        self._expanded = np.zeros((rows, 0), dtype=np.int64)
        if not active:
            return self.not_drafted(rows)
        size, builder = tree_size(tree, self.call, depths, children), TreeBuilder(depths)
        scored = [self._score(self.first_scores()[:, None], np.zeros((rows, 1), dtype=np.int64), size)]
        builder.add_root(self._proposals(scored[0]))
        while (width := size.width(builder)) and (nodes := builder.frontier(width)).shape[1]:
            self._expanded = np.concatenate([self._expanded, nodes], axis=1)
            logits = self.next_scores(_subtree(builder, self._expanded), nodes.shape[1])
            self.passes.append(active * nodes.shape[1])
            scored.append(self._score(logits, np.take_along_axis(builder.depth, nodes, axis=1), size))
            builder.add(nodes, self._proposals(scored[-1]))
        expanded = self._expanded if self.expanded_nodes_first else None
        least = 0 if expanded is None else expanded.shape[1]
        trees, self._nodes = builder.best(max(size.nodes(builder), least), expanded)
        draft = DraftTree.from_nodes(trees)
        if self.wants_q and draft.nodes:
            draft = self._with_q(draft, [part.q for part in scored if part.q is not None], size.children)
        confidence = np.concatenate([part.confidence.reshape(rows, -1) for part in scored], axis=1)
        return self.verified(draft, builder, self._nodes, confidence)

    def _proposals(self, scored: _Scored) -> Proposals:
        return Proposals(scored.tokens, self.calibrations[0].acceptance(scored.confidence), scored.expandable)

    def _score(self, logits: torch.Tensor, depth: Ints, size: TreeSize) -> _Scored:
        """The most likely tokens after each node of a pass.

        Args:
            logits: `[batch, nodes, vocab]` after each node.
            depth: `[batch, nodes]` of each node, 0 for a row's last token.
        """
        call, vocab, verification = self.call, self._vocab, self.call.verification
        scores = logits[..., :vocab].float()
        if verification is None:
            weights = scores.softmax(dim=-1)
        else:
            scores = verification.processors.warp(scores.flatten(0, 1)).view(scores.shape)
            texts = zip(call.state.generated, depth.tolist(), strict=True)
            weights = verification.draft_weights(scores, [[len(text) + below for below in row] for text, row in texts])
        best, tokens = weights.topk(min(size.children, weights.shape[-1]), dim=-1)
        confidence, expandable, q = best / weights.sum(dim=-1, keepdim=True), None, None
        if self.wants_q or self._threshold:
            probabilities = scores.softmax(dim=-1)
            expandable = (probabilities.gather(-1, tokens) >= self._threshold).cpu().numpy()
            if self.wants_q:
                q = pad(probabilities, (0, vocab - probabilities.shape[-1]))
                confidence = confidence_by_rank(probabilities.amax(dim=-1), best.shape[-1])
        return _Scored(tokens.cpu().numpy(), confidence.cpu().numpy().astype(np.float64), expandable, q)

    def _with_q(self, draft: DraftTree, qs: list[torch.Tensor], children: int) -> DraftTree:
        """The draft with the probabilities of its nodes: those after the parent of each."""
        q = torch.cat(qs, dim=1)  # [batch, 1 + expanded, vocab]
        sources = [[node // children for node in nodes] + [0] * (draft.nodes - len(nodes)) for nodes in self._nodes]
        index = torch.tensor(sources, device=q.device)[..., None].expand(-1, -1, q.shape[-1])
        return DraftTree(draft.tokens, draft.parents, q.gather(1, index))


def _subtree(builder: TreeBuilder, expanded: Ints) -> DraftTree:
    """The expanded nodes as a tree; a node that fills up a row is attached to the row's last token or its parent."""
    rows = []
    for row, nodes in enumerate(expanded.tolist()):
        new_index: dict[int, int] = {-1: -1}
        for index, node in enumerate(nodes):
            new_index.setdefault(node, index)
        parents = tuple(new_index.get(parent, -1) for parent in builder.parents[row, nodes].tolist())
        rows.append((builder.tokens[row, nodes].tolist(), parents))
    return DraftTree.from_nodes(rows)
