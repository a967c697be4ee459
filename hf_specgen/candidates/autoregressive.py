"""Drafting with a network that predicts one token at a time: chains, and trees that grow by a pass per level.

Each pass of the drafter runs on the most likely nodes that were not expanded yet, and proposes their children. What it
computes for a node stays in its cache, so that nothing is recomputed when the node is accepted.

A draft model can also read suggested nodes, such as copied text, together with the new text: where it proposes the same
tokens, the first pass takes the place of one pass for each of them.

Source: Chen et al., "Cascade Speculative Drafting for Even Faster LLM Inference" (2023), section 3, for drafts that are
themselves verified by a draft model; there they are chains.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from hf_specgen.candidates.calibrated import CalibratedSession
from hf_specgen.candidates.read_nodes import ReadNodes
from hf_specgen.candidates.tree_builder import Floats, Ints, Proposals, TreeBuilder
from hf_specgen.candidates.tree_shape import MAX_CHILDREN, FastestSize, TreeShape
from hf_specgen.state import Call
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult

MAX_SIBLING_CONFIDENCE = 0.95
"""Assumed limit of a distribution's largest probability, so that later siblings keep a share of what is left."""


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
        budget: of the current draft.
        passes: tokens, over all rows, of each pass of the drafter in the current draft.
    """

    attends_to_text = True
    expanded_nodes_first = False

    def __init__(self, call: Call, k: int, tree: str | int | None, confidence_threshold: float, vocab: int):
        super().__init__(call)
        chains_only = call.target is not None and call.target.verifies_chains_only
        size = None if chains_only else tree
        self._k, self._size, self._threshold, self._vocab = k, size, confidence_threshold, vocab
        self._read_nodes: ReadNodes | None = None
        self._nodes: list[list[int]] = []
        self._suggested: DraftTree | None = None
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
        """Like `first_scores`, and read suggested nodes after each row's last token in the same pass.

        Returns:
            `[batch, 1 + nodes, vocab]` logits after the last token and after each node; `[batch, 1, vocab]` if only the
            text was read, which is the default.
        """
        return self.first_scores()[:, None]

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep what was computed for these nodes of the last tree that was read, and drop the others."""

    def suggest(self, draft: DraftTree) -> None:
        """Read the nodes of other strategies in the first pass of the next draft, as far as that saves time."""
        self._suggested = draft

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
        shape, builder = self.shape(size, depths, children), TreeBuilder(depths)
        qs: list[torch.Tensor] = []
        confidences, read = self._read_text(shape, builder, suggested, qs)
        expanded: Ints = np.zeros((rows, 0), dtype=np.int64)
        while (beam := shape.beam(builder)) and (nodes := builder.frontier(beam)).shape[1]:
            expanded = np.concatenate([expanded, nodes], axis=1)
            read.add(builder, nodes)
            scores = self.next_scores(read.tree(), nodes.shape[1])
            self.passes.append(active * nodes.shape[1])
            depth = np.take_along_axis(builder.depth, nodes, axis=1)
            proposals, confidence = self._propose(scores, depth, shape.children, qs)
            builder.add(nodes, proposals)
            confidences.append(confidence)
        first = expanded if self.expanded_nodes_first else None
        trees, self._nodes = builder.best(
            max(shape.nodes(builder), expanded.shape[1] if first is not None else 0), first
        )
        self._read_nodes = read
        draft = DraftTree.from_nodes(trees)
        if qs and draft.nodes:
            draft = self._with_q(draft, torch.cat(qs, dim=1), shape.children)
        return self.verified(draft, builder, self._nodes, np.concatenate(confidences, axis=1))

    def _read_text(
        self, shape: TreeShape, builder: TreeBuilder, suggested: DraftTree | None, qs: list[torch.Tensor]
    ) -> tuple[list[Floats], ReadNodes]:
        """The first pass: add the children of each row's last token, and those of suggested nodes that are proposed."""
        rows = len(builder.limits)
        count = shape.read_ahead(suggested.joint) if suggested is not None and isinstance(shape, FastestSize) else 0
        nodes = DraftTree.empty(rows) if suggested is None else suggested.first(count)
        scores = self.read_suggested(nodes) if nodes.nodes else self.first_scores()[:, None]
        read = ReadNodes(nodes if scores.shape[1] > 1 else DraftTree.empty(rows))
        root = np.zeros((rows, 1), dtype=np.int64)
        proposals, confidence = self._propose(scores[:, :1], root, shape.children, qs)
        builder.add_root(proposals)
        confidences, seen = [confidence], 0
        while (found := read.find(builder, seen)) is not None:
            seen = builder.tokens.shape[1]
            nodes_found, places, valid = found
            index = torch.from_numpy(1 + places).to(scores.device)[..., None].expand(-1, -1, scores.shape[-1])
            depth = np.take_along_axis(builder.depth, nodes_found, axis=1)
            proposals, confidence = self._propose(scores.gather(1, index), depth, shape.children, qs)
            builder.add(nodes_found, proposals, valid)
            confidences.append(confidence)
        return confidences, read

    def _propose(
        self, logits: torch.Tensor, depth: Ints, children: int, qs: list[torch.Tensor]
    ) -> tuple[Proposals, Floats]:
        """Children of nodes from the drafter's logits.

        Args:
            logits: `[batch, nodes, vocab]` after each node.
            depth: `[batch, nodes]` of each node, 0 for the row's last token.
            children: how many per node.
            qs: receives the probabilities `[batch, nodes, vocab]` if verification needs them.

        Returns:
            the proposals, and `[batch, nodes * children]` confidences.
        """
        scores = logits[..., : self._vocab].float()
        verification, processors = self.call.verification, self.call.processors
        if processors is not None:
            scores = processors.warp(scores.flatten(0, 1)).view(scores.shape)
        generated = self.call.state.generated
        steps = [[len(text) + below for below in row] for text, row in zip(generated, depth.tolist(), strict=True)]
        weights = scores.softmax(dim=-1) if verification is None else verification.draft_weights(scores, steps)
        best, tokens = weights.topk(min(children, weights.shape[-1]), dim=-1)
        share = best / weights.sum(dim=-1, keepdim=True)
        expandable = None
        if self.wants_q or self._threshold:
            probabilities = scores.softmax(dim=-1)
            expandable = (probabilities.gather(-1, tokens) >= self._threshold).cpu().numpy()
            if self.wants_q:
                qs.append(pad(probabilities, (0, self._vocab - probabilities.shape[-1])))
                share = share_by_rank(probabilities.amax(dim=-1), best.shape[-1])
        confidence = share.cpu().numpy().astype(np.float64)
        proposals = Proposals(tokens.cpu().numpy(), self.calibrations[0].acceptance(confidence), expandable)
        return proposals, confidence.reshape(len(confidence), -1)

    def _with_q(self, draft: DraftTree, q: torch.Tensor, children: int) -> DraftTree:
        """The draft with the probabilities of its nodes; q `[batch, 1 + expanded, vocab]`, a node's is its parent's."""
        sources = [[node // children for node in nodes] + [0] * (draft.nodes - len(nodes)) for nodes in self._nodes]
        index = torch.tensor(sources, device=q.device)[..., None].expand(-1, -1, q.shape[-1])
        return DraftTree(draft.tokens, draft.parents, q.gather(1, index))


def share_by_rank(largest: torch.Tensor, ranks: int) -> torch.Tensor:
    """`[…]` largest probabilities of distributions to `[…, ranks]` confidences in samples drawn from them.

    In rejection sampling a node must not be left out because of its token, only because of its rank: otherwise the
    sampled tokens would not have the distribution q.
    """
    left = 1 - largest.clamp(max=MAX_SIBLING_CONFIDENCE)
    powers = torch.arange(ranks, device=largest.device)
    return largest[..., None] * left[..., None] ** powers


def vocabulary_size(model: PreTrainedModel) -> int:
    """The number of logits of a model."""
    return int(cast(Any, model.get_output_embeddings()).weight.shape[0])
