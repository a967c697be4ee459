"""The most probable continuations of a text, by what followed earlier occurrences of its end: a tree, best-first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hf_specgen.candidates.ngram_index import NgramIndex
from hf_specgen.candidates.ngram_odds import (
    BUCKET_OF_LENGTH,
    BUCKETS,
    FREQUENT,
    NEW_TOKEN_ODDS,
    NEW_TOKEN_ODDS_PER_TOKEN,
)
from hf_specgen.tree import Parents


class Occurrence(NamedTuple):
    """A place in a text after tokens that equal the last ones of a row.

    Args:
        text: the text.
        position: of the token that followed.
        length: of the match.
        kind: that of `MatchOdds`.
    """

    text: NgramIndex
    position: int
    length: int
    kind: int


class Limits(NamedTuple):
    """How large a tree is grown.

    Args:
        depth: maximum depth.
        nodes: maximum number of nodes.
        min_joint: probability of being accepted below which a node is left out.
        leaves: maximum number of paths.
    """

    depth: int
    nodes: int
    min_joint: float = 0.0
    leaves: int = 2**31


class NgramTree:
    """A tree of continuations, in descending order of their probabilities; parents come first.

    Attributes:
        tokens, parents: of each node.
        joint: probability that the node is accepted.
        expected: the same, given that its parent is accepted.
        classes: the class of the occurrence with the strongest vote for it, see `MatchOdds`.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.joint: list[float] = []
        self.expected: list[float] = []
        self.classes: list[int] = []

    def first(self, count: int) -> tuple[list[int], Parents]:
        """Tokens and parents of the first `count` nodes."""
        return self.tokens[:count], tuple(self.parents[:count])


Voters = list[tuple[memoryview, int, int, tuple[int, ...], int]]
"""Of each occurrence: text, place of its end, position at depth 0, classes by match length, match length at depth 0."""
Frequent = Sequence[tuple[int, float]]
_Child = tuple[int, float, int, Voters]


def grow_tree(
    occurrences: Sequence[Occurrence],
    odds: Sequence[float],
    limits: Limits,
    frequent: Frequent = (),
    find: Callable[[int], Sequence[Occurrence]] = lambda token: (),
) -> NgramTree:
    """Grow the most probable tree: in each step the most probable node that is known is added, and its children become
    known.

    Args:
        occurrences: of the end of the text.
        odds: `MatchOdds.values`.
        limits: of the tree.
        frequent: the most frequent tokens and their shares of the text; proposed where occurrences leave doubt.
        find: looks up the occurrences of one token, to continue after a frequent one.

    Example:
        >>> from hf_specgen.candidates.ngram_odds import OWN, MatchOdds
        >>> index = NgramIndex()
        >>> index.extend([1, 2, 3, 1, 2, 4, 1, 2])
        >>> found = [Occurrence(index, place, length, OWN) for place, length in index.occurrences([1, 2], 8).items()]
        >>> grow_tree(found, MatchOdds().values, Limits(depth=2, nodes=4)).first(4)
        ([4, 3, 1, 1], (-1, -1, 0, 1))
    """
    tree = NgramTree()
    tokens, parents, joints = tree.tokens, tree.parents, tree.joint
    max_depth, max_nodes, min_joint, max_leaves = limits
    heap: list[tuple[float, int, int, int, int, float, int, Voters]] = []
    is_leaf: list[bool] = []
    node, joint, depth, known, leaves = -1, 1.0, 0, 0, 0
    children = _vote(_voters(occurrences), 0, odds)
    children += _frequent_children(children, odds[FREQUENT], frequent)
    while True:
        for token, probability, kind, voters in children if depth < max_depth else ():
            value = joint * probability
            if value > min_joint:
                known += 1  # breaks ties by age
                heapq.heappush(heap, (-value, known, node, depth + 1, token, probability, kind, voters))
        while True:
            if not heap or len(tokens) == max_nodes:
                return tree
            negative, _, parent, depth, token, probability, kind, voters = heapq.heappop(heap)
            extends = parent >= 0 and is_leaf[parent]
            if extends or leaves < max_leaves:
                break
        if extends:
            is_leaf[parent] = False
        else:
            leaves += 1
        node, joint = len(tokens), -negative
        tokens.append(token)
        parents.append(parent)
        joints.append(joint)
        tree.expected.append(probability)
        tree.classes.append(kind)
        is_leaf.append(True)
        children = _vote(_voters(find(token)) if kind == FREQUENT else voters, depth if voters else 0, odds)


def _voters(occurrences: Sequence[Occurrence]) -> Voters:
    return [(text.tokens, text.end, position, _CLASSES[kind], length) for text, position, length, kind in occurrences]


def _vote(voters: Voters, depth: int, odds: Sequence[float]) -> list[_Child]:
    """The tokens that occurrences propose at a depth: token, probability, class of the strongest vote, and its voters.

    An occurrence that followed the path so far has a match that is longer by the depth.
    """
    if len(voters) == 1:
        return _only_vote(voters, depth, odds)
    votes: dict[int, _Vote] = {}
    total = NEW_TOKEN_ODDS
    for voter in voters:
        text, end, position, classes, length = voter
        position += depth
        if position == end or position >= len(text) or (token := text[position]) < 0:
            continue
        kind = classes[min(length + depth, LONGEST)]
        value = odds[kind]
        total += value
        vote = votes.get(token)
        if vote is None:
            votes[token] = _Vote(value, kind, voter)
            total += NEW_TOKEN_ODDS_PER_TOKEN
        else:
            vote.add(value, kind, voter)
    return [(token, vote.odds / total, vote.kind, vote.voters) for token, vote in votes.items()]


def _only_vote(voters: Voters, depth: int, odds: Sequence[float]) -> list[_Child]:
    """The same for one occurrence: most nodes of a long chain have no other."""
    text, end, position, classes, length = voters[0]
    position += depth
    if position == end or position >= len(text) or (token := text[position]) < 0:
        return []
    kind = classes[min(length + depth, LONGEST)]
    value = odds[kind]
    return [(token, value / (value + NEW_TOKEN_ODDS + NEW_TOKEN_ODDS_PER_TOKEN), kind, voters)]


class _Vote:
    """The votes for one token."""

    __slots__ = ("kind", "odds", "strongest", "voters")

    def __init__(self, odds: float, kind: int, voter: tuple[memoryview, int, int, tuple[int, ...], int]):
        self.odds = self.strongest = odds
        self.kind, self.voters = kind, [voter]

    def add(self, odds: float, kind: int, voter: tuple[memoryview, int, int, tuple[int, ...], int]) -> None:
        self.odds += odds
        self.voters.append(voter)
        if odds > self.strongest:
            self.strongest, self.kind = odds, kind


def _frequent_children(children: Sequence[_Child], share: float, frequent: Frequent) -> list[_Child]:
    rest = 1.0 - sum(child[1] for child in children)
    proposed = {child[0] for child in children}
    return [(token, rest * share * part, FREQUENT, []) for token, part in frequent if token not in proposed]


LONGEST = len(BUCKET_OF_LENGTH) - 1
_CLASSES = [tuple(kind * BUCKETS + bucket for bucket in BUCKET_OF_LENGTH) for kind in range(FREQUENT // BUCKETS)]
