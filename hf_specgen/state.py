"""The text of every row so far, with rows of different lengths, and how plain `generate` would show it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria


class GenerationState:
    """Prompts and generated tokens of a batch.

    Args:
        input_ids: `[batch, prompt]`, left-padded as `generate` got them.
        attention_mask: `[batch, at least prompt]`, 0 for padding; None if there is none.
        stop_ids: tokens after which a row rests.
        max_length: columns (prompt included) after which a row rests.
        pad_id: what plain `generate` writes after the end of a row; None if rows never end before the batch does.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        stop_ids: Collection[int],
        max_length: float,
        pad_id: int | None,
    ):
        self.batch, self.prompt_length = input_ids.shape
        self.prompts = _without_padding(input_ids, attention_mask)
        self.generated: list[list[int]] = [[] for _ in range(self.batch)]
        self.stop_ids = frozenset(stop_ids)
        self.max_length = max_length
        self.pad_id = pad_id
        self.device = input_ids.device
        self._shown = torch.cat([input_ids.cpu(), self._blank(64)], dim=1)
        self._filled = [0] * self.batch

    @classmethod
    def of_call(
        cls,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
    ) -> GenerationState:
        """As `generate` has prepared them."""
        stop_ids: set[int] = set()
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                stop_ids.update(criterion.eos_token_id.tolist())
        pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        pad_token: Any = config._pad_token_tensor
        pad_id = int(pad_token) if pads else None
        max_length = float("inf") if criteria.max_length is None else criteria.max_length
        return cls(input_ids, attention_mask, stop_ids, max_length, pad_id)

    def pending(self) -> list[int]:
        """The last token of each row: the target has not read it yet."""
        return [tokens[-1] for tokens in self.generated]

    def rests(self, row: int) -> bool:
        """Whether the row has come to its own end: a stop token, or the greatest length."""
        tokens = self.generated[row]
        return bool(tokens) and (tokens[-1] in self.stop_ids or self.prompt_length + len(tokens) >= self.max_length)

    def remaining(self, row: int) -> float:
        """How many tokens the row may still get."""
        return self.max_length - self.prompt_length - len(self.generated[row])

    def extend(self, row: int, tokens: Sequence[int]) -> int:
        """Append tokens up to and including the first at which the row rests; returns how many were appended."""
        text = self.generated[row]
        for count, token in enumerate(tokens, start=1):
            text.append(token)
            if self.rests(row):
                return count
        return len(tokens)

    def truncate(self, row: int, length: int) -> None:
        """Cut the row to `length` generated tokens."""
        del self.generated[row][length:]
        column = self.prompt_length + self._filled[row]
        self._shown[row, self.prompt_length + length : column] = self._padding
        self._filled[row] = min(self._filled[row], length)

    def prefix(self, columns: int) -> torch.Tensor:
        """The first `columns` columns, as plain `generate` would show them to processors and stopping criteria.

        A row that has ended, or that has not got so far yet, is shown padded.

        Returns:
            `[batch, columns]` a copy, on the device of the prompt.
        """
        if columns > self._shown.shape[1]:
            self._shown = torch.cat([self._shown, self._blank(max(columns, self._shown.shape[1]))], dim=1)
        for row, tokens in enumerate(self.generated):
            filled, wanted = self._filled[row], min(len(tokens), columns - self.prompt_length)
            if wanted > filled:
                first = self.prompt_length + filled
                self._shown[row, first : self.prompt_length + wanted] = torch.tensor(tokens[filled:wanted])
                self._filled[row] = wanted
        return self._shown[:, :columns].to(self.device, copy=True)

    @property
    def _padding(self) -> int:
        return 0 if self.pad_id is None else self.pad_id

    def _blank(self, columns: int) -> torch.Tensor:
        return torch.full((self.batch, columns), self._padding, dtype=torch.long)


def _without_padding(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[list[int]]:
    rows = input_ids.tolist()
    if attention_mask is None:
        return rows
    kept = attention_mask[:, -input_ids.shape[1] :].bool().tolist()
    return [[token for token, keep in zip(*pair, strict=True) if keep] for pair in zip(rows, kept, strict=True)]
