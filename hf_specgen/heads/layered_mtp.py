"""Runs several MTP layers, each for one further draft token, over the accepted text and over draft trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, cast

import torch
from torch.nn.functional import pad

from hf_specgen.grown_tree import GrownTree
from hf_specgen.heads.base import BoundHead
from hf_specgen.heads.mtp import MTPHead
from hf_specgen.heads.runner import HeadRunner, padded


class LayeredRunner(HeadRunner):
    """Runs several MTP layers, each for one further draft token, over accepted positions and then over draft nodes.

    Layer k reads at position p the token of p + 1 + k and the output of layer k - 1. For the last k of n known
    positions that token is a draft token, so a node of depth k is computed by layer k at these k positions:

        position           n-2       n-1
        layer 0            x(n-1)    x(n)           all known; predicts d1
        layer 1            x(n)      d1             predicts d2
        layer 2            d1        d2             predicts d3

    The last positions are computed again with the next accepted tokens.
    """

    def __init__(self, bound: BoundHead, batch: int):
        super().__init__(bound, batch)
        self.layers = len(cast(MTPHead, bound.head).layers)
        self._nothing: tuple[torch.Tensor, list[int]] = self._like.new_zeros(0, bound.head.config.hidden_size), []
        self._again = [self._nothing] * batch  # features and next tokens of positions to compute again

    def first_logits(
        self, features: Sequence[torch.Tensor], next_tokens: Sequence[Sequence[int]], needed: Sequence[bool]
    ) -> torch.Tensor:
        new = self._new(features, next_tokens, needed)
        pairs = list(zip(self._again, *new, strict=True))
        states = [torch.cat([before, new]) for (before, _), new, _ in pairs]
        tokens = [before + new for (_, before), _, new in pairs]
        outputs, counts = self._read(states, tokens)
        rows, device = torch.arange(len(counts), device=self._like.device), self._like.device
        self._last = [  # by layer, the output at the last position whose tokens are all known
            hidden[rows, torch.tensor([max(0, count - 1 - layer) for count in counts], device=device)]
            for layer, hidden in enumerate(outputs)
        ]
        self._ends = self.lengths
        again = [min(self.layers - 1, count) for count in counts]
        ends = [slice(len(row) - count, len(row)) for row, count in zip(tokens, again, strict=True)]
        self._again = [(row[end], read[end]) for row, read, end in zip(states, tokens, ends, strict=True)]
        self._commit([-count for count in again])
        hidden = outputs[0]
        # Of each node the outputs and tokens at the last `layers` positions.
        self._hidden = hidden.new_zeros(len(rows), 1, self.layers, hidden.shape[-1])
        self._paths = torch.zeros(len(rows), 1, self.layers, dtype=torch.long, device=device)
        return self._scatter(self.bound.target_logits(self._last[0]))

    def restart(self, row: int) -> None:
        super().restart(row)
        if row in self.rows:
            self._again[self.rows.index(row)] = self._nothing

    def keep_rows(self, kept: Sequence[int], new: int) -> None:
        super().keep_rows(kept, new)
        self._again[len(kept) :] = [self._nothing] * new

    def _put_last(self, other: Self) -> None:
        super()._put_last(other)
        self._again[-len(other.rows) :] = other._again

    def _select(self, rows: list[int]) -> None:
        super()._select(rows)
        self._again = [self._again[row] for row in rows]

    def next_logits(self, tree: GrownTree) -> torch.Tensor:
        """`[batch, new, vocab]` logits after the last nodes of a tree with all nodes since `first_logits`."""
        tree = tree.select(self.rows)
        tokens = tree.input_tokens(self._like.device)[..., None]
        self._paths = torch.cat([tree.of_parents(self._paths)[:, :, 1:], tokens], dim=2)
        self._hidden = self._layer(tree.level, self._paths, tree.of_parents(self._hidden))
        return self._scatter(self.bound.target_logits(self._hidden[:, :, -1]))

    def _pass(
        self, features: Sequence[torch.Tensor], tokens: Sequence[Sequence[int]], parts: Sequence[slice]
    ) -> list[torch.Tensor]:
        """Run all layers over a part of each row's new positions; the outputs of each layer `[active, new, hidden]`."""
        head: Any = self.bound.head
        hidden = padded(features, parts)
        count, outputs = hidden.shape[1], []
        places = self._places(count)
        for layer in range(self.layers):
            ahead = [row[part.start + layer : part.stop + layer] for row, part in zip(tokens, parts, strict=True)]
            read = torch.tensor([[*row, *[0] * (count - len(row))] for row in ahead])
            hidden = head(self.bound.embed(read), hidden, *places, self.cache, step=layer).hidden
            outputs.append(hidden)
        return outputs

    def _layer(self, depth: int, paths: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """The outputs of a layer for nodes of its depth, `[active, nodes, layers, hidden]`; other positions are 0."""
        head: Any = self.bound.head
        (rows, nodes), device = paths.shape[:2], paths.device
        tokens, states = paths[:, :, -depth:], before[:, :, -depth:].clone()
        states[:, :, 0] = self._last[depth - 1][:, None]
        starts = (torch.tensor(self._ends, device=device)[:, None] - depth).clamp(min=0)
        steps = torch.arange(depth, device=device).repeat(nodes)
        owners = torch.arange(nodes, device=device).repeat_interleave(depth)
        slots = torch.arange(max(0, max(self._ends) - depth) + nodes * depth, device=device)
        place = (slots - starts)[:, None]  # counted from the first slot of the nodes
        itself = (place.div(depth, rounding_mode="floor") == owners[:, None]) & (place % depth <= steps[:, None])
        self.cache.set_lengths([max(0, end - depth) for end in self._ends])
        output = head(
            self.bound.embed(tokens.flatten(1)),
            states.flatten(1, 2),
            starts + steps,
            ((place < 0) | itself)[:, None],
            self.cache,
            step=depth,
        )
        self.cache.set_lengths(self.lengths)
        return pad(output.hidden.view(rows, nodes, depth, -1), (0, 0, self.layers - depth, 0))
