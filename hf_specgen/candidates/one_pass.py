"""A draft with one pass of a drafter for all depths: independent heads, and those with a Markov correction.

Parallel heads have one distribution for each depth, independent of the path. A correction that reads the previous token
alone (DSpark, DFlash2) gives one for each depth and each of its *previous tokens*, the likely tokens of the depth
before; all of them in one operation. Where there is one distribution, as at the first depth, that of the first previous
token is read. The most probable combinations form a tree, which the host searches after one read.

Sources: Cai et al., "Medusa" (2024), section 2.3.3; DDTree (2026), https://arxiv.org/abs/2604.12989.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hf_specgen.candidates.acceptance import MAX_PROBABILITY, confidence_by_rank, finite
from hf_specgen.candidates.base import vocabulary_size
from hf_specgen.candidates.best_first import SearchLimits, SearchTree, best_first, draft_of
from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.candidates.tree_size import TreeSizer, tree_sizer
from hf_specgen.device_tree import Floats
from hf_specgen.drafter import DepthLogits, Drafter, T
from hf_specgen.top_k import top_k
from hf_specgen.tree import DraftTree

DEFAULT_NODES = 16
"""Nodes of an "auto" tree without a latency model: most of the gain at a small cost on memory-bound targets."""
MAX_RANKS = 10  # tokens that a tree can hold after each node


class RankedIndex(NamedTuple):
    """Where the distribution that a node was taken from is in `Ranked`, and where that of its children is."""

    depth_index: int  # from 0 on
    previous: int  # the index of its parent among the previous tokens of its depth
    own_index: int  # its index among the previous tokens of the next depth; -1: it is none, and has no children


def default_tree(batch: DraftBatch, tree: str | int | None) -> str | int | None:
    """The tree setting, in which "auto" stands for `DEFAULT_NODES` without a latency model."""
    return DEFAULT_NODES if tree == "auto" and batch.latency is None else tree


class Ranked(NamedTuple):
    """What the host has read of a row: the most preferred tokens of each depth, after each token of the depth before.

    All are `[depths, previous, ranks]`, most preferred first.
    """

    tokens: NDArray[np.integer[Any]]
    values: Floats  # the probability that each is accepted, given that the path before it was
    previous_index: NDArray[np.integer[Any]]  # of each among the previous tokens of the next depth; -1: it is none


def one_pass_draft(batch: DraftBatch, drafter: Drafter[T], text: T, tree: str | int | None) -> DraftTree:
    """A draft of this size from the distributions of all depths that a drafter predicts after new text."""
    depths = text.depths
    predicted = drafter.forward_depths(text, max(depths))  # the drafter's only pass
    scores, rows = _ranked(batch, predicted, 1 if tree is None or batch.verifies_chains_only else MAX_RANKS)
    sizer = tree_sizer(default_tree(batch, tree), batch, depths)
    rows_and_depths = zip(rows, depths, strict=True)
    trees = [best_combinations(ranked, depth, sizer, batch.wants_q) for ranked, depth in rows_and_depths]
    draft_seconds = sizer.drafting_seconds(text.tokens_per_pass)
    nodes = sizer.num_verified_by_probability(
        [row_tree.probability for row_tree in trees], draft_seconds, batch.wants_q
    )
    draft = draft_of(trees, nodes)
    if batch.wants_q and draft.nodes:
        indices = [np.array(row_tree.tags[:nodes], int).reshape(-1, 3) for row_tree in trees]
        draft = with_q(draft, indices, scores, vocabulary_size(batch.model))
    return draft


def _ranked(batch: DraftBatch, predicted: DepthLogits, ranks: int) -> tuple[DepthLogits, list[Ranked]]:
    """The logits after the score-only processors, and what the host reads of each row."""
    candidates = predicted.candidates
    scores = predicted.logits
    if batch.wants_q or batch.score_processors.reads_on_host:
        scores = finite(scores)
    scores = batch.score_processors(scores, candidates is None)
    token_indices = [range(len(row), len(row) + scores.shape[1]) for row in batch.state.generated]
    draft_scores = batch.draft_scores(scores, token_indices, candidates)
    probability, index = top_k(draft_scores.softmax(dim=-1), min(ranks, draft_scores.shape[-1]))
    if batch.wants_q:
        probability = confidence_by_rank(scores.softmax(dim=-1).amax(dim=-1), index.shape[-1])
    # In one transfer; token ids below 2**24 are exact.
    parts = [probability, index]
    if candidates is not None:
        parts.append(candidates)
    flat = torch.cat([part.flatten(1) for part in parts], dim=1).cpu().numpy()
    count = index[0].numel()
    values = np.nan_to_num(flat[:, :count].reshape(index.shape).astype(np.float64))
    values = np.minimum(values, MAX_PROBABILITY)
    integers = flat[:, count:].astype(int)
    indices = integers[:, :count].reshape(index.shape)  # [batch, depths, previous, ranks]
    tokens = indices  # where the candidates are all tokens
    previous_index = np.zeros_like(indices)
    if candidates is not None:  # of which the first ones are previous tokens
        previous_index = np.where(indices < scores.shape[2], indices, -1)
        ids = integers[:, count:].reshape(*candidates.shape[:2], 1, -1)
        tokens = np.take_along_axis(ids, indices, axis=3)
    return DepthLogits(scores, candidates), list(map(Ranked, tokens, values, previous_index))


def best_combinations(ranked: Ranked, k: int, sizer: TreeSizer, wants_q: bool = False) -> SearchTree[RankedIndex]:
    """The most probable tree of a row; tags are the indices of its nodes.

    With `wants_q` each group of siblings was drawn from q, and is in the tree once: had two branches the same draws,
    those of the second would not have the distribution q once the first is rejected.

    Example:
        >>> tokens, values = np.array([[[5, 6]], [[7, 8]]]), np.array([[[0.6, 0.3]], [[0.9, 0.1]]])
        >>> from hf_specgen.candidates.tree_size import FixedTreeSizer
        >>> best_combinations(Ranked(tokens, values, np.zeros_like(tokens)), 2, FixedTreeSizer(3)).tokens
        [5, 7, 6]
    """
    used = set[tuple[int, int]]()

    def children(node: RankedIndex, depth: int) -> Iterator[tuple[int, float, RankedIndex]]:
        group = depth, node.own_index
        if node.own_index >= 0 and not (wants_q and group in used):
            used.add(group)
            for token, value, index in zip(*(part[group].tolist() for part in ranked), strict=True):
                yield token, value, RankedIndex(*group, index)

    return best_first(RankedIndex(-1, 0, 0), children, k, SearchLimits(sizer.max_nodes))


def with_q(
    draft: DraftTree, indices: Sequence[NDArray[np.integer[Any]]], predicted: DepthLogits, vocab: int
) -> DraftTree:
    """The draft with the probabilities that its nodes were drawn with; `indices` are `[nodes, 3]` of each row."""
    scores, candidates = predicted
    batch, _, num_previous, size = scores.shape
    # Of each node its depth, and the index of its distribution among those of all depths and previous tokens.
    index = np.zeros((2, batch, draft.nodes), dtype=np.int64)
    for row, of_nodes in enumerate(indices):
        depths, previous, _ = of_nodes.T
        index[0, row, : len(of_nodes)] = depths
        index[1, row, : len(of_nodes)] = depths * num_previous + previous
    depth, source = torch.from_numpy(index).to(scores.device)[..., None].expand(-1, -1, -1, size)
    q = scores.flatten(1, 2).gather(1, source).softmax(dim=-1)
    if candidates is not None:
        q = q.new_zeros(batch, draft.nodes, vocab).scatter(2, candidates.gather(1, depth), q)
    return DraftTree(draft.token_lists(), draft.parents, q)
