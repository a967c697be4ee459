"""Guesses what a draft model will propose, so that one of its forward passes reads several levels of its draft tree.

A draft model needs a pass for each level, since it can read a node only after it has proposed it. A pass over a few
more tokens takes hardly longer. So each pass also reads guessed children of the nodes that it expands, and their
children: where the draft model then proposes a guessed token, what it proposes after that is known already. Guesses
come from the strategies it is combined with, and from a table of what it proposed last after each token.

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

from hf_specgen.candidates.recycling_table import RecyclingTable
from hf_specgen.candidates.tree_builder import TreeBuilder
from hf_specgen.candidates.tree_edges import Edges
from hf_specgen.depth.calibration import BIN_CENTERS
from hf_specgen.verification.top_tokens import TopTokens

REPEATED_SHARE = 0.35
"""How often the embedded draft model prefers a token that it proposed earlier after the same last token, over the
probability that it gave it then."""
MAX_GUESSES = 7
"""Maximum number of guesses of a row in a pass: with the node that most passes expand they are 8 tokens, a width of
compiled passes. With 12, the projected speed of a draft model is 0.5% higher, and they take twice as long to find."""
MIN_GUESS = 0.01
"""Probability below which a token is not guessed."""
CENTERS: list[float] = BIN_CENTERS.tolist()

Row = tuple[Sequence[int], Sequence[float]]
"""Likely next tokens and their probabilities, most likely first."""
Continuations = Callable[[int, Sequence[int]], Row]
"""Likely next tokens after the text of a row and a path of draft tokens."""


class Start(NamedTuple):
    """A node whose descendants are guessed.

    Args:
        path: the tokens from the row's first draft token to the node; none for the row's last token.
        probability: that a pass over the node's best child would follow.
        suggested: the node of a suggested tree that stands for it; -1 for its root, None if there is none.
    """

    path: Sequence[int]
    probability: float
    suggested: int | None = None


class Guesses(NamedTuple):
    """Guessed nodes of one row, the most probable first.

    Args:
        tokens: of each.
        parents: of each, its index among the guesses, or the number of its start: -1 for the first, -2 for the second.
        joint: probability of each that a pass over it would follow.
    """

    tokens: list[int]
    parents: list[int]
    joint: list[float]

    def first(self, count: int) -> Guesses:
        """The first `count` of them."""
        return Guesses(self.tokens[:count], self.parents[:count], self.joint[:count])

    def placed(self, starts: int, guesses: int) -> list[tuple[int, int]]:
        """The place of each one's parent, and its token.

        Args:
            starts: place of the first start.
            guesses: place of the first guess.
        """
        places = [starts - 1 - parent if parent < 0 else guesses + parent for parent in self.parents]
        return list(zip(places, self.tokens, strict=True))


class ReadAhead:
    """Guesses for the drafts of one call.

    Args:
        table: what the draft model proposed last after each token; it is updated.

    Attributes:
        sources: strategies that continue a text, for the current draft.
    """

    def __init__(self, table: RecyclingTable):
        self._table = table
        self._passes, self._saved = 1.0, 0.0
        self.sources: Sequence[Continuations] = ()

    @property
    def passes_per_level(self) -> float:
        """Expected number of passes for a level of a draft tree, from the guesses of this call."""
        return self._passes / (self._passes + self._saved)

    def count(self, saved: float) -> None:
        """Count a pass whose guesses are expected to save this many further passes."""
        self._passes += 1
        self._saved += saved

    def learn(
        self, tokens: NDArray[np.integer[Any]], best: NDArray[np.integer[Any]], probabilities: NDArray[Any]
    ) -> None:
        """Enter into the table what the draft model proposes.

        Args:
            tokens: `[rows, nodes]` that were read.
            best: `[rows, nodes, count]` the most likely tokens after each, in any order.
            probabilities: `[rows, nodes, count]` of these.
        """
        known = tokens < self._table.vocab_size
        order = np.argsort(-probabilities[known], axis=1, kind="stable")
        best, probabilities = (np.take_along_axis(values[known], order, axis=1) for values in (best, probabilities))
        self._table.update(TopTokens(tokens[known], best, probabilities))

    def guess(
        self, row: int, last_token: int, starts: Sequence[Start], most: int, suggested: Edges | None = None
    ) -> Guesses:
        """The most probable descendants of some nodes, best-first.

        Args:
            row: of the batch.
            last_token: of the row.
            starts: at most one of them is the row's last token.
            most: maximum number of guesses.
            suggested: the edges of a tree that other strategies propose after the row's text.
        """
        guesses = Guesses([], [], [])
        # Probability (negative, so that the highest comes first), age, parent, path, node of the suggested tree.
        heap: list[tuple[float, int, int, Sequence[int], int | None]] = []
        age = 0

        def push_children(parent: int, path: Sequence[int], probability: float, node: int | None) -> None:
            nonlocal age
            below = suggested.get(node, []) if suggested and node is not None else []
            known = {token: place for token, place, _ in below}
            for token, share in self._children(row, path, last_token, below).items():
                if (value := probability * share) > MIN_GUESS:
                    age += 1
                    heapq.heappush(heap, (-value, age, parent, (*path, token), known.get(token)))

        for number, start in enumerate(starts):
            push_children(-1 - number, start.path, start.probability, start.suggested)
        while heap and len(guesses.tokens) < most:
            negative, _, parent, path, node = heapq.heappop(heap)
            guesses.tokens.append(path[-1])
            guesses.parents.append(parent)
            guesses.joint.append(-negative)
            push_children(len(guesses.tokens) - 1, path, -negative, node)
        return guesses

    def _children(
        self, row: int, path: Sequence[int], last_token: int, suggested: Sequence[tuple[int, int, float]]
    ) -> dict[int, float]:
        """The probability of each likely child of a node; estimates of several sources as if they were independent."""
        missed: dict[int, float] = {token: 1 - probability for token, _, probability in suggested}
        for source in () if suggested else self.sources:
            for token, probability in zip(*source(row, path), strict=True):
                missed[token] = missed.get(token, 1.0) * (1 - probability)
        token = path[-1] if path else last_token
        successors, bins = self._table.row(token) if token < self._table.vocab_size else ([], [])
        for successor, place in zip(successors, bins, strict=True):
            missed[successor] = missed.get(successor, 1.0) * (1 - REPEATED_SHARE * CENTERS[place])
        return {token: 1 - value for token, value in missed.items()}


def starts_of(builder: TreeBuilder, row: int, nodes: Sequence[int]) -> list[Start]:
    """The nodes of a row that a pass expands, each with its share of the probability of all of them."""
    joint = np.where(builder.expandable[row, nodes], builder.joint[row, nodes], 0.0)
    shares = joint / max(float(joint.sum()), 1e-9)
    return [Start(builder.path(row, node), float(share)) for node, share in zip(nodes, shares, strict=True)]
