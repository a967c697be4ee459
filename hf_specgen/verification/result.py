"""The outcome of a step: the accepted nodes of a draft tree, and the tokens that each row emits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hf_specgen.top_k import top_k
from hf_specgen.tree import DraftTree, Parents


@dataclass
class VerificationResult:
    """The outcome of one step.

    Args:
        paths: the accepted nodes of each row, from the root down, whose keys and values stay in the cache; None for a
            row that took no part.
        tokens: the tokens that each row emits: those of its path, then one more, the new pending token. That is the
            bonus token, or an accepted draft token where the row ends or lockstep processors end the step.
        accepted: how many of each row's emitted tokens were draft tokens.
        scores: if requested, the processed scores of each emitted token: per row a list of `[vocab]`.
        logits: if requested, the same before the processors.
        top_tokens: the most likely next tokens after every input token, if `DraftSession.top_tokens` is not 0.
        num_in_pass: how many nodes of each row's draft the pass of the target had, the first ones; empty if unknown.
    """

    paths: list[list[int] | None]
    tokens: list[list[int]]
    accepted: list[int]
    scores: list[list[torch.Tensor]] = field(default_factory=list)
    logits: list[list[torch.Tensor]] = field(default_factory=list)
    top_tokens: TopTokens | None = None
    num_in_pass: list[int] = field(default_factory=list)


def reindexed_result(
    result: VerificationResult, tree: DraftTree, verified_tree: DraftTree | None = None
) -> VerificationResult:
    """The same outcome in the node indices of another draft of the same rows, `tree`.

    `tree` may lack verified nodes or have further ones. With `verified_tree`, the draft that was verified, the nodes of
    `tree` that were in the pass are counted: they count as the first ones of `tree`, as both trees have the most
    probable nodes first.

    Example:
        >>> both = VerificationResult([[0, 2]], [[5, 6, 9]], accepted=[2])
        >>> part = reindexed_result(both, DraftTree.from_paths([[[7], [5]]]))
        >>> part.paths, part.accepted
        ([[1]], [1])
    """
    # Only accepted tokens: the bonus token may be in a superset too.
    emitted = [tokens[:count] for tokens, count in zip(result.tokens, result.accepted, strict=True)]
    nodes = list(map(path_of_tokens, tree.token_lists(), tree.parents, emitted))
    # An accepted token that ends the row is the pending token, which no path contains.
    paths = [None if path is None else new[: len(path)] for path, new in zip(result.paths, nodes, strict=True)]
    num_in_pass = []
    if verified_tree is not None:
        counts = enumerate(result.num_in_pass)
        num_in_pass = [num_common_nodes(tree, verified_tree, row, count) for row, count in counts]
    return replace(result, paths=paths, accepted=list(map(len, nodes)), num_in_pass=num_in_pass)


def num_common_nodes(tree: DraftTree, other: DraftTree, row: int, count: int) -> int:
    """How many nodes of a row of `tree` have a path that is among the first `count` nodes of `other` too."""
    child = {
        (parent, token): node
        for node, (parent, token) in enumerate(zip(other.parents[row][:count], other.token_lists()[row], strict=False))
    }
    node_of = {-1: -1}  # of common nodes, by the node of `tree` that of `other`
    for node, (parent, token) in enumerate(zip(tree.parents[row], tree.token_lists()[row], strict=False)):
        common = child.get((node_of.get(parent, -2), token))
        if common is not None:
            node_of[node] = common
    return len(node_of) - 1


def path_of_tokens(tokens: Sequence[int], parents: Sequence[int], emitted: Sequence[int]) -> list[int]:
    """The nodes that have the emitted tokens, from the root down, as far as the tree has them."""
    path: list[int] = []
    for node, parent in enumerate(parents):
        if len(path) < len(emitted) and parent == (path[-1] if path else -1) and tokens[node] == emitted[len(path)]:
            path.append(node)
    return path


def accepted_path(tokens: Sequence[int], parents: Parents, chosen: Sequence[int]) -> tuple[list[int], list[int]]:
    """Follow the target's choices down the tree for as long as they are draft tokens."""
    node = -1
    path: list[int] = []
    emitted = [chosen[0]]
    for child, parent in enumerate(parents):
        if parent == node and tokens[child] == emitted[-1]:
            node = child
            path.append(child)
            emitted.append(chosen[child + 1])
    return path, emitted


def tested_nodes(tokens: Sequence[int], parents: Sequence[int], emitted: Sequence[int]) -> list[tuple[int, bool]]:
    """The nodes whose acceptance was tested, the children of the last token and of accepted nodes, and the outcomes."""
    path = path_of_tokens(tokens, parents, emitted)
    accepted = [-1, *path][: len(emitted)]  # nothing follows the last token
    return [(node, node in path) for node, parent in enumerate(parents) if parent in accepted]


@dataclass(frozen=True)
class TopTokens:
    """The target's most likely next tokens after each input token of a step, those of rejected nodes included.

    Their probabilities, before processors, are normalised over these tokens alone: a softmax over the vocabulary would
    take as long as finding them.
    """

    tokens: NDArray[np.integer[Any]]  # [n] of each row that took part the pending token, then its nodes
    candidate_tokens: NDArray[np.integer[Any]]  # [n, count] the most likely tokens after each, most likely first
    probabilities: NDArray[np.floating[Any]]  # [n, count] of these

    @classmethod
    def of_step(
        cls, logits: torch.Tensor, tree: DraftTree, pending: Sequence[int], active: Sequence[bool], count: int
    ) -> TopTokens:
        """From the logits of a step, `[batch, 1 + nodes, vocab]`, and the pending token of each row."""
        tokens: list[int] = []
        indices: list[int] = []  # of the rows of the flattened logits
        for row, (token, draft, parents) in enumerate(zip(pending, tree.token_lists(), tree.parents, strict=True)):
            if active[row]:
                tokens += [token, *draft[: len(parents)]]
                indices += range(row * logits.shape[1], row * logits.shape[1] + 1 + len(parents))
        rows = logits.flatten(0, 1)
        rows = rows if len(indices) == len(rows) else rows[torch.tensor(indices, device=rows.device)]
        values, candidates = top_k(rows, min(count, rows.shape[-1]))
        # In one transfer; token ids below 2**24 are exact as floats.
        probabilities_and_tokens = torch.cat([values.float().softmax(dim=-1), candidates.float()], dim=1).cpu().numpy()
        probabilities, candidate_tokens = np.split(probabilities_and_tokens, 2, axis=1)
        return cls(np.array(tokens), candidate_tokens.astype(np.int64), probabilities)


QueryValues = torch.Tensor | list[dict[int, torch.Tensor]]
"""`[vocab]` values by row and query: `[batch, queries, vocab]`, or of some queries of each row."""


class ChosenPaths(NamedTuple):
    """What a verification session has chosen, before a row's tokens are cut where it ends."""

    paths: dict[int, tuple[list[int], list[int]]]  # of active rows the accepted nodes; the tokens along and after them
    scores: QueryValues  # that the tokens were chosen from
    logits: QueryValues  # before the processors


def values_along_paths(values: QueryValues, paths: Sequence[Sequence[int] | None]) -> list[list[torch.Tensor]]:
    """The `[vocab]` values of each row's emitted tokens; copies, so that the step's own tensor can be freed."""
    return [
        [] if path is None else [values[row][query].clone() for query in (0, *(node + 1 for node in path))]
        for row, path in enumerate(paths)
    ]
