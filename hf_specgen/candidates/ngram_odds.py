"""How likely the text goes on as it did after an earlier occurrence: odds by kind and length of the match, learnt.

Every occurrence of the last tokens votes for the token that followed it, with the odds of its class. The probability of
a token is the sum of the odds of its occurrences, divided by the odds of all occurrences and of a token that none of
them proposes; those grow with the number of different tokens proposed. It is the estimate that prediction by partial
matching makes, with votes in place of counts.

Source: Cleary and Witten, "Data Compression Using Adaptive Coding and Partial String Matching" (1984); Howard, "The
Design and Analysis of Efficient Lossless Data Compression Systems" (1993), method D, for the odds of a new token.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

from hf_specgen.candidates.ngram_index import MAX_MATCH_LENGTH

OWN, NEAR, HISTORY_PROMPT, HISTORY_OUTPUT = range(4)
"""Kinds of occurrences: in the row's own text; there, close to where it was copied from last; in earlier texts."""
BUCKETS = 11
BUCKET_OF_LENGTH = (0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7, *[8] * 8, *[9] * 8, *[10] * (MAX_MATCH_LENGTH - 31))
"""By match length; length 0 is a place that follows a mismatch where the text was being copied."""
PRIOR_ODDS = (
    (0.0, 0.35, 1.3, 1.5, 2.3, 2.8, 3.5, 4.0, 5.0, 6.0, 8.0),
    (0.2, 3.5, 14.0, 14.0, 18.0, 21.0, 24.0, 28.0, 35.0, 50.0, 140.0),
    (0.0, 0.1, 0.3, 1.0, 2.0, 2.5, 3.5, 4.0, 5.0, 6.0, 6.0),
    (0.0, 0.15, 0.45, 1.5, 3.0, 3.7, 5.0, 6.0, 7.5, 9.0, 9.0),
)
"""Odds by kind and bucket before anything was learnt: maximum likelihood on recorded outputs of a 7B model."""
NEW_TOKEN_ODDS, NEW_TOKEN_ODDS_PER_TOKEN = 1.0, 0.65
"""Odds of a token that no occurrence proposes: these, and more for each different token that is proposed."""
FREQUENT_SHARE = 0.25
"""Which part of the probability of a token that no occurrence proposes goes to the text's most frequent tokens."""
FREQUENT = 4 * BUCKETS
"""The class of tokens proposed for being frequent."""
CLASSES = FREQUENT + 1
LONGEST = len(BUCKET_OF_LENGTH) - 1
"""Match lengths with a class of their own; longer matches count as that long."""
CHAIN = 64
"""Tokens that are added to a chain at once: the tables by match length continue so far beyond `LONGEST`."""
LEARNING_RATE = 0.2
"""Step of the odds' logarithm; 0.1 to 0.2 fit best, and none at all costs 4% of the tokens per step."""
MAX_FACTOR = 20.0
"""Odds stay within this factor of the prior ones."""


CLASSES_BY_LENGTH = tuple(
    tuple(kind * BUCKETS + bucket for bucket in (*BUCKET_OF_LENGTH, *BUCKET_OF_LENGTH[-1:] * CHAIN))
    for kind in range(FREQUENT // BUCKETS)
)
"""By kind and match length."""


class MatchOdds:
    """The odds of every class of occurrences.

    Attributes:
        values: `[CLASSES]` present odds.
        by_length: `[kinds, LONGEST + 1 + CHAIN]` the same by kind and match length.
        alone: `[kinds, LONGEST + 1 + CHAIN]` probability of a token that one occurrence proposes and no other differs.

    Example:
        >>> odds = MatchOdds()
        >>> kind = OWN * BUCKETS + BUCKET_OF_LENGTH[4]
        >>> odds.values[kind]
        2.3
        >>> odds.observe(kind, expected=0.7, accepted=False)
        >>> round(odds.values[kind], 2)
        2.0
    """

    def __init__(self, factors: Sequence[float] = (1.0,) * CLASSES):
        self._factors = list(factors)
        self._prior = [value for kind in PRIOR_ODDS for value in kind] + [FREQUENT_SHARE]
        self.values = [prior * factor for prior, factor in zip(self._prior, self._factors, strict=True)]
        self.by_length = [[self.values[place] for place in classes] for classes in CLASSES_BY_LENGTH]
        self.alone = [[_alone(value) for value in values] for values in self.by_length]

    def observe(self, kind: int, expected: float, accepted: bool) -> None:
        """Learn from a verified token.

        Args:
            kind: the class of the occurrence that voted for it with the largest odds.
            expected: its probability, given that its parent was accepted.
            accepted: whether it was.
        """
        factor = self._factors[kind] * exp(LEARNING_RATE * (accepted - expected))
        self._factors[kind] = factor = min(MAX_FACTOR, max(1 / MAX_FACTOR, factor))
        self.values[kind] = value = self._prior[kind] * factor
        if kind < FREQUENT:
            first, last = _LENGTHS[kind % BUCKETS]
            self.by_length[kind // BUCKETS][first:last] = [value] * (last - first)
            self.alone[kind // BUCKETS][first:last] = [_alone(value)] * (last - first)

    def copy(self) -> MatchOdds:
        """Odds that learn on their own from here on."""
        return MatchOdds(self._factors)


def _alone(odds: float) -> float:
    return odds / (odds + NEW_TOKEN_ODDS + NEW_TOKEN_ODDS_PER_TOKEN)


def _lengths(bucket: int) -> tuple[int, int]:
    """The first match length of a bucket, and the first one beyond it."""
    first = BUCKET_OF_LENGTH.index(bucket)
    last = LONGEST + 1 + CHAIN if bucket == BUCKETS - 1 else BUCKET_OF_LENGTH.index(bucket + 1)
    return first, last


_LENGTHS = [_lengths(bucket) for bucket in range(BUCKETS)]
