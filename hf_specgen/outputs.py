"""Assembles the outputs of a call column by column, and applies stopping criteria and the streamer to each column.

Speculation extends rows at different speeds. A column is *confirmed* once every row that has not ended has a token in
it; only then do the stopping criteria and the streamer receive it, in the order in which plain `generate` passes it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from hf_specgen.state import Call
from hf_specgen.verification.result import VerificationResult

BUILT_IN_CRITERIA = (EosTokenCriteria, MaxLengthCriteria)
"""Criteria that are not called: `GenerationState.stop_ids` and `max_length` say the same."""


class OutputCollector:
    """Confirms columns, stops rows where plain `generate` stops them, and collects scores if they were asked for.

    Args:
        call: the call; its state holds the tokens.
        criteria: as prepared by `generate`.
        streamer: receives every confirmed column.

    Attributes:
        columns: how many columns are confirmed.
        scores, logits: `[batch, vocab]` of each confirmed column, if asked for.
    """

    def __init__(self, call: Call, criteria: StoppingCriteriaList, streamer: BaseStreamer | None = None):
        self._call, self._state = call, call.state
        self._custom = StoppingCriteriaList([c for c in criteria if type(c) not in BUILT_IN_CRITERIA])
        self._streamer = streamer
        # Whether anything is done with each column, besides counting it.
        self._needs_columns = bool(self._custom or streamer is not None or call.keeps_scores or call.keeps_logits)
        self.columns = 0
        self.scores: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []
        self._row_scores: list[deque[torch.Tensor]] = [deque() for _ in range(self._state.batch)]
        self._row_logits: list[deque[torch.Tensor]] = [deque() for _ in range(self._state.batch)]

    @property
    def has_custom_criteria(self) -> bool:
        """Whether there are stopping criteria besides EOS and maximum length; they may stop a row in any column."""
        return bool(self._custom)

    def add(self, result: VerificationResult) -> None:
        """Add a step whose tokens have been appended to the state, and confirm the columns that it completes."""
        for row in range(self._state.batch):
            self._row_scores[row].extend(result.scores[row] if result.scores else ())
            self._row_logits[row].extend(result.logits[row] if result.logits else ())
        if self._needs_columns:
            while not self._state.all_stopped and self._column_is_complete():
                self._confirm_column()
        else:
            self._confirm_complete()
        if self._state.all_stopped:
            for row, tokens in enumerate(self._state.generated):
                if len(tokens) > self.columns:
                    self._state.truncate(row, self.columns)

    def output_ids(self) -> torch.Tensor:
        """`[batch, prompt + generated]` the ids that plain `generate` returns."""
        return self._state.prefix(self._state.prompt_length + self.columns)

    def _column_is_complete(self) -> bool:
        state = self._state
        return all(
            len(tokens) > self.columns or (state.is_stopped(row) and state.pad_id is not None)
            for row, tokens in enumerate(state.generated)
        )

    def _confirm_complete(self) -> None:
        """Confirm all complete columns at once: rows end where `GenerationState.append` has cut their tokens off."""
        state = self._state
        lengths = [len(tokens) for tokens in state.generated]
        ended = [state.has_ended(row) for row in range(state.batch)]
        growing = [length for length, has_ended in zip(lengths, ended, strict=True) if not has_ended]
        self.columns = min(growing, default=max(lengths))
        for row, length in enumerate(lengths):
            if ended[row] and length <= self.columns:
                state.stop(row)

    def _confirm_column(self) -> None:
        state, column = self._state, self.columns
        self.columns += 1
        if self._call.keeps_scores:
            self.scores.append(_next_column(self._row_scores))
        if self._call.keeps_logits:
            self.logits.append(_next_column(self._row_logits))
        tokens = [text[column] if column < len(text) else state.pad_id for text in state.generated]
        stops = self._custom_stops()
        if self._streamer is not None:
            self._streamer.put(torch.tensor(tokens))
        at_length = state.prompt_length + self.columns >= state.max_length
        for row, text in enumerate(state.generated):
            if state.is_stopped(row) or not (stops[row] or at_length or tokens[row] in state.stop_ids):
                continue
            state.stop(row)
            if state.pad_id is not None:
                state.truncate(row, min(len(text), self.columns))
                self._row_scores[row].clear()
                self._row_logits[row].clear()

    def _custom_stops(self) -> list[bool]:
        if not self._custom:
            return [False] * self._state.batch
        scores: Any = tuple(self.scores) if self._call.keeps_scores else None
        ids = self._state.prefix(self._state.prompt_length + self.columns)
        return self._custom(ids, scores).tolist()


def _next_column(rows: list[deque[torch.Tensor]]) -> torch.Tensor:
    """`[batch, vocab]` the first entry of each row, which is removed; zeros for rows that have none."""
    blank = torch.zeros_like(next(row[0] for row in rows if row))
    return torch.stack([row.popleft() if row else blank for row in rows])
