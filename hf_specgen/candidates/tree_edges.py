"""The edges of a draft tree, with the probability that each child is accepted, given its parent."""

from __future__ import annotations

from hf_specgen.candidates.tree_builder import MAX_JOINT
from hf_specgen.tree import DraftTree

UNKNOWN_ACCEPTANCE = 0.6
"""Assumed acceptance of a child, given its parent, where a strategy estimates none; calibration corrects it."""

Edges = dict[int, list[tuple[int, int, float]]]
"""By parent, -1 for the root: token, node and conditional probability of its children."""


def edges(draft: DraftTree, row: int) -> Edges:
    """The edges of one row's tree.

    Example:
        >>> edges(DraftTree.from_nodes([([5, 6], (-1, 0))], joint=((0.5, 0.25),)), 0)
        {-1: [(5, 0, 0.5)], 0: [(6, 1, 0.5)]}
    """
    tokens, parents = draft.tokens[row].tolist(), draft.parents[row]
    joint = None if draft.joint is None else draft.joint[row]
    found: Edges = {}
    for node, parent in enumerate(parents):
        if joint is None:
            probability = UNKNOWN_ACCEPTANCE
        else:
            above = joint[parent] if parent >= 0 else 1.0
            probability = min(MAX_JOINT, joint[node] / above) if above > 0 else 0.0
        found.setdefault(parent, []).append((tokens[node], node, probability))
    return found
