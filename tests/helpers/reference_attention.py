"""Grouped-query attention, one query and one head at a time, in float64."""

import torch


def grouped_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    """`[batch, queries, heads, value_dim]` for query `[batch, heads, queries, head_dim]` and one mask for each row."""
    batch, heads, queries, _ = query.shape
    groups = heads // key.shape[1]
    output = torch.zeros(batch, queries, heads, value.shape[-1], dtype=torch.float64)
    for row in range(batch):
        for head in range(heads):
            for position in range(queries):
                seen = mask[row, 0, position]
                keys = key[row, head // groups, seen].double()
                weights = (keys @ query[row, head, position].double() * scaling).softmax(dim=0)
                output[row, position, head] = weights @ value[row, head // groups, seen].double()
    return output
