"""One draft tree with every node of several: equal paths share their nodes."""

from __future__ import annotations

from collections.abc import Sequence

from hf_specgen.tree import DraftTree, Parents


def merge_trees(trees: Sequence[DraftTree]) -> DraftTree:
    """Merge drafts for the same rows into one tree per row; equal paths share their nodes.

    Nodes of deterministic drafts (without `q`) come first among siblings, as `verification="rejection"` assumes: a
    sampled node then counts as drawn without replacement of the tokens before it.

    Example:
        >>> merged = merge_trees([DraftTree.chains([[5, 6]]), DraftTree.chains([[5, 7, 8]])])
        >>> merged.tokens.tolist(), merged.parents
        ([[5, 6, 7, 8]], ((-1, 0, 0, 2),))
    """
    drafts = sorted((tree for tree in trees if tree.nodes), key=lambda tree: tree.q is not None)
    if len(drafts) < 2:
        return drafts[0] if drafts else trees[0]
    rows = [_merge_row(drafts, [tree.tokens[row].tolist() for tree in drafts], row) for row in range(drafts[0].batch)]
    merged = DraftTree.from_nodes([(tokens, parents) for tokens, parents, _ in rows])
    sampled = [tree.q for tree in drafts if tree.q is not None]
    if not sampled:
        return merged
    q = sampled[0].new_zeros(merged.batch, merged.nodes, max(part.shape[-1] for part in sampled))
    for row, (_, _, sources) in enumerate(rows):
        for node, (draft, source) in enumerate(sources):
            part = drafts[draft].q
            if part is not None:
                q[row, node, : part.shape[-1]] = part[row, source]
    return DraftTree(merged.tokens, merged.parents, q)


def _merge_row(
    drafts: Sequence[DraftTree], tokens: Sequence[list[int]], row: int
) -> tuple[list[int], Parents, list[tuple[int, int]]]:
    """Tokens and parents of the merged row, and the (draft, node) that each of its nodes comes from."""
    merged: list[int] = []
    parents: list[int] = []
    sources: list[tuple[int, int]] = []
    node_of: dict[tuple[int, int], int] = {}
    for draft, tree in enumerate(drafts):
        place = {-1: -1}
        for node, parent in enumerate(tree.parents[row]):
            key = place[parent], tokens[draft][node]
            if key not in node_of:
                node_of[key] = len(merged)
                merged.append(key[1])
                parents.append(key[0])
                sources.append((draft, node))
            place[node] = node_of[key]
    return merged, tuple(parents), sources
