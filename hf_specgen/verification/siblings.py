"""The children of draft nodes as a tensor, for verification modes that accept or reject each child separately."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_specgen.tree import DraftTree, children


def child_table(tree: DraftTree, nodes: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """The children of each slot's node.

    Args:
        nodes: `[batch][slots]` as in `VerificationSession.choose`.

    Returns:
        `[batch, slots, siblings]` node indices in the order of the tree, padded with -1.

    Example:
        >>> tree = DraftTree.from_paths([[[5, 6], [7]]])  # parents (-1, 0, -1)
        >>> child_table(tree, [[-1, 0, 1, 2]], torch.device("cpu")).tolist()
        [[[0, 2], [1, -1], [-1, -1], [-1, -1]]]
    """
    table = []
    for parents, slots in zip(tree.parents, nodes, strict=True):
        known = children(parents)
        table.append([known[node + 1] if node + 1 < len(known) else () for node in slots])
    siblings = max((len(found) for row in table for found in row), default=0)
    filled = [[(*found, *(-1,) * (siblings - len(found))) for found in row] for row in table]
    return torch.tensor(filled, dtype=torch.long, device=device).view(len(nodes), len(nodes[0]), siblings)


def tokens_of(tree: DraftTree, table: torch.Tensor) -> torch.Tensor:
    """The token of each node in a `child_table`, in its shape; -1 where there is no node."""
    if not table.numel():
        return table
    tokens = tree.tokens.to(table.device).gather(1, table.clamp(min=0).flatten(1)).view(table.shape)
    return tokens.masked_fill(table < 0, -1)
