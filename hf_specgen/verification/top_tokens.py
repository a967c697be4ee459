"""The target's most likely next tokens after every input token of a step: what Token Recycling learns from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hf_specgen.tree import DraftTree

TOPK_GROUP = 64
"""Columns (tokens) in a group of `topk`: with groups of 32, `topk` takes 10 to 60% longer for vocabularies of 8,000 to
128,000 on one core."""


@dataclass(frozen=True)
class TopTokens:
    """The target's most likely next tokens after each input token of a step, those of rejected nodes included.

    Args:
        tokens: `[n]` the input tokens: of each row that took part, its pending token, then its nodes.
        successors: `[n, count]` the most likely tokens after each, most likely first.
        probabilities: `[n, count]` of these before processors, normalised over these `count` tokens alone: a softmax
            over the vocabulary would take as long as finding them.
    """

    tokens: NDArray[np.integer[Any]]
    successors: NDArray[np.integer[Any]]
    probabilities: NDArray[np.floating[Any]]

    @classmethod
    def of_step(
        cls, logits: torch.Tensor, tree: DraftTree, pending: Sequence[int], active: Sequence[bool], count: int
    ) -> TopTokens:
        """From the logits of a step, `[batch, 1 + nodes, vocab]`, and the pending token of each row."""
        tokens: list[int] = []
        slots: list[int] = []
        for row, (token, draft, parents) in enumerate(zip(pending, tree.token_lists(), tree.parents, strict=True)):
            if active[row]:
                tokens += [token, *draft[: len(parents)]]
                slots += range(row * logits.shape[1], row * logits.shape[1] + 1 + len(parents))
        rows = logits.flatten(0, 1)
        rows = rows if len(slots) == len(rows) else rows[torch.tensor(slots, device=rows.device)]
        return next(cls.of_rows(rows, [tokens], count))

    @classmethod
    def of_rows(cls, logits: torch.Tensor, tokens: Sequence[Sequence[int]], count: int) -> Iterator[TopTokens]:
        """Of each list of input tokens; `logits` `[n, vocab]` are those after all of them, in this order."""
        values, successors = topk(logits, min(count, logits.shape[-1]))
        # In one transfer; token ids below 2**24 are exact.
        packed = torch.cat([values.float().softmax(dim=-1), successors.float()], dim=1).cpu().numpy()
        for part in tokens:
            probabilities, most_likely = np.split(packed[: len(part)], 2, axis=1)
            yield cls(np.array(part), most_likely.astype(np.int64), probabilities)
            packed = packed[len(part) :]


def topk(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`values.topk(count)` of `[n, vocab]`, several times as fast on a CPU where `count` is much smaller than `vocab`.

    The largest values lie in the groups of columns with the largest maxima; only those groups are sorted.
    """
    groups = values.shape[1] // TOPK_GROUP
    if groups <= count:
        return values.topk(count, dim=-1)
    end = groups * TOPK_GROUP
    grouped = values[:, :end].unflatten(1, (groups, TOPK_GROUP))
    chosen = grouped.amax(dim=-1).topk(count, dim=-1).indices
    columns = (chosen[..., None] * TOPK_GROUP + torch.arange(TOPK_GROUP, device=values.device)).flatten(1)
    rest = torch.arange(end, values.shape[1], device=values.device).expand(len(values), -1)
    columns = torch.cat([columns, rest], dim=1)
    best = values.gather(1, columns).topk(count, dim=-1)
    return best.values, columns.gather(1, best.indices)
