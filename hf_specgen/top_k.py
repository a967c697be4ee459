"""The largest values of long rows, such as the most likely tokens of a vocabulary, faster than `torch.topk` on a CPU.

Source: Chern et al., "TPU-KNN: K Nearest Neighbor Search at Peak FLOP/s" (2022), for candidates by blocks; here the
blocks are chosen by their maxima, so that the result is exact.
"""

from __future__ import annotations

import torch

BLOCK = 256
"""Values of a block. On a CPU `torch.topk` sorts a part of each row; the maxima of blocks are read once, in order."""
MIN_ROW = 2**15  # values from which on blocks are faster


def top_k(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest values of the last dimension, largest first, and their indices, as `torch.topk`.

    The k largest values lie in the k blocks with the largest maxima.

    Example:
        >>> top_k(torch.tensor([[0.0, 3.0, 2.0]]), 2)[1].tolist()
        [[1, 2]]
    """
    size = values.shape[-1]
    if values.device.type != "cpu" or size < MIN_ROW or k > size // BLOCK // 2:
        largest = values.topk(k, dim=-1)
        return largest.values, largest.indices
    in_blocks = size // BLOCK * BLOCK
    blocks = values[..., :in_blocks].unflatten(-1, (-1, BLOCK))
    best = blocks.amax(dim=-1).topk(k, dim=-1).indices[..., None]
    candidates = blocks.gather(-2, best.expand(*best.shape[:-1], BLOCK)).flatten(-2)
    indices = (best * BLOCK + torch.arange(BLOCK)).flatten(-2)
    # What is left after the last whole block.
    candidates = torch.cat([candidates, values[..., in_blocks:]], dim=-1)
    rest = torch.arange(in_blocks, size).expand(*indices.shape[:-1], -1)
    indices = torch.cat([indices, rest], dim=-1)
    largest = candidates.topk(k, dim=-1)
    return largest.values, indices.gather(-1, largest.indices)
