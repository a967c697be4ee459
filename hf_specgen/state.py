"""The state of one `generate` call: the tokens of every row, and which rows have ended."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria


class GenerationState:
    """Prompts and generated tokens of a batch. The decoding loop writes it, everything else reads it.

    Args:
        input_ids: `[batch, prompt]`, left-padded as `generate` received them.
        attention_mask: `[batch, at least prompt]`, 0 for padding; None if there is none.
        stop_ids: a row ends after any of these tokens (EOS).
        max_length: a row ends at that many columns, prompt included.
        pad_id: what plain `generate` writes after the end of a row; None if rows never end before the batch does.

    Attributes:
        prompts: the prompt of each row, without padding.
        generated: the tokens generated so far, per row.
        other_rows: rows of other calls that share the forward passes of the target, see `generate_many`.
        rows_differ: whether each row has as many draft tokens verified as it needs, as in packed steps; otherwise all
            rows of a pass are as long as the longest.
    """

    other_rows, rows_differ = 0, False

    def __init__(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        stop_ids: Collection[int] = (),
        max_length: float = float("inf"),
        pad_id: int | None = None,
    ):
        self.batch, self.prompt_length = input_ids.shape
        self.prompts = _without_padding(input_ids, attention_mask)
        self.generated: list[list[int]] = [[] for _ in range(self.batch)]
        self.stop_ids = frozenset(stop_ids)
        self.max_length = max_length
        self.pad_id = pad_id
        self.device = input_ids.device
        self._stopped = [False] * self.batch
        self._columns = torch.cat([input_ids.cpu(), self._blank(64)], dim=1)
        self._filled = [0] * self.batch

    @classmethod
    def of_call(
        cls,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        criteria: StoppingCriteriaList,
        pad_id: int | None,
    ) -> GenerationState:
        """The state at the start of a call, from what `generate` prepared; rows are padded if a criterion has EOS."""
        stop_ids: set[int] = set()
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                stop_ids.update(criterion.eos_token_id.tolist())
        pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        max_length = float("inf") if criteria.max_length is None else criteria.max_length
        return cls(input_ids, attention_mask, stop_ids, max_length, pad_id if pads else None)

    def pending(self) -> list[int]:
        """The last token of each row, which is not in the target's cache yet."""
        return [tokens[-1] for tokens in self.generated]

    def last_token(self, row: int) -> int:
        """The last token of a row's text; the padding token for a prompt that is nothing but padding."""
        text = self.generated[row] or self.prompts[row]
        return text[-1] if text else int(self._columns[row, self.prompt_length - 1])

    def has_ended(self, row: int) -> bool:
        """Whether the row takes no further tokens: EOS, maximum length, or a stopping criterion.

        Without an EOS token rows are not padded: one that a criterion stopped continues until all rows have stopped.
        """
        return (self._stopped[row] and self.pad_id is not None) or self._at_end(row)

    def stop(self, row: int) -> None:
        """Record that plain `generate` stops this row at its last confirmed column."""
        self._stopped[row] = True

    def is_stopped(self, row: int) -> bool:
        """Whether `stop` was called for the row."""
        return self._stopped[row]

    @property
    def all_stopped(self) -> bool:
        """Whether plain `generate` would return now."""
        return all(self._stopped)

    def remaining(self, row: int) -> float:
        """How many more tokens the row may generate."""
        return self.max_length - self.prompt_length - len(self.generated[row])

    def append(self, row: int, tokens: Sequence[int]) -> int:
        """Append tokens up to and including the first at which the row ends; returns how many were appended."""
        count = self.count_until_end(row, tokens)
        self.generated[row].extend(tokens[:count])
        return count

    def count_until_end(self, row: int, tokens: Sequence[int]) -> int:
        """How many of these tokens `append` would append."""
        remaining = self.remaining(row)
        for count, token in enumerate(tokens, start=1):
            if token in self.stop_ids or count >= remaining:
                return count
        return len(tokens)

    def truncate(self, row: int, length: int) -> None:
        """Cut the row to `length` generated tokens."""
        del self.generated[row][length:]
        column = self.prompt_length + self._filled[row]
        self._columns[row, self.prompt_length + length : column] = self._padding
        self._filled[row] = min(self._filled[row], length)

    @contextmanager
    def tentative(self) -> Iterator[None]:
        """Undo on exit every `append` made inside, so that verification can look ahead along the draft."""
        lengths = [len(tokens) for tokens in self.generated]
        try:
            yield
        finally:
            for row, length in enumerate(lengths):
                if len(self.generated[row]) > length:
                    self.truncate(row, length)

    def prefix(self, columns: int) -> torch.Tensor:
        """The first `columns` columns, as plain `generate` would pass them to processors and stopping criteria.

        A row that has ended, or that has fewer tokens, is padded on the right.

        Returns:
            `[batch, columns]` a copy, on the device of the prompt.
        """
        if columns > self._columns.shape[1]:
            self._columns = torch.cat([self._columns, self._blank(max(columns, self._columns.shape[1]))], dim=1)
        for row, tokens in enumerate(self.generated):
            filled, wanted = self._filled[row], min(len(tokens), columns - self.prompt_length)
            if wanted > filled:
                first = self.prompt_length + filled
                # By way of numpy: a tenth of the time.
                self._columns.numpy()[row, first : self.prompt_length + wanted] = tokens[filled:wanted]
                self._filled[row] = wanted
        return self._columns[:, :columns].to(self.device, copy=True)

    def _at_end(self, row: int) -> bool:
        tokens = self.generated[row]
        return bool(tokens) and (tokens[-1] in self.stop_ids or self.prompt_length + len(tokens) >= self.max_length)

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
