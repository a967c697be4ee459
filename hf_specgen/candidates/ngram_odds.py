"""Odds that the text continues as it did after an earlier occurrence, learnt by kind and length of the match.

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

from hf_specgen.candidates.ngram_match import MAX_MATCH_LENGTH

OWN, NEAR, HISTORY_PROMPT, HISTORY_OUTPUT = range(4)
"""Kinds of occurrences: in the row's own text; in it, close to where tokens were copied from last; in the prompt, or in
the generated part, of earlier texts."""
BUCKETS = 11
BUCKET_OF_LENGTH = (0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7, *[8] * 8, *[9] * 8, *[10] * (MAX_MATCH_LENGTH - 31))
"""Bucket of each match length up to `MAX_MATCH_LENGTH`. Length 0 is a position after a mismatch in a copied passage."""
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
"""Share of the probability of a token that no occurrence proposes that goes to the text's most frequent tokens."""
FREQUENT = 4 * BUCKETS
"""The class of tokens proposed for being frequent."""
CLASSES = FREQUENT + 1
MAX_CHAIN_CHUNK = 64
"""Tokens added to a chain at once: the tables by match length go this far beyond `MAX_MATCH_LENGTH`."""
LEARNING_RATE = 0.2
"""Step of the odds' logarithm; 0.1 to 0.2 fit best, and none at all costs 4% of the tokens per step."""
MAX_FACTOR = 20.0
"""Odds stay within this factor of the prior ones."""


CLASSES_BY_LENGTH = tuple(
    tuple(kind * BUCKETS + bucket for bucket in (*BUCKET_OF_LENGTH, *BUCKET_OF_LENGTH[-1:] * MAX_CHAIN_CHUNK))
    for kind in range(FREQUENT // BUCKETS)
)
"""`[kinds][match length]` the class of occurrences; a class is a bucket of a kind, or `FREQUENT`."""


class MatchOdds:
    """The odds of every class of occurrences.

    Attributes:
        values: `[CLASSES]` present odds.
        by_length: `[kinds][match length]` the same, up to a length of `MAX_MATCH_LENGTH + MAX_CHAIN_CHUNK`.
        alone: `[kinds][match length]` probability of a token that is proposed by one occurrence, the only one.

    Example:
        >>> odds = MatchOdds()
        >>> match_class = OWN * BUCKETS + BUCKET_OF_LENGTH[4]
        >>> odds.values[match_class]
        2.3
        >>> odds.observe(match_class, expected=0.7, accepted=False)
        >>> round(odds.values[match_class], 2)
        2.0
    """

    def __init__(self, factors: Sequence[float] = (1.0,) * CLASSES):
        self._factors = list(factors)
        self._prior = [value for kind in PRIOR_ODDS for value in kind] + [FREQUENT_SHARE]
        self.values = [prior * factor for prior, factor in zip(self._prior, self._factors, strict=True)]
        self.by_length = [[self.values[place] for place in classes] for classes in CLASSES_BY_LENGTH]
        self.alone = [[_alone(value) for value in values] for values in self.by_length]

    def observe(self, match_class: int, expected: float, accepted: bool) -> None:
        """Learn from a verified token.

        Args:
            match_class: the class of the occurrence that voted for it with the largest odds.
            expected: its probability, given that its parent was accepted.
            accepted: whether it was.
        """
        self.observe_all([(match_class, expected, accepted)])

    def observe_all(self, outcomes: Sequence[tuple[int, float, bool]]) -> None:
        """Learn from several tokens, in their order; the tables are written once for each class."""
        factors = self._factors
        for match_class, expected, accepted in outcomes:
            factor = factors[match_class] * exp(LEARNING_RATE * (accepted - expected))
            factors[match_class] = min(MAX_FACTOR, max(1 / MAX_FACTOR, factor))
        for match_class in {match_class for match_class, _, _ in outcomes}:
            self._update(match_class)

    def _update(self, match_class: int) -> None:
        """Write the odds of a class to the tables."""
        self.values[match_class] = value = self._prior[match_class] * self._factors[match_class]
        if match_class < FREQUENT:
            kind, bucket = divmod(match_class, BUCKETS)
            first, last = _LENGTHS[bucket]
            self.by_length[kind][first:last] = [value] * (last - first)
            self.alone[kind][first:last] = [_alone(value)] * (last - first)

    def copy(self) -> MatchOdds:
        """Odds with the same values, which learn independently."""
        return MatchOdds(self._factors)


def _alone(odds: float) -> float:
    return odds / (odds + NEW_TOKEN_ODDS + NEW_TOKEN_ODDS_PER_TOKEN)


def _lengths(bucket: int) -> tuple[int, int]:
    """The first match length of a bucket, and the first one beyond it."""
    first = BUCKET_OF_LENGTH.index(bucket)
    last = MAX_MATCH_LENGTH + 1 + MAX_CHAIN_CHUNK if bucket == BUCKETS - 1 else BUCKET_OF_LENGTH.index(bucket + 1)
    return first, last


_LENGTHS = [_lengths(bucket) for bucket in range(BUCKETS)]
