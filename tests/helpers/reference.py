"""Slow versions of the fast paths, written to be verified by reading: loops over everything, no index, no tensors.

The constants are those of the package, so that changing their values breaks no test; the algorithms are written anew.
"""

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from hf_specgen.candidates import ngram as tuning
from hf_specgen.targets.model_parts import output_logits
from hf_specgen.tree import DraftTree

# Trees


def any_parents(nodes: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, ...]]:
    """A hypothesis strategy: the parents of any tree with that many nodes."""
    return nodes.flatmap(lambda count: st.tuples(*(st.integers(-1, node - 1) for node in range(count))))


def walk_up(parents: Sequence[int], node: int) -> list[int]:
    """The node and all nodes above it; nothing for -1."""
    return [] if node == -1 else [node, *walk_up(parents, parents[node])]


def path(tree: DraftTree, row: int, node: int) -> tuple[int, ...]:
    """The tokens from a row's first draft token to a node."""
    return tuple(tree.token_lists()[row][above] for above in walk_up(tree.parents[row], node)[::-1])


def node_paths(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """The tokens on the path to each node of a tree, whose parents come before their children."""
    paths: list[tuple[int, ...]] = []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        assert parent < node
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


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
    length: int, parents: Sequence[int], width: int, visible: Any = None, window: int | None = None, chunk: Any = None
) -> list[list[int]]:
    """`[1 + nodes][width]` what the pending token and each node of one row attend to.

    Slot `length` holds the pending token, the nodes follow; `visible` is False where a cached slot is padding. A window
    counts the query's own position; chunks start at the first token after padding.
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


def ngram_occurrences(tokens: Sequence[int], tail: Sequence[int]) -> dict[int, int]:
    """By the position that followed, the length of the match of `tail` before it, compared token by token."""
    found = {}
    for position in range(1, len(tokens)):
        length = 0
        while length < min(len(tail), tuning.MAX_MATCH_LENGTH, position):
            if tokens[position - length - 1] != tail[len(tail) - length - 1]:
                break
            length += 1
        if length:
            found[position] = length
    return found


def ngram_nodes(
    tokens: Sequence[int], occurrences: dict[int, int], odds: Sequence[float], depth: int, prefix: tuple[int, ...] = ()
) -> dict[tuple[int, ...], float]:
    """The path probability of every path that occurrences in the row's own text (match lengths by position) propose."""
    done = len(prefix)
    votes: dict[int, float] = {}
    voters: dict[int, dict[int, int]] = {}
    for position, length in occurrences.items():
        if done < depth and position + done < len(tokens):
            token = tokens[position + done]
            longer = min(length + done, tuning.MAX_MATCH_LENGTH)
            votes[token] = votes.get(token, 0.0) + odds[longer.bit_length()]
            voters.setdefault(token, {})[position] = length
    total = sum(votes.values()) + tuning.NEW_TOKEN_ODDS + tuning.NEW_TOKEN_ODDS_PER_TOKEN * len(votes)
    nodes = {}
    for token, vote in votes.items():
        nodes[(*prefix, token)] = vote / total
        for path, probability in ngram_nodes(tokens, voters[token], odds, depth, (*prefix, token)).items():
            nodes[path] = vote / total * probability
    return nodes


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
                read = heads.token_maps[head](tokens[i, : head + 1].flatten()) if heads.config.reads_path else 0
                state = heads.blocks[head](hidden[i] + read)
                q = output_logits(model, state).float().softmax(dim=-1)
                total = total + decay**head * (p[later] * (p[later].log() - q.log())).sum()
    return total
