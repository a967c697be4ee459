"""Drafting with a network that predicts one token at a time: chains, and trees that grow by a pass per level.

Each pass of the drafter runs on the most likely nodes that were not expanded yet, and proposes their children. What it
computes for a node stays in its cache, so that nothing is recomputed when the node is accepted.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from hf_specgen.candidates.base import DraftSession
from hf_specgen.candidates.tree_builder import Ints, Proposals, TreeBuilder
from hf_specgen.candidates.tree_shape import Chain, FastestSize, FixedSize, TreeShape
from hf_specgen.depth.calibration import Calibration, calibration_memory
from hf_specgen.state import Call
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult


class AutoregressiveSession(DraftSession):
    """Drafts trees with a network.

    Args:
        call: the call.
        k: maximum depth of a draft.
        tree: "auto" for the tree with the highest expected tokens per second, by the latency model of the policy; a
            number of nodes; None for chains.
        confidence_threshold: nodes whose token has a lower probability are not expanded.
        vocab: size of the target's vocabulary; the drafter's may be padded to another size.
    """

    def __init__(self, call: Call, k: int, tree: str | int | None, confidence_threshold: float, vocab: int):
        super().__init__(call)
        self._k, self._tree, self._threshold, self._vocab = k, tree, confidence_threshold, vocab
        self._memory_key = (call.candidates.profile_key(), self._mode, round(call.temperature, 2))
        self._calibration: Calibration = calibration_memory.recall(call.model, self._memory_key)
        self._proposed: list[tuple[list[int], list[int], list[float]]] = []
        self._verified = DraftTree.empty(call.state.batch)
        self._expanded: list[list[int]] = []
        self.budget: Sequence[int] = ()
        """The budget of the current draft."""
        self.passes: list[int] = []
        """Tokens, over all rows, of each pass of the drafter in the current draft."""

    def room(self, row: int) -> int:
        """How deep a row's draft can be at most."""
        return self._k

    @abstractmethod
    def first_scores(self) -> torch.Tensor:
        """Read what is new in the rows' texts; `[batch, vocab]` logits for the token after each row's last one."""

    @abstractmethod
    def next_scores(self, tree: DraftTree, new: int) -> torch.Tensor:
        """Read the last `new` nodes of each row of a tree; `[batch, new, vocab]` logits after each of them."""

    def keep(self, paths: Sequence[Sequence[int] | None]) -> None:
        """Keep what was computed for these nodes of the last tree given to `next_scores`, and drop the others."""

    def draft(self, budget: Sequence[int]) -> DraftTree:
        return self._grow(budget, self._tree)

    def draft_at_prefill(self, budget: Sequence[int]) -> DraftTree:
        return self._grow(budget, None)  # the prefill pass verifies chains

    @torch.no_grad()
    def _grow(self, budget: Sequence[int], size: str | int | None) -> DraftTree:
        self.budget, self.passes, self._expanded, self._proposed = budget, [], [], []
        depths = [min(self._k, depth, self.room(row)) for row, depth in enumerate(budget)]
        self._verified = DraftTree.empty(len(budget))
        if max(depths) == 0:
            return self._verified
        shape, builder = self._shape(size, depths), TreeBuilder(depths)
        rows = len(depths)
        expanded: Ints = np.zeros((rows, 0), dtype=np.int64)
        qs: list[torch.Tensor] = []
        scores = self.first_scores()[:, None]
        self.passes.append(sum(depth > 0 for depth in depths))
        proposals, confidence = self._propose(scores, np.zeros((rows, 1), dtype=np.int64), shape.children, qs)
        builder.add_root(proposals)
        confidences = [confidence]
        while beam := shape.beam(builder, len(self.passes)):
            nodes = builder.frontier(beam)
            if not nodes.shape[1]:
                break
            expanded = np.concatenate([expanded, nodes], axis=1)
            scores = self.next_scores(_expanded_tree(builder, expanded), nodes.shape[1])
            self.passes.append(sum(depth > 0 for depth in depths) * nodes.shape[1])
            depth = np.take_along_axis(builder.depth, nodes, axis=1)
            proposals, confidence = self._propose(scores, depth, shape.children, qs)
            builder.add(nodes, proposals)
            confidences.append(confidence)
        return self._finish(builder, shape, expanded, np.concatenate(confidences, axis=1), qs)

    def observe(self, result: VerificationResult) -> None:
        """Keep what was computed for accepted nodes, and count acceptance by confidence."""
        if not self._proposed:
            return
        self._count(result)
        paths: list[list[int] | None] = []
        for row, path in enumerate(result.paths):
            nodes = [self._proposed[row][0][node] for node in path or ()]
            place = {node: index for index, node in enumerate(self._expanded[row])}
            kept = next((i for i, node in enumerate(nodes) if node not in place), len(nodes))
            paths.append([place[node] for node in nodes[:kept]])
        if self._expanded[0]:
            self.keep(paths)

    def end(self) -> None:
        calibration_memory.store(self.call.model, self._memory_key, self._calibration)

    def _shape(self, size: str | int | None, depths: Sequence[int]) -> TreeShape:
        if isinstance(size, int):
            return FixedSize(size)
        latency = None if self.call.depth is None else self.call.depth.latency
        if size is None or latency is None:
            return Chain()
        rows = sum(depth > 0 for depth in depths)
        state = self.call.state
        context = max(len(p) + len(g) for p, g in zip(state.prompts, state.generated, strict=True))
        return FastestSize(latency.at(rows, context), rows)

    def _propose(
        self, logits: torch.Tensor, depth: Ints, children: int, qs: list[torch.Tensor]
    ) -> tuple[Proposals, np.ndarray[Any, Any]]:
        """Children of nodes from the drafter's logits.

        Args:
            logits: `[batch, nodes, vocab]` after each node.
            depth: `[batch, nodes]` of each node, 0 for the row's last token.
            children: how many per node.
            qs: gets the probabilities `[batch, nodes, vocab]` if verification needs them.

        Returns:
            the proposals, and `[batch, nodes * children]` confidences.
        """
        batch = len(logits)
        scores = logits[..., : self._vocab].float()
        verification, processors = self.call.verification, self.call.processors
        if processors is not None:
            scores = processors.warp(scores.flatten(0, 1)).view(scores.shape)
        generated = self.call.state.generated
        steps = [[len(text) + below for below in row] for text, row in zip(generated, depth.tolist(), strict=True)]
        weights = scores.softmax(dim=-1) if verification is None else verification.draft_weights(scores, steps)
        best, tokens = weights.topk(min(children, weights.shape[-1]), dim=-1)
        needs_probability = self._wants_q or self._threshold > 0
        probabilities = scores.softmax(dim=-1) if needs_probability else weights
        if self._wants_q:
            qs.append(pad(probabilities, (0, self._vocab - probabilities.shape[-1])))
            # In rejection sampling a node must not be dropped because of its token: only its rank may matter.
            share = probabilities.amax(dim=-1, keepdim=True).expand_as(best)
            share = share * (1 - share.clamp(max=0.95)) ** torch.arange(best.shape[-1], device=best.device)
        else:
            share = best / weights.sum(dim=-1, keepdim=True)
        confidence = share.cpu().numpy().astype(np.float64)
        expandable = None
        if self._threshold:
            expandable = (probabilities.gather(-1, tokens) >= self._threshold).cpu().numpy()
        proposals = Proposals(tokens.cpu().numpy(), self._calibration.acceptance(confidence), expandable)
        return proposals, confidence.reshape(batch, -1)

    def _finish(
        self,
        builder: TreeBuilder,
        shape: TreeShape,
        expanded: Ints,
        confidences: np.ndarray[Any, Any],
        qs: list[torch.Tensor],
    ) -> DraftTree:
        """The tree to verify; notes where its nodes come from."""
        trees, indices = builder.best(shape.nodes(builder))
        children = confidences.shape[1] // (1 + expanded.shape[1])
        self._expanded = expanded.tolist()
        for row, nodes in enumerate(indices):
            ranks = [node % children for node in nodes]
            self._proposed.append((nodes, ranks, confidences[row, nodes].tolist()))
        draft = DraftTree.from_nodes(trees)
        if qs and draft.nodes:
            q = torch.cat(qs, dim=1)  # [batch, 1 + expanded, vocab]: node i was proposed by the (i // children)-th
            sources = torch.tensor(
                [[node // children for node in nodes] + [0] * (draft.nodes - len(nodes)) for nodes in indices]
            ).to(q.device)
            draft = DraftTree(draft.tokens, draft.parents, q.gather(1, sources[..., None].expand(-1, -1, q.shape[-1])))
        self._verified = draft
        return draft

    def _count(self, result: VerificationResult) -> None:
        """Children of the row's last token and of accepted nodes: which of them were accepted?"""
        ranks, confidences, accepted = [], [], []
        for row, path in enumerate(result.paths):
            if path is None:
                continue
            # A row that ended inside its draft says nothing about the children of its last token.
            reached = {-1, *path} if len(result.tokens[row]) > len(path) else {-1, *path[:-1]}
            emitted = result.tokens[row]
            _, node_ranks, node_confidences = self._proposed[row]
            tokens = self._verified.tokens[row].tolist()
            place = {-1: 0} | {node: index + 1 for index, node in enumerate(path)}
            for node, parent in enumerate(self._verified.parents[row]):
                if parent in reached and place[parent] < len(emitted):
                    ranks.append(node_ranks[node])
                    confidences.append(node_confidences[node])
                    accepted.append(tokens[node] == emitted[place[parent]])
        if ranks:
            self._calibration.observe(np.array(ranks), np.array(confidences), np.array(accepted))

    @property
    def _mode(self) -> str:
        if self._wants_q:
            return "rejection"
        return "sampled" if self.call.do_sample else "greedy"

    @property
    def _wants_q(self) -> bool:
        return self.call.verification is not None and self.call.verification.wants_q


def _expanded_tree(builder: TreeBuilder, expanded: Ints) -> DraftTree:
    """The tree of the nodes that the drafter reads, in the order in which it reads them."""
    tokens = torch.from_numpy(np.take_along_axis(builder.tokens, expanded, axis=1))
    parents = []
    for nodes, above in zip(
        expanded.tolist(), np.take_along_axis(builder.parents, expanded, axis=1).tolist(), strict=True
    ):
        place: dict[int, int] = {-1: -1}
        row = []
        for index, (node, parent) in enumerate(zip(nodes, above, strict=True)):
            row.append(place.get(parent, -1))
            place.setdefault(node, index)
        parents.append(tuple(row))
    return DraftTree(tokens, tuple(parents))


def vocabulary_size(model: PreTrainedModel) -> int:
    """The number of logits of a model."""
    return int(cast(Any, model.get_output_embeddings()).weight.shape[0])
