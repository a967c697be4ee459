"""Slow versions of the fast paths, written to be verified by reading: loops over everything, no index, no tensors.

The constants are those of the package, so that other values break no test; what is done with them is written anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from hf_specgen.candidates import ngram as tuning
from hf_specgen.target.model_parts import output_logits

SEPARATOR = -1


# Trees


def any_parents(nodes: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, ...]]:
    """A hypothesis strategy: the parents of any tree with that many nodes."""
    return nodes.flatmap(lambda count: st.tuples(*(st.integers(-1, node - 1) for node in range(count))))


def walk_up(parents: Sequence[int], node: int) -> list[int]:
    """The node and all nodes above it; nothing for -1."""
    return [] if node == -1 else [node, *walk_up(parents, parents[node])]


def depth(parents: Sequence[int], node: int) -> int:
    return len(walk_up(parents, node))


def ancestor_matrix(parents: Sequence[int]) -> list[list[int]]:
    """Entry [i][j] is 1 where j is i or an ancestor of i; index 0 is the row's last token, index i + 1 is node i."""
    matrix = []
    for node in range(-1, len(parents)):
        family = [-1, *walk_up(parents, node)]
        matrix.append([int(other in family) for other in range(-1, len(parents))])
    return matrix


def merge_paths(paths: Sequence[Sequence[int]]) -> tuple[list[int], tuple[int, ...]]:
    """One node for each distinct prefix of a path, in the order of first appearance."""
    prefixes: list[list[int]] = []
    for path in paths:
        for length in range(1, len(path) + 1):
            if list(path[:length]) not in prefixes:
                prefixes.append(list(path[:length]))
    parents = [-1 if len(b) == 1 else prefixes.index(b[:-1]) for b in prefixes]
    return [b[-1] for b in prefixes], tuple(parents)


def longest_accepted_path(tokens: Sequence[int], parents: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """Of all paths from the root to a node on which the target chose every token, the longest."""

    def is_accepted(node: int) -> bool:
        return node == -1 or (is_accepted(parents[node]) and tokens[node] == chosen[parents[node] + 1])

    paths = [walk_up(parents, node)[::-1] for node in range(-1, len(parents)) if is_accepted(node)]
    return max(paths, key=len)


# Masks


def row_mask(
    length: int,
    parents: Sequence[int],
    width: int,
    visible: Sequence[bool] | None = None,
    window: int | None = None,
    chunk: int | None = None,
) -> list[list[int]]:
    """`[1 + nodes][width]` what the pending token and each node of one row attend to.

    Args:
        length: cached slots; slot `length` holds the pending token, the nodes follow.
        parents: of the nodes.
        width: number of slots.
        visible: False where a cached slot is padding; slots beyond its end are not.
        window: if given, the number of visible positions, the query's own included.
        chunk: if given, only positions in the same block of this size are visible; blocks start at the first token
            after padding.
    """

    def position(slot: int) -> int:
        return slot if slot <= length else length + depth(parents, slot - length - 1)

    first = 0 if visible is None else list(visible).index(True)
    family = ancestor_matrix(parents)
    mask = []
    for query in range(1 + len(parents)):
        line = []
        for slot in range(width):
            if slot < length:
                seen = visible is None or slot >= len(visible) or bool(visible[slot])
            elif slot <= length + len(parents):
                seen = bool(family[query][slot - length])
            else:
                seen = False
            mine = position(length + query)
            if seen and window is not None:
                seen = mine - position(slot) < window
            if seen and chunk is not None:
                seen = (mine - first) // chunk == (position(slot) - first) // chunk
            line.append(int(seen))
        mask.append(line)
    return mask


# N-grams


def ngram_matches(
    tokens: Sequence[int], text: Sequence[int], min_ngram: int, max_ngram: int, limit: int
) -> list[tuple[int, int]]:
    """Compare the end of `text` with what precedes every position: the longest match first, then the most recent."""
    found = []
    for position in range(len(tokens)):
        n = 0
        while n < min(max_ngram, position, len(text)) and tokens[position - n - 1] == text[len(text) - n - 1]:
            n += 1
        if n >= min_ngram:
            found.append((n, position))
    return sorted(found, key=lambda match: (-match[0], -match[1]))[:limit]


def follow(tokens: Sequence[int], position: int, k: int) -> list[int]:
    """Copy k tokens one by one from `position` on to the end of the text, so that the copy can be copied too."""
    text = list(tokens)
    while len(text) < len(tokens) + k and text[position] != SEPARATOR:
        text.append(text[position])
        position += 1
    return text[len(tokens) :]


class Match(NamedTuple):
    """An earlier occurrence of the last tokens, and what followed it."""

    length: int
    own: bool
    position: int
    path: list[int]


def ngram_paths(
    text: Sequence[int],
    past: Sequence[int],
    k: int,
    min_ngram: int = 1,
    max_ngram: int = 8,
    branches: int = 1,
) -> list[list[int]]:
    """The paths that `NgramCandidates` proposes after `text`, with `past` as the tokens of the history."""
    limit = max(tuning.FEWEST_MATCHES, tuning.MATCHES_PER_BRANCH * branches)
    matches = [
        Match(n, True, position, follow(text, position, k))
        for n, position in ngram_matches(text, text, min_ngram, max_ngram, limit)
    ] + [
        Match(n - tuning.HISTORY_HANDICAP, False, position, follow(past, position, k))
        for n, position in ngram_matches(past, text, min_ngram, max_ngram, limit)
        if past[position] != SEPARATOR
    ]

    def votes(match: Match) -> int:
        return sum(other.path[0] == match.path[0] for other in matches)

    best = sorted(matches, key=lambda match: (-match.length, not match.own, -votes(match), -match.position))
    if not best:
        return []
    if branches == 1:
        return [best[0].path[: trusted_length(best)]]
    paths: list[list[int]] = []
    for match in best:
        for index, known in enumerate(paths):
            shorter, longer = sorted([known, match.path], key=len)
            if longer[: len(shorter)] == shorter:
                paths[index] = longer
                break
        else:
            paths.append(match.path)
        if len(paths) == branches:
            break
    return paths


def trusted_length(matches: Sequence[Match]) -> int:
    """How far the first match is followed: a constant if it is the only one of its kind, otherwise as far as another
    one agrees; and further for each matched token beyond the first."""
    first, *others = matches
    agreements = []
    for other in others:
        if other.length == first.length and other.own == first.own:
            agreed = 0
            for mine, theirs in zip(first.path, other.path, strict=False):
                if mine != theirs:
                    break
                agreed += 1
            agreements.append(agreed)
    evidence = max(agreements) if agreements else tuning.LONE_MATCH
    return max(0, evidence + tuning.TOKENS_PER_MATCHED_TOKEN * (first.length - 1))


def naive_medusa_loss(
    model: Any, heads: Any, hidden: torch.Tensor, tokens: torch.Tensor, rows: list[int], decay: float
) -> torch.Tensor:
    """Head by head and position by position: head h at position i learns the target's distribution at i + h + 1."""
    p = output_logits(model, hidden).float().softmax(dim=-1)
    total = torch.zeros(())
    for head in range(heads.config.num_heads):
        for i in range(len(hidden)):
            later = i + head + 1
            if later < len(hidden) and rows[later] == rows[i]:
                state = heads.blocks[head](hidden[i] + heads.token_maps[head](tokens[i]))
                q = output_logits(model, state).float().softmax(dim=-1)
                total = total + decay**head * (p[later] * (p[later].log() - q.log())).sum()
    return total
