"""Runs a Gemma 4 assistant over a batch: with the target's own keys and values, and no cache of its own.

All draft tokens of a step have the position of the last known token, and attend to the target's keys and values of the
text before it; earlier draft tokens influence later ones only through the state that is passed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from hf_specgen.heads.base import AttachedHead, HeadOutput
from hf_specgen.heads.gemma_assistant import KeysValues, source_layers
from hf_specgen.targets.inputs import spread_rows
from hf_specgen.targets.target import Target
from hf_specgen.tree import DraftTree


class AssistantReader:
    """The state of an assistant in one step.

    Args:
        attached: the assistant on its target.
        target: holds the keys and values.
    """

    def __init__(self, attached: AttachedHead, target: Target):
        self.attached, self._target = attached, target
        self._sources = source_layers(target.model.config)
        self._like = next(attached.head.parameters())
        self._hidden = self._like.new_zeros(0)

    def start(self, states: torch.Tensor, pending: Sequence[int]) -> torch.Tensor:
        """Draft from each row's last token; what was drafted before is dropped.

        Args:
            states: `[batch, hidden]` the target's state from which the last token was chosen.
            pending: the last token of each row.

        Returns:
            `[batch, vocab]` logits; zeros for rows that the target has dropped.
        """
        rows = self._target.rows
        hidden = states[rows][:, None].to(self._like)
        output = self._run(torch.tensor([[pending[row]] for row in rows]), hidden)
        self._hidden = output.hidden
        return spread_rows(self.attached.target_logits(output.output[:, 0]), rows, len(pending))

    def expand(self, tree: DraftTree, new: int) -> torch.Tensor:
        """Draft below the last `new` nodes of each row; `[batch, new, vocab]` logits.

        Args:
            tree: all nodes that were expanded since `start`; the same number in every row.
            new: how many of them, at the end, are to be read now.
        """
        chosen = tree.select(self._target.rows)
        known, device = tree.nodes - new, self._like.device
        parents = torch.tensor(chosen.parents, device=device)[:, known:]
        places = torch.arange(len(parents), device=device)[:, None]
        output = self._run(chosen.tokens[:, known:], self._hidden[places, parents + 1])
        self._hidden = torch.cat([self._hidden, output.hidden], dim=1)
        return spread_rows(self.attached.target_logits(output.output), self._target.rows, tree.batch)

    def _run(self, tokens: torch.Tensor, hidden: torch.Tensor) -> HeadOutput:
        """One pass; `tokens` `[rows, length]`, `hidden` `[rows, length, hidden]`."""
        device = self._like.device
        lengths = torch.tensor(self._target.cache.lengths, device=device)
        padding = torch.tensor(self._target.padding, device=device)
        positions = (lengths - padding)[:, None].expand(tokens.shape)
        layers: dict[str, Any] = {kind: self._target.cache.layers[index] for kind, index in self._sources.items()}
        dropped = {kind: layer.first for kind, layer in layers.items()}
        filled = int(lengths.max())
        shared: KeysValues = {
            kind: tuple(part[:, :, : filled - layer.first].to(self._like) for part in (layer.keys, layer.values))
            for kind, layer in layers.items()
        }
        head: Any = self.attached.head
        embeddings = self.attached.embed(tokens)
        return cast(HeadOutput, head(embeddings, hidden, positions, shared, lengths, padding, dropped))
