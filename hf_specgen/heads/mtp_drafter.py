"""Drafter with several multi-token prediction layers, of which each drafts one token; see `mtp.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, cast

import torch

from hf_specgen.device_tree import Frontier
from hf_specgen.heads.base import BoundHead, HeadInputs
from hf_specgen.heads.drafter import HeadDrafter, padded
from hf_specgen.heads.head_text import FeatureSource
from hf_specgen.heads.mtp import MTPHead


class LayeredDrafter(HeadDrafter):
    """Drafts with several MTP layers, each for one further token, over accepted positions and then over draft nodes.

    Layer k reads at position p the token of p + 1 + k and the output of layer k - 1. For the last k of n known
    positions that token is a draft token, so a node of depth k is computed by layer k at these k positions:

        position           n-2       n-1
        layer 0            x(n-1)    x(n)           all known; predicts d1
        layer 1            x(n)      d1             predicts d2
        layer 2            d1        d2             predicts d3

    The last positions are computed again with the next accepted tokens.
    """

    reads_all_rows = True

    def __init__(self, bound: BoundHead, source: FeatureSource, batch: int):
        super().__init__(bound, source, batch)
        self.layers = len(cast(MTPHead, bound.head).layers)
        self.max_depth = self.layers
        self._again: dict[int, tuple[torch.Tensor, list[int]]] = {}
        """Of each row the features and next tokens of positions that are computed again."""

    def _first(self, features: list[torch.Tensor], tokens: list[list[int]]) -> torch.Tensor:
        nothing = self._like.new_zeros(0, self.bound.head.config.hidden_size), list[int]()
        again = [self._again.get(row, nothing) for row in self.rows]
        states = [torch.cat([before, new]) for (before, _), new in zip(again, features, strict=True)]
        tokens = [before + new for (_, before), new in zip(again, tokens, strict=True)]
        outputs, counts = self._read(states, tokens)
        rows = torch.arange(len(counts), device=self._like.device)
        device = self._like.device
        self._last = [  # by layer, the output at the last position whose tokens are all known
            hidden[rows, torch.tensor([max(0, count - 1 - layer) for count in counts], device=device)]
            for layer, hidden in enumerate(outputs)
        ]
        self._ends = self.lengths
        back = [min(self.layers - 1, count) for count in counts]
        ends = [slice(len(row) - count, len(row)) for row, count in zip(tokens, back, strict=True)]
        parts = ((row[end], read[end]) for row, read, end in zip(states, tokens, ends, strict=True))
        self._again = dict(zip(self.rows, parts, strict=True))
        self._commit([-count for count in back])
        # Of each node the tokens and outputs at the positions that its layer has computed.
        self._paths = torch.zeros(len(rows), 1, 0, dtype=torch.long, device=device)
        self._hidden = outputs[0].new_zeros(len(rows), 1, 0, outputs[0].shape[-1])
        return self.bound.target_logits(self._last[0])

    def _restart(self, row: int) -> None:
        super()._restart(row)
        self._again.pop(row, None)

    def keep_rows(self, kept: Sequence[int]) -> None:
        super().keep_rows(kept)
        self._again = {index: self._again[row] for index, row in enumerate(kept) if row in self._again}

    def _add_last(self, other: Self) -> None:
        super()._add_last(other)
        first = len(self.rows) - len(other.rows)
        self._again |= {first + row: positions for row, positions in other._again.items()}

    def _pass(
        self, features: Sequence[torch.Tensor], tokens: Sequence[Sequence[int]], parts: Sequence[slice]
    ) -> list[torch.Tensor]:
        """Run all layers over a part of each row's new positions; the outputs of each layer `[active, new, hidden]`."""
        head: Any = self.bound.head
        hidden = padded(features, parts)
        count = hidden.shape[1]
        outputs = []
        places = self._places(count)
        for layer in range(self.layers):
            ahead = [row[part.start + layer : part.stop + layer] for row, part in zip(tokens, parts, strict=True)]
            read = torch.tensor([[*row, *[0] * (count - len(row))] for row in ahead])
            hidden = head(HeadInputs(self.bound.embed(read), hidden, *places), self.cache, step=layer).hidden
            outputs.append(hidden)
        return outputs

    def _next(self, frontier: Frontier) -> torch.Tensor:
        head: Any = self.bound.head
        device = self._like.device
        depth = frontier.depth
        nodes = frontier.tokens.shape[1]
        last = self._last[depth - 1][:, None, None].expand(-1, nodes, -1, -1)
        self._paths = torch.cat([frontier.gather_parents(self._paths), frontier.tokens.to(device)[..., None]], dim=2)
        states = torch.cat([last, frontier.gather_parents(self._hidden)], dim=2)
        starts = [max(0, end - depth) for end in self._ends]
        first = torch.tensor(starts, device=device)[:, None]
        slots = torch.arange(max(starts) + nodes * depth, device=device)
        place = (slots - first)[:, None]  # counted from the first slot of the nodes
        steps = torch.arange(depth, device=device).repeat(nodes)
        owners = torch.arange(nodes, device=device).repeat_interleave(depth)[:, None]
        itself = (place.div(depth, rounding_mode="floor") == owners) & (place % depth <= steps[:, None])
        mask = ((place < 0) | itself)[:, None]
        self.cache.set_lengths(starts)
        inputs = HeadInputs(self.bound.embed(self._paths.flatten(1)), states.flatten(1, 2), first + steps, mask)
        output = head(inputs, self.cache, step=depth)
        self.cache.set_lengths(self.lengths)
        self._hidden = output.hidden.unflatten(1, (nodes, depth))
        return self.bound.target_logits(self._hidden[:, :, -1])
