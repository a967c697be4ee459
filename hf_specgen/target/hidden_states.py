"""A target that keeps the state that each row's last token was chosen from: what heads read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from hf_specgen.target.base import Target
from hf_specgen.target.model_parts import output_matrix
from hf_specgen.tree import DraftTree


class HiddenStateTarget(Target):
    """A `Target` with `states`.

    Args:
        model, input_ids, generation_config, model_kwargs: as for `Target`.

    Raises:
        ValueError: if the model has no linear output matrix, whose input the states are.
    """

    states: torch.Tensor
    """`[batch, hidden]` what the output matrix read when each row's last token was chosen."""

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ):
        self._matrix = output_matrix(model)
        super().__init__(model, input_ids, generation_config, model_kwargs)

    def prefill(self, opening: DraftTree) -> torch.Tensor:
        with self._reading() as read:
            logits = super().prefill(opening)
        self._read = read[-1][:, -1 - opening.nodes :]
        self.states = self._read[:, 0].clone()  # the prompt's other states are not kept
        return logits

    def forward(
        self, tree: DraftTree, pending: Sequence[int] | torch.Tensor, active: Sequence[bool] | None = None
    ) -> torch.Tensor:
        with self._reading() as read:
            logits = super().forward(tree, pending, active)
        self._read = self._for_all_rows(read[-1], tree.batch)  # [batch, 1 + nodes, hidden]
        return logits

    def commit(self, paths: Sequence[Sequence[int] | None]) -> None:
        super().commit(paths)
        rows = [row for row, path in enumerate(paths) if path is not None]
        ends = [1 + path[-1] if path else 0 for path in paths if path is not None]
        self.states[rows] = self._read[rows, ends]

    @contextmanager
    def _reading(self) -> Iterator[list[torch.Tensor]]:
        """What the output matrix reads meanwhile."""
        read: list[torch.Tensor] = []

        def keep(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
            read.append(arguments[0])

        handle = self._matrix.register_forward_pre_hook(keep)
        try:
            yield read
        finally:
            handle.remove()
