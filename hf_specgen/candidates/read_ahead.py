"""First-stage proposals for a draft model, so that one of its forward passes reads several levels of its draft tree.

A draft model needs a pass for each level, since it can read a node only after it has proposed it. A pass over a few
more tokens takes hardly longer. So each pass also reads first-stage nodes: likely children of the nodes that it
expands, and their children. Where the draft model then proposes the same token, what it proposes after that is known
already. They come from the strategies it is combined with, and from a table of what it proposed last after each token.

Source: Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling"
(2024), for the table; Chen et al., "Cascade Speculative Drafting for Even Faster LLM Inference" (2023), section 3, for
drafts that a draft model verifies. Here neither is verified by the target.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_specgen.candidates.recycling import RecyclingTable
from hf_specgen.candidates.tree_builder import TreeBuilder
from hf_specgen.candidates.tree_edges import Edges
from hf_specgen.depth.calibration import BIN_CENTERS
from hf_specgen.verification.top_tokens import TopTokens

REPEATED_SHARE = 0.35
"""Estimated probability of a token of the table, over the probability that the draft model gave it then: of the tokens
that the embedded draft model proposed first with a probability above 0.8, it preferred 35% again after the same token,
of the others fewer in proportion."""
MAX_FIRST_STAGE_NODES = 6
"""Maximum number of first-stage nodes of a row in a pass: with the one or two other tokens of most passes they are 8 at
most, a width of compiled passes. With 12, the projected speed of a draft model is 0.5% higher, without the time to find
them."""
MIN_FIRST_STAGE_PROBABILITY = 0.01
"""Probability below which no first-stage node is proposed: finding it takes about 1% of the time of a pass."""
CENTERS: list[float] = BIN_CENTERS.tolist()

NextTokens = tuple[Sequence[int], Sequence[float]]
"""Likely next tokens and their probabilities, most likely first."""
Continuations = Callable[[int, Sequence[int]], NextTokens]
"""Likely next tokens after the text of a row and a path of draft tokens."""


class Start(NamedTuple):
    """A node whose descendants are proposed.

    Args:
        path: the tokens from the row's first draft token to the node; none for the row's last token.
        probability: of the node, relative to that of all nodes that are expanded in the same pass.
        suggested: the node of a suggested tree that stands for it; -1 for its root, None if there is none.
    """

    path: Sequence[int]
    probability: float
    suggested: int | None = None


class FirstStageNodes(NamedTuple):
    """First-stage nodes of one row, the most probable first.

    Args:
        tokens: of each.
        parents: of each, its index among these, or the number of its start: -1 for the first, -2 for the second.
        joint: probability of each that the drafter prefers it and those above it, times that of their start.
    """

    tokens: list[int]
    parents: list[int]
    joint: list[float]

    def first(self, count: int) -> FirstStageNodes:
        """The first `count` of them."""
        return FirstStageNodes(self.tokens[:count], self.parents[:count], self.joint[:count])

    def placed(self, starts: int, first: int) -> list[tuple[int, int]]:
        """The place of each one's parent, and its token.

        Args:
            starts: place of the first start.
            first: place of the first of these nodes.
        """
        places = [starts - 1 - parent if parent < 0 else first + parent for parent in self.parents]
        return list(zip(places, self.tokens, strict=True))


class ReadAhead:
    """Proposes first-stage nodes in one call.

    Args:
        table: what the draft model proposed last after each token; it is updated.
        vocab: number of tokens that both models know; no others are proposed.

    Attributes:
        sources: strategies that continue a text, for the current draft.
    """

    def __init__(self, table: RecyclingTable, vocab: int):
        self._table, self._vocab = table, min(vocab, table.vocab_size)
        self._passes, self._levels = 1.0, 1.0
        self.sources: Sequence[Continuations] = ()

    @property
    def passes_per_level(self) -> float:
        """Number of passes for a level of a draft tree, on average over the passes of this call."""
        return self._passes / self._levels

    def count(self, found: float) -> None:
        """Count a pass.

        Args:
            found: probability of the first-stage nodes that the drafter proposed, relative to that of the nodes that
                were expanded: the part of a further pass, or of several, that they have saved.
        """
        self._passes += 1
        self._levels += 1 + found

    def learn(
        self, tokens: NDArray[np.integer[Any]], best: NDArray[np.integer[Any]], probabilities: NDArray[Any]
    ) -> None:
        """Enter into the table what the draft model proposes.

        Args:
            tokens: `[n]` that were read.
            best: `[n, count]` the most likely tokens after each, in any order.
            probabilities: `[n, count]` of these.
        """
        known = tokens < self._vocab
        order = np.argsort(-probabilities[known], axis=1, kind="stable")
        best, probabilities = (np.take_along_axis(values[known], order, axis=1) for values in (best, probabilities))
        self._table.update(TopTokens(tokens[known], best, probabilities))

    def propose(
        self,
        row: int,
        last_token: int,
        starts: Sequence[Start],
        most: int,
        depth: int,
        suggested: Edges | None = None,
    ) -> FirstStageNodes:
        """The most probable descendants of some nodes, best-first.

        Args:
            row: of the batch.
            last_token: of the row.
            starts: at most one of them is the row's last token.
            most: maximum number of nodes.
            depth: maximum depth of a node.
            suggested: the edges of a tree that other strategies propose after the row's text.
        """
        proposed = FirstStageNodes([], [], [])
        # Probability (negative, so that the highest comes first), age, parent, path, node of the suggested tree.
        heap: list[tuple[float, int, int, Sequence[int], int | None]] = []
        age = 0

        def push_children(parent: int, path: Sequence[int], probability: float, node: int | None) -> None:
            nonlocal age
            if len(path) >= depth:
                return
            below = suggested.get(node, []) if suggested and node is not None else []
            known = {token: place for token, place, _ in below}
            for token, share in self._children(row, path, last_token, below).items():
                if (value := probability * share) > MIN_FIRST_STAGE_PROBABILITY and token < self._vocab:
                    age += 1
                    heapq.heappush(heap, (-value, age, parent, (*path, token), known.get(token)))

        for number, start in enumerate(starts):
            push_children(-1 - number, start.path, start.probability, start.suggested)
        while heap and len(proposed.tokens) < most:
            negative, _, parent, path, node = heapq.heappop(heap)
            proposed.tokens.append(path[-1])
            proposed.parents.append(parent)
            proposed.joint.append(-negative)
            push_children(len(proposed.tokens) - 1, path, -negative, node)
        return proposed

    def _children(
        self, row: int, path: Sequence[int], last_token: int, suggested: Sequence[tuple[int, int, float]]
    ) -> dict[int, float]:
        """The probability of each likely child of a node; estimates of several sources as if they were independent."""
        missed: dict[int, float] = {token: 1 - probability for token, _, probability in suggested}
        for source in () if suggested else self.sources:
            for token, probability in zip(*source(row, path), strict=True):
                missed[token] = missed.get(token, 1.0) * (1 - probability)
        token = path[-1] if path else last_token
        successors, bins = self._table.row(token) if token < self._vocab else ([], [])
        for successor, place in zip(successors, bins, strict=True):
            missed[successor] = missed.get(successor, 1.0) * (1 - REPEATED_SHARE * CENTERS[place])
        return {token: 1 - value for token, value in missed.items()}


def starts_of(builder: TreeBuilder, row: int, nodes: Sequence[int]) -> list[Start]:
    """The nodes of a row that a pass expands, each with its probability relative to that of all of them."""
    joint = np.where(builder.expandable[row, nodes], builder.joint[row, nodes], 0.0)
    shares = joint / max(float(joint.sum()), 1e-9)
    return [Start(builder.path(row, node), float(share)) for node, share in zip(nodes, shares, strict=True)]
