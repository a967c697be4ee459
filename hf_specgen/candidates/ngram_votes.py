"""Occurrences vote on the next token: each proposes the token that followed it, with the odds of its class.

Where all of them agree, the next tokens are read off at once, by slices of the text and of the tables in `MatchOdds`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hf_specgen.candidates.ngram_index import SEPARATOR
from hf_specgen.candidates.ngram_match import MAX_MATCH_LENGTH
from hf_specgen.candidates.ngram_odds import (
    CLASSES_BY_LENGTH,
    FREQUENT,
    MAX_CHAIN_CHUNK,
    NEW_TOKEN_ODDS,
    NEW_TOKEN_ODDS_PER_TOKEN,
    MatchOdds,
)

MAX_VOTERS = 8
"""Occurrences of a token that also vote on what follows it: with all of them, as many tokens are accepted per step."""

Occurrence = tuple[Sequence[int], int, int, int, int]
"""A place after tokens that equal the last ones of a row: the text, where it ends, the position of the token that
followed, the length of the match, and its kind (see `MatchOdds`). A plain tuple, since every draft makes dozens."""


def vote(
    voters: Sequence[Occurrence], depth: int, odds: MatchOdds
) -> tuple[dict[int, float], dict[int, list[Occurrence]], float]:
    """The tokens that occurrences propose at a depth.

    An occurrence that continues along the path so far has a match that is longer by the depth.

    Args:
        voters: the occurrences.
        depth: how many tokens of each were drafted already.
        odds: of the occurrences.

    Returns:
        for each token its odds, and the occurrences that propose it; and the odds of all tokens, proposed or not. A
        token's probability is its share of these.

    Example:
        >>> text, odds = [1, 2, 3, 1, 2, 4, 1, 2], MatchOdds()
        >>> values, proposers, total = vote([(text, 8, 5, 2, 0), (text, 8, 2, 2, 0)], 0, odds)
        >>> {token: round(value / total, 2) for token, value in values.items()}
        {4: 0.27, 3: 0.27}
    """
    values: dict[int, float] = {}
    proposers: dict[int, list[Occurrence]] = {}
    by_length, longer = odds.by_length, min(depth, MAX_CHAIN_CHUNK)
    for voter in voters:
        text, end, position, length, kind = voter
        position += depth
        if position < end:
            token, value = text[position], by_length[kind][length + longer]
            if token in values:
                values[token] += value
                proposers[token].append(voter)
            else:
                values[token] = value
                proposers[token] = [voter]
    values.pop(SEPARATOR, None)
    return values, proposers, sum(values.values()) + NEW_TOKEN_ODDS + NEW_TOKEN_ODDS_PER_TOKEN * len(values)


def frequent_tokens(
    frequent: Sequence[tuple[int, float]], values: dict[int, float], total: float, odds: MatchOdds
) -> Iterator[tuple[int, float]]:
    """The most frequent tokens of a text that no occurrence proposes, and their probabilities.

    They share a part of the probability of a token that no occurrence proposes.

    Args:
        frequent: tokens and their shares of the text.
        values, total: see `vote`.
        odds: of the occurrences.
    """
    share = odds.values[FREQUENT] * (1.0 - sum([value / total for value in values.values()]))
    return ((token, share * part) for token, part in frequent if token not in values)


def strongest(voters: Sequence[Occurrence], depth: int, odds: MatchOdds) -> int:
    """The class of the occurrence with the largest odds at a depth."""
    longer = min(depth, MAX_CHAIN_CHUNK)
    classes = [CLASSES_BY_LENGTH[kind][length + longer] for _, _, _, length, kind in voters]
    return max(classes, key=odds.values.__getitem__)


def unanimous(voters: Sequence[Occurrence], depth: int, count: int, odds: MatchOdds) -> tuple[list[int], list[float]]:
    """The next tokens from a depth on, as long as all occurrences propose the same one.

    Args:
        voters: one or more occurrences.
        depth: how many tokens of each were drafted already.
        count: of tokens at most; never more than `MAX_CHAIN_CHUNK`.
        odds: of the occurrences.

    Returns:
        the tokens, and the probability of each after the one before.

    Example:
        >>> text = [1, 2, 3, 4, 7, 2, 3, 4, 8]
        >>> unanimous([(text, 9, 1, 1, 0), (text, 9, 5, 1, 0)], 0, 10, MatchOdds())[0]
        [2, 3, 4]
    """
    count = min(count, MAX_CHAIN_CHUNK)
    pieces = [list(text[position + depth : min(end, position + depth + count)]) for text, end, position, _, _ in voters]
    tokens = pieces[0] if len(pieces) == 1 else _common_prefix(pieces)
    if SEPARATOR in tokens:
        tokens = tokens[: tokens.index(SEPARATOR)]
    rows = [(kind, min(length + depth, MAX_MATCH_LENGTH)) for _, _, _, length, kind in voters]
    if len(rows) == 1:
        [(kind, length)] = rows
        return tokens, odds.alone[kind][length : length + len(tokens)]
    values = [odds.by_length[kind][length : length + len(tokens)] for kind, length in rows]
    sums = map(sum, zip(*values, strict=True))
    return tokens, [value / (value + NEW_TOKEN_ODDS + NEW_TOKEN_ODDS_PER_TOKEN) for value in sums]


def _common_prefix(pieces: list[list[int]]) -> list[int]:
    """The longest common prefix of all pieces: that of the first and the last in their order."""
    low, high = min(pieces), max(pieces)
    for place, (one, other) in enumerate(zip(low, high, strict=False)):
        if one != other:
            return low[:place]
    return low
