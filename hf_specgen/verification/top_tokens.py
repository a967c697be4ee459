"""The target's most likely next tokens after every input token of a step: what Token Recycling learns from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hf_specgen.tree import DraftTree


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
        values, successors = rows.topk(min(count, rows.shape[-1]), dim=-1)
        # In one transfer; token ids below 2**24 are exact.
        packed = torch.cat([values.float().softmax(dim=-1), successors.float()], dim=1).cpu().numpy()
        probabilities, most_likely = np.split(packed, 2, axis=1)
        return cls(np.array(tokens), most_likely.astype(np.int64), probabilities)
