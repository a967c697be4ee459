"""Compares the end of a text with what precedes positions in this or another text: the lengths of the matches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

MAX_MATCH_LENGTH = 64
"""Tokens that are compared at most; drafts after longer matches are accepted as often."""
NO_OCCURRENCES: Mapping[int, int] = {}

Chain = tuple[int, list[int], bool]
"""Length of an n-gram, positions that may follow it, and whether these are all that do."""


def compare(
    tokens: Sequence[int],
    end: int,
    tail: list[int],
    chains: Iterable[Chain],
    limit: int,
    known: Mapping[int, int] = NO_OCCURRENCES,
    grown: int = 0,
) -> dict[int, int]:
    """The lengths of matches, those of the longest n-grams first.

    Args:
        tokens: the text in which the tail may occur. No match spans the end of the buffer, nor `end`.
        end: the index of the next token in `tokens`.
        tail: the last tokens of the text whose end is looked up, at most `MAX_MATCH_LENGTH`.
        chains: where to compare, the longest n-grams first.
        limit: maximum number of occurrences.
        known, grown: see `NgramIndex.occurrences`.

    Returns:
        by the position of the token that followed, the length of the match.

    Example:
        >>> text = [1, 2, 3, 9, 2, 3, 7, 2, 3]
        >>> compare(text, 9, text[-3:], [(2, [6, 3], True)], limit=8)
        {6: 2, 3: 2}
    """
    found: dict[int, int] = {}
    known = known if grown else NO_OCCURRENCES
    most, appended = len(tail), tail[-grown:]
    for order, positions, is_complete in chains:
        backwards = tail[: -most - 1 : -1] if positions else tail
        for following in positions:
            if following in found:
                continue
            # Matches end at `end`, which is overwritten next, and at the beginning of the array.
            longest = following if following <= end else following - end
            if most == 1:
                length = 1 if tokens[following - 1] == backwards[0] else 0
            elif following - grown in known and list(tokens[following - grown : following]) == appended:
                length = min(known[following - grown] + grown, longest, len(tail))
            else:
                place = following
                for token in backwards if longest >= most else backwards[:longest]:
                    if tokens[place - 1] != token:
                        break
                    place -= 1
                length = following - place
            if length >= order:
                found[following] = length
                if len(found) == limit:
                    return found
        if is_complete:  # what follows only shorter n-grams matches fewer tokens than these have
            most = min(most, order - 1)
    return found


def repeated_end(
    text: list[int],
    end: int,
    links: Sequence[tuple[int, memoryview]],
    limit: int,
    known: Mapping[int, int] = NO_OCCURRENCES,
    grown: int = 0,
) -> dict[int, int]:
    """What `compare` finds for the end of a text in the text itself, each place compared as soon as it is visited.

    Args:
        text: not a ring buffer.
        end: how many tokens it has.
        links: for each n-gram length, the longest first, where n-grams with the same hash as the one that ends with
            each token ended before.
        limit: maximum number of occurrences, and of places that are visited for each n-gram length.
        known, grown: see `NgramIndex.occurrences`.

    Example:
        >>> from array import array
        >>> bigram_links = memoryview(array("i", [0, 0, 0, 0, 0, 3, 0, 0, 6]))
        >>> repeated_end([1, 2, 3, 9, 2, 3, 7, 2, 3], 9, [(2, bigram_links)], limit=8)
        {6: 2, 3: 2}
    """
    appended, backwards = text[end - grown : end], text[max(0, end - MAX_MATCH_LENGTH) : end][::-1]
    known = known if grown else NO_OCCURRENCES
    found: dict[int, int] = {}
    for order, following_before in links:
        following, most = following_before[end - 1], len(backwards)
        for _ in range(limit):
            if not following:
                break
            if following not in found:
                if (before := following - grown) in known and text[before:following] == appended:
                    length = min(known[before] + grown, following, most)
                else:
                    place = following - 1
                    for token in backwards if following >= most else backwards[:following]:
                        if text[place] != token:
                            break
                        place -= 1
                    length = following - 1 - place
                if length >= order:
                    found[following] = length
                    if len(found) == limit:
                        return found
            following = following_before[following - 1]
        if not following:  # places that only shorter n-grams lead to match fewer tokens
            del backwards[order - 1 :]
    return found
