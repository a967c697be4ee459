"""Proposes continuations of one row from its text: what followed earlier occurrences of its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from hf_specgen.candidates.ngram_history import NgramHistory
from hf_specgen.candidates.ngram_index import MAX_MATCH_LENGTH, NgramIndex
from hf_specgen.candidates.ngram_odds import NEAR, OWN, MatchOdds
from hf_specgen.candidates.ngram_tree import Limits, NgramTree, Occurrence, grow_tree
from hf_specgen.verification.result import judged_nodes

MAX_OCCURRENCES = 24
"""Maximum number of occurrences that vote, in the row's text and in the history each: with 16, edits take 10% more
steps."""
NEAR_TOKENS = 16
"""An occurrence counts as near if it is at most this many tokens after the position that was copied from last."""
MAX_SKIPPED = 3
"""Maximum number of consecutive tokens that differ from the copied passage; after more, copying does not resume."""
FREQUENT_TOKENS, FREQUENT_OCCURRENCES = 24, 4
"""How many of the most frequent tokens are proposed, and how many occurrences vote on what follows each of them."""
RECOUNT_EVERY = 32
"""Tokens between counts of the most frequent ones."""


class MatchLengths(NamedTuple):
    """Which matches are considered.

    Args:
        least: occurrences with shorter matches are ignored. With more than 1, nothing is proposed without a match.
        most: longer matches count as that long.
    """

    least: int = 1
    most: int = MAX_MATCH_LENGTH


class RowText:
    """The text of one row.

    Args:
        prompt: the text so far.
        odds: of occurrences; learns from the outcome of proposals. May be shared by rows.
        history: earlier texts.
        lengths: which matches are considered.

    Example:
        >>> text = RowText([5, 6, 7, 8, 5, 6], MatchOdds())
        >>> text.propose(Limits(depth=2, nodes=2)).first(2)
        ([7, 8], (-1, 0))
    """

    def __init__(
        self,
        prompt: Sequence[int],
        odds: MatchOdds,
        history: NgramHistory | None = None,
        lengths: MatchLengths = MatchLengths(),  # noqa: B008
    ):
        self.index = NgramIndex()
        self.index.extend(prompt)
        self._odds, self._history, self._lengths = odds, history, lengths
        self._tail = list(prompt[-MAX_MATCH_LENGTH:])
        # Occurrences (position -> match length) at the last proposal, and how many tokens were appended since.
        self._known: dict[int, int] = {}
        self._known_history: dict[int, int] = {}
        self._grown = 0
        # The position after the token that was copied last, -1 for none; and the differing tokens appended since.
        self._source, self._skipped = -1, 0
        self._counts = Counter(prompt)
        self._frequent: list[tuple[int, float]] = []
        self._following: dict[int, list[Occurrence]] = {}
        self._counted = -RECOUNT_EVERY

    def __len__(self) -> int:
        return len(self.index)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        self._follow_source(tokens)
        self.index.extend(tokens)
        self._counts.update(tokens)
        self._tail = [*self._tail, *tokens][-MAX_MATCH_LENGTH:]
        self._grown += len(tokens)

    def propose(self, limits: Limits) -> NgramTree:
        """The most probable continuations of the text."""
        index, (least, most), source = self.index, self._lengths, self._source
        known = index.occurrences(self._tail, MAX_OCCURRENCES, self._known, self._grown)
        nearest = source if source >= 0 else index.end
        found: list[Occurrence] = [
            (
                index.tokens,
                index.end,
                position,
                length if length < most else most,
                NEAR if nearest <= position <= source + NEAR_TOKENS else OWN,
            )
            for position, length in known.items()
            if length >= least
        ]
        if least == 1:
            found += [(index.tokens, index.end, place, 0, NEAR) for place in self._resumed() if place not in known]
        if self._history is not None:
            self._known_history, others = self._history.find(
                self._tail, MAX_OCCURRENCES, self._known_history, self._grown
            )
            found += [
                (text, end, position, min(length, most), kind)
                for text, end, position, length, kind in others
                if length >= least
            ]
        self._known, self._grown = known, 0
        frequent = self._most_frequent() if least == 1 else ()
        return grow_tree(found, self._odds, limits, frequent, self._find)

    def learn(self, tree: NgramTree, emitted: Sequence[int]) -> None:
        """Learn the odds of occurrences from the tokens that followed.

        Args:
            tree: what was proposed.
            emitted: the tokens that followed.
        """
        for node, accepted in judged_nodes(tree.tokens, tree.parents, emitted):
            self._odds.observe(tree.classes[node], tree.expected(node), accepted)

    def _is_near(self, position: int) -> bool:
        return self._source >= 0 and 0 <= position - self._source <= NEAR_TOKENS

    def _resumed(self) -> list[int]:
        """Positions at which copying may resume after a mismatch: the differing tokens were replaced, or inserted."""
        if not self._skipped:
            return []
        places = (self._source + self._skipped, self._source)
        return [place for place in places if place < self.index.end]

    def _follow_source(self, tokens: Sequence[int]) -> None:
        """Update `_source`: the occurrence that agrees with most of the new tokens, the nearest one if several do."""
        places = [
            (self._agreement(position, tokens), self._is_near(position), length, position)
            for position, length in self._known.items()
            if length > 1 or self._is_near(position)
        ]
        places += [(self._agreement(place, tokens), True, 0, place) for place in self._resumed()]
        agreed, _, _, place = max(places, default=(0, False, 0, -1))
        if agreed:
            self._source, self._skipped = place + agreed, len(tokens) - agreed
        elif self._source >= 0:
            self._skipped += len(tokens)
        if self._skipped > MAX_SKIPPED:
            self._skipped = 0

    def _agreement(self, position: int, tokens: Sequence[int]) -> int:
        """How many of the tokens equal those of the text from a position on."""
        text, room = self.index.tokens, self.index.end - position
        agreed = 0
        while agreed < min(len(tokens), room) and text[position + agreed] == tokens[agreed]:
            agreed += 1
        return agreed

    def _most_frequent(self) -> list[tuple[int, float]]:
        if len(self) >= self._counted + RECOUNT_EVERY:
            self._counted = len(self)
            self._following.clear()
            self._frequent = [(token, n / len(self)) for token, n in self._counts.most_common(FREQUENT_TOKENS)]
        return self._frequent

    def _find(self, token: int) -> list[Occurrence]:
        """Occurrences of a frequent token, as they were when frequencies were counted last.

        Their positions are those of the token itself, one before the token that followed, since it is at depth 1.
        """
        if token not in self._following:
            text, end = self.index.tokens, self.index.end
            found = self.index.occurrences([token], FREQUENT_OCCURRENCES)
            self._following[token] = [(text, end, position - 1, 0, OWN) for position in found]
        return self._following[token]
