"""Drafting with a network that predicts one token at a time: chains, and trees that grow by a pass per level.

Each pass of the drafter runs on the most likely nodes that were not expanded yet, and proposes their children. What it
computes for a node stays in its cache, so that nothing is recomputed when the node is accepted.

A draft model can also read first-stage nodes, such as copied text, in each pass: where it proposes the same tokens,
one pass takes the place of several.

Source: Chen et al., "Cascade Speculative Drafting for Even Faster LLM Inference" (2023), section 3, for drafts that are
themselves verified by a draft model; there they are chains.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_specgen.candidates.base import DraftCall, DraftSession
from hf_specgen.candidates.calibrated import CalibratedSession
from hf_specgen.candidates.draft_growth import DraftGrowth
from hf_specgen.candidates.read_ahead import MAX_FIRST_STAGE_NODES, ReadAhead, Start, starts_of
from hf_specgen.candidates.read_nodes import ReadNodes
from hf_specgen.candidates.scored_nodes import NodeScorer, ScoredNodes
from hf_specgen.candidates.tree_builder import Ints
from hf_specgen.candidates.tree_edges import edges
from hf_specgen.candidates.tree_shape import MAX_CHILDREN, FastestSize
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult


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
        reads_first_stage_with_text: whether the next first pass can read nodes too.
        budget: of the current draft.
        passes: tokens, over all rows, of each pass of the drafter in the current draft.
    """

    attends_to_text = True
    expanded_nodes_first = False
    reads_first_stage_with_text = False

    def __init__(self, call: DraftCall, k: int, tree: str | int | None, confidence_threshold: float, vocab: int):
        super().__init__(call)
        chains_only = call.target is not None and call.target.verifies_chains_only
        size = None if chains_only else tree
        self._k, self._size, self._vocab = k, size, vocab
        self._scorer = NodeScorer(call, vocab, confidence_threshold, self.wants_q)
        self._read_nodes: ReadNodes | None = None
        self._nodes: list[list[int]] = []
        self._suggested: DraftTree | None = None
        self._ahead: ReadAhead | None = None
        self.budget: Sequence[int] = ()
        self.passes: list[int] = []

    def room(self, row: int) -> int:
        """How deep a row's draft can be at most."""
        return self._k

    @abstractmethod
    def first_scores(self) -> torch.Tensor:
        """Read what is new in the rows' texts, and add the pass to `passes` unless it reads the prompt.

        Returns:
            `[batch, vocab]` logits for the token after each row's last one.
        """

    @abstractmethod
    def next_scores(self, tree: DraftTree, new: int) -> torch.Tensor:
        """Read the last `new` nodes of each row of a tree; `[batch, new, vocab]` logits after each of them."""

    def read_suggested(self, suggested: DraftTree) -> torch.Tensor:
        """Like `first_scores`, and read first-stage nodes after each row's last token in the same pass.

        Only called if `reads_first_stage_with_text`.

        Returns:
            `[batch, 1 + nodes, vocab]` logits after the last token and after each node.
        """
        raise NotImplementedError

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep what was computed for these nodes of the last tree that was read, and drop the others."""

    def suggest(self, draft: DraftTree, sources: Sequence[DraftSession]) -> None:
        """Read the nodes of other strategies in the first pass of the next draft, and what they expect to follow in all
        passes, as far as that saves time.
        """
        self._suggested = draft
        if self._ahead is not None:
            self._ahead.sources = [source.continuations for source in sources]

    def draft(self, budget: Sequence[int]) -> DraftTree:
        return self._grow(budget, self._size)

    def draft_at_prefill(self, budget: Sequence[int]) -> DraftTree:
        # The prefill pass verifies chains.
        return self._grow(budget, "auto" if self._size == "auto" else None, children=1)

    def observe(self, result: VerificationResult) -> None:
        """Count acceptance, and keep what was computed for accepted nodes."""
        super().observe(result)
        read = self._read_nodes
        if read is None or not len(read):
            return
        paths = [[self._nodes[row][node] for node in path or ()] for row, path in enumerate(result.paths)]
        self.keep([read.places_along(row, path) for row, path in enumerate(paths)])

    @torch.no_grad()
    def _grow(self, budget: Sequence[int], size: str | int | None, children: int = MAX_CHILDREN) -> DraftTree:
        self.budget, self.passes, self._read_nodes, self._nodes = budget, [], None, []
        depths = [min(self._k, depth, self.room(row)) for row, depth in enumerate(budget)]
        rows, active = len(depths), sum(depth > 0 for depth in depths)
        suggested, self._suggested = self._suggested, None
        if not active:
            return self.not_drafted(rows)
        growth = DraftGrowth(self.shape(size, depths, children), depths, self.calibrations[0])
        shape, builder = growth.shape, growth.builder
        if self._ahead is not None and isinstance(shape, FastestSize):
            shape.passes_per_level = self._ahead.passes_per_level
        self._read_text(growth, suggested)
        while (beam := shape.beam(builder)) and (nodes := builder.frontier(beam)).shape[1]:
            growth.read.add(builder, nodes)
            new = nodes.shape[1] + self._add_first_stage(growth, nodes)
            tree = growth.read.tree()
            logits = self.next_scores(tree, new)
            self.passes.append(active * new)
            found = growth.expand(nodes, self._score(growth, tree, new, logits))
            if new > nodes.shape[1] and self._ahead is not None:
                self._ahead.count(found)
        expanded = growth.expanded if self.expanded_nodes_first else None
        least = 0 if expanded is None else expanded.shape[1]
        trees, self._nodes = builder.best(max(shape.nodes(builder), least), expanded)
        self._read_nodes = growth.read
        draft, q = DraftTree.from_nodes(trees), growth.q()
        if q is not None and draft.nodes:
            draft = self._with_q(draft, q, shape.children)
        return self.verified(draft, builder, self._nodes, growth.confidence())

    def _read_text(self, growth: DraftGrowth, suggested: DraftTree | None) -> None:
        """The first pass, over what is new in the rows' texts and over first-stage nodes after it."""
        proposed = self._first_stage_after_text(growth, suggested)
        logits = self.read_suggested(proposed) if proposed.nodes else self.first_scores()[:, None]
        growth.read = ReadNodes(proposed)
        growth.begin(self._score(growth, proposed, 1 + proposed.nodes, logits))

    def _first_stage_after_text(self, growth: DraftGrowth, suggested: DraftTree | None) -> DraftTree:
        """The nodes that are read together with the text."""
        shape, depths, ahead = growth.shape, growth.builder.limits, self._ahead_for(growth)
        if ahead is None or not isinstance(shape, FastestSize) or not self.reads_first_stage_with_text:
            return DraftTree.empty(len(depths))
        most = MAX_FIRST_STAGE_NODES if suggested is None else max(MAX_FIRST_STAGE_NODES, suggested.nodes)
        found = []
        for row, depth in enumerate(depths):
            known = {} if suggested is None else edges(suggested, row)
            last = self.call.state.last_token(row)
            found.append(ahead.propose(row, last, [Start((), 1.0, -1)], most, int(depth) - 1, known))
        count = shape.read_ahead([proposed.joint for proposed in found])
        return DraftTree.from_nodes([(proposed.tokens[:count], tuple(proposed.parents[:count])) for proposed in found])

    def _add_first_stage(self, growth: DraftGrowth, nodes: Ints) -> int:
        """Add first-stage nodes below those of the next pass; returns how many of each row it reads with them."""
        builder, shape, ahead = growth.builder, growth.shape, self._ahead_for(growth)
        if ahead is None or not isinstance(shape, FastestSize):
            return 0
        read, width = len(growth.read), nodes.shape[1]
        levels = (builder.limits[:, None] - np.take_along_axis(builder.depth, nodes, axis=1)).max()
        most = min(MAX_FIRST_STAGE_NODES, shape.max_nodes - read - int(levels))
        found = [
            ahead.propose(row, self.call.state.last_token(row), starts_of(builder, row, chosen), most, int(depth) - 1)
            for row, (chosen, depth) in enumerate(zip(nodes.tolist(), builder.limits, strict=True))
        ]
        count = shape.read_ahead([proposed.joint for proposed in found], width)
        return growth.read.add_first_stage([proposed.first(count).placed(read - width, read) for proposed in found])

    def _score(self, growth: DraftGrowth, tree: DraftTree, new: int, logits: torch.Tensor) -> ScoredNodes:
        """What the drafter proposes after the last `new` nodes of a tree, to which each row's last token may belong."""
        depth = np.array([tree.depths(row)[-new:] for row in range(tree.batch)])
        ahead = self._ahead_for(growth)
        count = growth.shape.children if ahead is None else MAX_CHILDREN
        scored = self._scorer.score(logits, depth, count, with_probability=ahead is not None)
        if ahead is not None:
            last = torch.tensor([[self.call.state.last_token(row)] for row in range(tree.batch)])
            tokens = torch.cat([last, tree.tokens], dim=1)[:, -new:].numpy()
            real = growth.read_now(new)
            ahead.learn(tokens[real], scored.tokens[real], scored.probability[real])
        return scored

    def _ahead_for(self, growth: DraftGrowth) -> ReadAhead | None:
        """What proposes nodes to read; only where the tree's size follows latencies."""
        return self._ahead if isinstance(growth.shape, FastestSize) else None

    def _with_q(self, draft: DraftTree, q: torch.Tensor, children: int) -> DraftTree:
        """The draft with the probabilities of its nodes; q `[batch, 1 + expanded, vocab]`, a node's is its parent's."""
        sources = [[node // children for node in nodes] + [0] * (draft.nodes - len(nodes)) for nodes in self._nodes]
        index = torch.tensor(sources, device=q.device)[..., None].expand(-1, -1, q.shape[-1])
        return DraftTree(draft.tokens, draft.parents, q.gather(1, index))


def vocabulary_size(model: PreTrainedModel) -> int:
    """The number of logits of a model."""
    return int(cast(Any, model.get_output_embeddings()).weight.shape[0])
