"""Proposes continuations of one row from its text: what followed earlier occurrences of its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hf_specgen.candidates.ngram_chain import grow_chain
from hf_specgen.candidates.ngram_frequent import FrequentTokens
from hf_specgen.candidates.ngram_history import NgramHistory
from hf_specgen.candidates.ngram_index import NgramIndex
from hf_specgen.candidates.ngram_match import MAX_MATCH_LENGTH
from hf_specgen.candidates.ngram_odds import NEAR, OWN, MatchOdds
from hf_specgen.candidates.ngram_tree import Limits, NgramTree, grow_tree
from hf_specgen.candidates.ngram_votes import Occurrence, vote

MAX_OCCURRENCES = 24
"""Maximum number of occurrences that vote, in the row's text and in the history each: with 16, edits take 10% more
steps."""
CONTINUED_TOKENS, CONTINUED_OCCURRENCES = 8, 8
"""Tokens of the text that are compared before further tokens, and occurrences that vote on what follows these."""
NEAR_TOKENS = 16
"""An occurrence counts as near if it is at most this many tokens after the position that was copied from last."""
MAX_SKIPPED = 3
"""Maximum number of consecutive tokens that differ from the copied passage; after more, copying does not resume."""


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
        # Occurrences (position -> match length) at the last proposal, and how many tokens were appended since.
        self._known: dict[int, int] = {}
        self._known_history: dict[int, int] = {}
        self._grown = 0
        # The position after the token that was copied last, -1 for none; and the differing tokens appended since.
        self._source, self._skipped = -1, 0
        self._frequent = FrequentTokens(self.index)

    def __len__(self) -> int:
        return len(self.index)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        if not tokens:
            return
        self._follow_source(tokens)
        self.index.extend(tokens)
        self._grown += len(tokens)

    def propose(self, limits: Limits) -> NgramTree:
        """The most probable continuations of the text."""
        index, grown, least = self.index, self._grown, self._lengths.least
        text, end, (first, last) = index.tokens, index.end, self._near()
        self._known = known = index.repetitions(MAX_OCCURRENCES, self._known, grown)
        found: list[Occurrence] = [
            (text, end, position, length, NEAR if first <= position <= last else OWN)
            for position, length in known.items()
        ]
        found += [(text, end, place, 0, NEAR) for place in self._resumed() if place not in known]
        if self._history is not None:
            tail = text[max(0, end - MAX_MATCH_LENGTH) : end]
            self._known_history, others = self._history.find(tail, MAX_OCCURRENCES, self._known_history, grown)
            found += others
        self._grown = 0
        found = self._limited(found)
        frequent = self._frequent.shares() if least == 1 else ()
        grow = grow_chain if limits.leaves == 1 else grow_tree
        return grow(found, self._odds, limits, frequent, self._frequent.occurrences)

    def continuations(self, path: Sequence[int]) -> tuple[list[int], list[float]]:
        """Likely next tokens after the text and further tokens, and their probabilities, most likely first.

        Fewer occurrences are compared than by `propose`, in fewer tokens.

        Args:
            path: the further tokens.

        Example:
            >>> RowText([5, 6, 7, 8, 9, 5], MatchOdds()).continuations([6])[0]
            [7]
        """
        index = self.index
        tail = [*index.tokens[max(0, index.end - CONTINUED_TOKENS) : index.end], *path]
        places = index.occurrences(tail, CONTINUED_OCCURRENCES)
        found: list[Occurrence] = [(index.tokens, index.end, place, length, OWN) for place, length in places.items()]
        if self._history is not None:
            found += self._history.find(tail, CONTINUED_OCCURRENCES, {}, 0)[1]
        values, _, total = vote(self._limited(found), 0, self._odds)
        best = sorted(values.items(), key=lambda pair: -pair[1])
        return [token for token, _ in best], [value / total for _, value in best]

    def _limited(self, found: list[Occurrence]) -> list[Occurrence]:
        """The occurrences whose matches are considered."""
        least, most = self._lengths
        if least == 1 and most == MAX_MATCH_LENGTH:
            return found
        return [
            (text, end, position, min(length, most), kind)
            for text, end, position, length, kind in found
            if least == 1 or length >= least  # with 1, also places where copying resumes, whose match has length 0
        ]

    def _near(self) -> tuple[int, int]:
        """The first and the last position that counts as near; none of the text without a source."""
        source = self._source
        return (source, source + NEAR_TOKENS) if source >= 0 else (-1, -1)

    def _resumed(self) -> list[int]:
        """Positions at which copying may resume after a mismatch: the differing tokens were replaced, or inserted."""
        if not self._skipped:
            return []
        places = (self._source + self._skipped, self._source)
        return [place for place in places if place < self.index.end]

    def _follow_source(self, tokens: Sequence[int]) -> None:
        """Update `_source`: the occurrence that agrees with most of the new tokens, the nearest one if several do."""
        text, end, (first, last) = self.index.tokens, self.index.end, self._near()
        begins = tokens[0]
        places = [
            (is_near, length, place)
            for place, length in self._known.items()
            if text[place] == begins and ((is_near := first <= place <= last) or length > 1)
        ]
        places += [(True, 0, place) for place in self._resumed() if text[place] == begins]
        agreed = 1 if places else 0
        for token in tokens[1:] if places else ():
            agreeing = [place for place in places if place[2] + agreed < end and text[place[2] + agreed] == token]
            if not agreeing:
                break
            places, agreed = agreeing, agreed + 1
        if agreed:
            self._source, self._skipped = max(places)[2] + agreed, len(tokens) - agreed
        elif self._source >= 0:
            self._skipped += len(tokens)
        if self._skipped > MAX_SKIPPED:
            self._skipped = 0
