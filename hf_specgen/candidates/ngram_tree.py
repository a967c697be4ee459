"""Grows a tree of the most probable continuations of a text: what followed earlier occurrences of its end.

Most nodes belong to chains that a single occurrence proposes. These are added as a whole, by slices of its text and of
the tables in `MatchOdds`, up to the node where another continuation becomes more probable.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice
from operator import mul
from typing import NamedTuple

from hf_specgen.candidates.ngram_index import MAX_MATCH_LENGTH, SEPARATOR
from hf_specgen.candidates.ngram_odds import (
    CLASSES_BY_LENGTH,
    FREQUENT,
    MAX_CHAIN_CHUNK,
    NEW_TOKEN_ODDS,
    NEW_TOKEN_ODDS_PER_TOKEN,
    MatchOdds,
)
from hf_specgen.tree import Parents

MAX_VOTERS = 8
"""Occurrences of a token that also vote on what follows it: with all of them, as many tokens are accepted per step."""

Occurrence = tuple["array[int]", int, int, int, int]
"""A place after tokens that equal the last ones of a row: the text, where it ends, the position of the token that
followed, the length of the match, and its kind (see `MatchOdds`). A plain tuple, since every draft makes dozens."""
Frequent = Sequence[tuple[int, float]]
"""The most frequent tokens of a text and their shares of it, in descending order."""
_Child = tuple[int, float, Sequence[Occurrence]]
"""Token, probability, and the occurrences that voted for it; none for a frequent token."""


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
        classes: the class of the occurrence with the strongest vote for it, see `MatchOdds`.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.joint: list[float] = []
        self.classes: list[int] = []

    def add(self, token: int, parent: int, joint: float, match_class: int) -> None:
        """Add a node."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.joint.append(joint)
        self.classes.append(match_class)

    def expected(self, node: int) -> float:
        """Probability that the node is accepted, given that its parent is."""
        parent = self.parents[node]
        return self.joint[node] / self.joint[parent] if parent >= 0 else self.joint[node]

    def first(self, count: int) -> tuple[list[int], Parents]:
        """Tokens and parents of the first `count` nodes."""
        return self.tokens[:count], tuple(self.parents[:count])


def grow_tree(
    occurrences: Sequence[Occurrence],
    odds: MatchOdds,
    limits: Limits,
    frequent: Frequent = (),
    find: Callable[[int], Sequence[Occurrence]] = lambda token: (),
) -> NgramTree:
    """Grow the most probable tree, best-first.

    Again and again the most probable known node is added, and its children become known.

    Args:
        occurrences: of the end of the text, those with the longest matches first.
        odds: of the occurrences.
        limits: of the tree.
        frequent: the most frequent tokens; they share a part of the probability that occurrences leave.
        find: looks up the occurrences of one frequent token, each with the position of the token itself, to continue.

    Example:
        >>> from hf_specgen.candidates.ngram_odds import OWN
        >>> text = array("i", [1, 2, 3, 1, 2, 4, 1, 2])
        >>> found = [(text, 8, 5, 2, OWN), (text, 8, 2, 2, OWN)]
        >>> grow_tree(found, MatchOdds(), Limits(depth=2, nodes=4)).first(4)
        ([4, 3, 1, 1], (-1, -1, 0, 1))
    """
    children = _vote(occurrences, 0, odds)
    share = odds.values[FREQUENT] * (1.0 - sum([child[1] for child in children]))
    proposed = {child[0] for child in children}
    others = ((token, share * part, ()) for token, part in frequent if token not in proposed)
    growth = _Growth(odds, limits, find, others)
    children += islice(others, 1)
    if limits.leaves == 1:
        growth.run_chain(children)
    elif limits.depth > 0:
        growth.push(-1, 1.0, 0, children)
        growth.run()
    return growth.tree


