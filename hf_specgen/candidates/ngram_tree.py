"""Grows a tree of the most probable continuations of a text: what followed earlier occurrences of its end.

Most nodes belong to chains that a single occurrence proposes, or several that agree. These are added as a whole, up to
the node where another continuation becomes more probable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate, islice, takewhile
from operator import mul
from typing import NamedTuple

from hf_specgen.candidates.ngram_index import SEPARATOR
from hf_specgen.candidates.ngram_match import MAX_MATCH_LENGTH
from hf_specgen.candidates.ngram_odds import FREQUENT, MatchOdds
from hf_specgen.candidates.ngram_votes import MAX_VOTERS, Occurrence, frequent_tokens, strongest, unanimous, vote
from hf_specgen.tree import Parents
from hf_specgen.verification.result import verified_nodes

Frequent = Sequence[tuple[int, float]]
"""The most frequent tokens of a text and their shares of it, in descending order."""


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
        voters: the occurrences that proposed it; none for a frequent token.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.joint: list[float] = []
        self.voters: list[Sequence[Occurrence]] = []

    def add(self, token: int, parent: int, joint: float, voters: Sequence[Occurrence]) -> None:
        """Add a node."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.joint.append(joint)
        self.voters.append(voters)

    def add_chain(self, tokens: Sequence[int], joint: Sequence[float], voters: Sequence[Occurrence]) -> int:
        """Add the first tokens of a chain below the newest node, as many as there are probabilities."""
        count, newest = len(joint), len(self.tokens) - 1
        self.tokens.extend(tokens[:count])
        self.parents.extend(range(newest, newest + count))
        self.joint.extend(joint)
        self.voters.extend([voters] * count)
        return count

    def first(self, count: int) -> tuple[list[int], Parents]:
        """Tokens and parents of the first `count` nodes."""
        return self.tokens[:count], tuple(self.parents[:count])

    def outcomes(self, emitted: Sequence[int], odds: MatchOdds) -> list[tuple[int, float, bool]]:
        """What to learn from the tokens that followed: the arguments of `MatchOdds.observe` for each verified node.

        Args:
            emitted: the tokens that followed.
            odds: with which the tree was grown, as they were then.
        """
        depths: dict[int, int] = {-1: 0}
        found: list[tuple[int, float, bool]] = []
        for node, accepted in verified_nodes(self.tokens, self.parents, emitted):
            parent, voters = self.parents[node], self.voters[node]
            depths[node] = depths[parent] + 1
            expected = self.joint[node] / self.joint[parent] if parent >= 0 else self.joint[node]
            match_class = strongest(voters, depths[parent], odds) if voters else FREQUENT
            found.append((match_class, expected, accepted))
        return found


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
        >>> text = [1, 2, 3, 1, 2, 4, 1, 2]
        >>> found = [(text, 8, 5, 2, OWN), (text, 8, 2, 2, OWN)]
        >>> grow_tree(found, MatchOdds(), Limits(depth=2, nodes=4)).first(4)
        ([4, 3, 1, 1], (-1, -1, 0, 1))
    """
    values, proposers, total = vote(occurrences, 0, odds)
    growth = _Growth(odds, limits, find, frequent_tokens(frequent, values, total, odds))
    if limits.depth > 0:
        for token, value in values.items():
            growth.push(value / total, -1, 1, token, proposers[token])
        growth.push_frequent()
        growth.run()
    return growth.tree


class _Growth:
    """A tree under construction, and a heap of the nodes that may be added next.

    Args:
        odds, limits, find: see `grow_tree`.
        others: frequent tokens and their probabilities, in descending order; each is pushed when the one before has
            been added.
    """

    def __init__(
        self,
        odds: MatchOdds,
        limits: Limits,
        find: Callable[[int], Sequence[Occurrence]],
        others: Iterator[tuple[int, float]],
    ):
        self.tree = NgramTree()
        self._odds, self._limits, self._find, self._others = odds, limits, find, others
        # Joint probability (negative, so that the highest comes first), age, parent, depth, token, voters.
        self._heap: list[tuple[float, int, int, int, int, Sequence[Occurrence]]] = []
        self._age = 0  # breaks ties
        self._inner = {-1}  # nodes with children

    def push(self, joint: float, parent: int, depth: int, token: int, voters: Sequence[Occurrence]) -> None:
        """Push a node to the heap, unless it is too improbable."""
        if joint > self._limits.min_joint:
            self._age += 1
            heappush(self._heap, (-joint, self._age, parent, depth, token, voters))

    def push_frequent(self) -> None:
        """Push the next frequent token to the heap."""
        for token, probability in islice(self._others, 1):
            self.push(probability, -1, 1, token, ())

    def run(self) -> None:
        """Add the most probable nodes, as many as the limits allow."""
        tree, heap, inner = self.tree, self._heap, self._inner
        max_depth, max_nodes, _, max_leaves = self._limits
        leaves = 0
        while heap and len(tree.tokens) < max_nodes:
            negative, _, parent, depth, token, voters = heappop(heap)
            if parent in inner:
                if leaves == max_leaves:
                    continue
                leaves += 1
            inner.add(parent)
            if voters:
                voters = voters[:MAX_VOTERS]
                tree.add(token, parent, -negative, voters)
            else:
                tree.add(token, parent, -negative, ())
                self.push_frequent()
                voters = self._find(token)
            if depth < max_depth:
                self._continue(voters, depth)

    def _continue(self, voters: Sequence[Occurrence], depth: int) -> None:
        """Add what occurrences agree on below the newest node, while no node on the heap is more probable."""
        tree, heap, odds = self.tree, self._heap, self._odds
        max_depth, max_nodes, min_joint, _ = self._limits
        joint, node = tree.joint[-1], len(tree.tokens) - 1
        while depth < max_depth:
            if len(voters) == 1:
                text, end, position, length, kind = voters[0]
                position, length = position + depth, length + depth
                if position >= end or (token := text[position]) == SEPARATOR:
                    return
                following = joint * odds.alone[kind][length if length < MAX_MATCH_LENGTH else MAX_MATCH_LENGTH]
            else:
                values, proposers, total = vote(voters, depth, odds)
                if len(values) != 1:
                    for token, value in values.items():
                        self.push(joint * (value / total), node, depth + 1, token, proposers[token])
                    return
                [(token, value)] = values.items()
                following, voters = joint * (value / total), proposers[token]
            bound = max(min_joint, -heap[0][0]) if heap else min_joint
            if following <= bound:
                self.push(following, node, depth + 1, token, voters)
                return
            tokens, probabilities = unanimous(voters, depth, min(max_depth - depth, max_nodes - node - 1), odds)
            if not tokens:
                return
            joints = list(takewhile(bound.__lt__, accumulate(probabilities, mul, initial=joint)))[1:]
            added = tree.add_chain(tokens, joints, voters)
            self._inner.update(range(node, node + added))
            joint, node, depth = joints[-1], node + added, depth + added