class _Growth:
    """A tree under construction, and a heap of the nodes that may be added next.

    Args:
        odds, limits, find: see `grow_tree`.
        others: frequent tokens, the most probable first; each is pushed when the one before has been added.
    """

    def __init__(
        self,
        odds: MatchOdds,
        limits: Limits,
        find: Callable[[int], Sequence[Occurrence]],
        others: Iterator[_Child],
    ):
        self.tree = NgramTree()
        self._odds, self._limits, self._find, self._others = odds, limits, find, others
        # Joint probability (negative, so that the highest comes first), age, parent, depth, token, voters.
        self._heap: list[tuple[float, int, int, int, int, Sequence[Occurrence]]] = []
        self._age = 0

    def push(self, parent: int, joint: float, depth: int, children: list[_Child]) -> None:
        """Push the children of a node, which has this joint probability and depth, to the heap."""
        heap, min_joint, age = self._heap, self._limits.min_joint, self._age
        for token, probability, voters in children:
            value = joint * probability
            if value > min_joint:
                age += 1  # breaks ties
                heapq.heappush(heap, (-value, age, parent, depth + 1, token, voters))
        self._age = age

    def run(self) -> None:
        """Add the most probable nodes, as many as the limits allow."""
        tree, heap = self.tree, self._heap
        max_depth, max_nodes, _, max_leaves = self._limits
        tokens = tree.tokens
        inner: set[int] = {-1}
        leaves = 0
        while heap and len(tokens) < max_nodes:
            negative, _, parent, depth, token, voters = heapq.heappop(heap)
            if parent in inner:
                if leaves == max_leaves:
                    continue
                leaves += 1
            inner.add(parent)
            node = len(tokens)
            voters = self._add(token, parent, -negative, depth, voters)
            if parent == -1 and tree.classes[node] == FREQUENT:
                self.push(-1, 1.0, 0, list(islice(self._others, 1)))
            if depth == max_depth:
                continue
            if len(voters) == 1:
                self._add_chain(voters[0], node, depth)
                inner.update(range(node, len(tokens) - 1))
            else:
                self.push(node, -negative, depth, _vote(voters, depth, self._odds))

    def run_chain(self, children: list[_Child]) -> None:
        """Add the most probable of these children of the root, its most probable child, and so on."""
        joint = 1.0
        for depth in range(1, min(self._limits.depth, self._limits.nodes) + 1):
            if not children:
                break
            token, probability, voters = max(children, key=_probability)
            joint *= probability
            if joint <= self._limits.min_joint:
                break
            voters = self._add(token, depth - 2, joint, depth, voters)
            if len(voters) == 1:
                self._add_chain(voters[0], depth - 1, depth)
                break
            children = _vote(voters, depth, self._odds)

    def _add(
        self, token: int, parent: int, joint: float, depth: int, voters: Sequence[Occurrence]
    ) -> Sequence[Occurrence]:
        """Add one node; returns the occurrences that vote on what follows it."""
        if voters:
            voters = voters[:MAX_VOTERS]
            self.tree.add(token, parent, joint, _strongest(voters, depth - 1, self._odds))
            return voters
        self.tree.add(token, parent, joint, FREQUENT)
        return self._find(token)

    def _add_chain(self, voter: Occurrence, node: int, depth: int) -> None:
        """Add what a single occurrence proposes below the newest node, while no node on the heap is more probable."""
        tree, heap, limits = self.tree, self._heap, self._limits
        text, end, position, length, kind = voter
        first, length = position + depth, min(length + depth, MAX_MATCH_LENGTH)
        count = min(end - first, limits.depth - depth, MAX_CHAIN_CHUNK)
        if count <= 0:
            return
        alone, classes = self._odds.alone[kind], CLASSES_BY_LENGTH[kind]
        bound = min(heap[0][0], -limits.min_joint) if heap else -limits.min_joint
        added, following = 0, -tree.joint[node] * alone[length]
        if following < bound:
            joints = list(accumulate(alone[length : length + count], mul, initial=-tree.joint[node]))
            added = min(bisect_left(joints, bound) - 1, limits.nodes - len(tree.tokens))
            piece = text[first : first + added]
            if SEPARATOR in piece:
                count = added = piece.index(SEPARATOR)
            tree.tokens.extend(piece[:added])
            tree.parents.extend(range(node, node + added))
            tree.joint.extend([-joint for joint in joints[1 : added + 1]])
            tree.classes.extend(classes[length : length + added])
            following = joints[added + 1] if added < count else 0.0
        if added == MAX_CHAIN_CHUNK:
            self._add_chain(voter, node + added, depth + added)
        elif following < -limits.min_joint and (token := text[first + added]) != SEPARATOR:
            self._age += 1
            heapq.heappush(heap, (following, self._age, node + added, depth + added + 1, token, (voter,)))


def _vote(voters: Sequence[Occurrence], depth: int, odds: MatchOdds) -> list[_Child]:
    """The tokens that occurrences propose at a depth.

    An occurrence that continues along the path so far has a match that is longer by the depth.
    """
    votes: dict[int, list[Occurrence]] = {}
    values: dict[int, float] = {}
    by_length = odds.by_length
    for voter in voters:
        text, end, position, length, kind = voter
        position += depth
        if position < end:
            token, length = text[position], length + depth
            value = by_length[kind][length if length < MAX_MATCH_LENGTH else MAX_MATCH_LENGTH]
            if token in votes:
                values[token] += value
                votes[token].append(voter)
            else:
                values[token], votes[token] = value, [voter]
    values.pop(SEPARATOR, None)
    total = sum(values.values()) + NEW_TOKEN_ODDS + NEW_TOKEN_ODDS_PER_TOKEN * len(values)
    return [(token, value / total, votes[token]) for token, value in values.items()]


def _strongest(voters: Sequence[Occurrence], depth: int, odds: MatchOdds) -> int:
    """The class of the occurrence with the largest odds."""
    classes = [
        CLASSES_BY_LENGTH[kind][length + depth if length + depth < MAX_MATCH_LENGTH else MAX_MATCH_LENGTH]
        for _, _, _, length, kind in voters
    ]
    return classes[0] if len(classes) == 1 else max(classes, key=odds.values.__getitem__)


def _probability(child: _Child) -> float:
    return child[1]
