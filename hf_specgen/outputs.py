"""From the rows' texts to what the caller sees: column by column, exactly as plain `generate` would emit them.

Speculation fills rows at different speeds. A column is *confirmed* once every row that still matters has a token in
it; only then do the stopping criteria and the streamer see it, in the order in which plain `generate` shows it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from hf_specgen.state import GenerationState
from hf_specgen.verification import VerificationResult

KNOWN_CRITERIA = (EosTokenCriteria, MaxLengthCriteria)


class OutputCollector:
    """Confirms columns, stops where plain `generate` stops, and keeps scores if asked to.

    Args:
        sequences: the text of every row.
        criteria: as prepared by `generate`.
        streamer: gets every confirmed column.
        keep_scores: collect processed scores and logits of each column.
        show_scores: hand the processed scores to the stopping criteria, as plain `generate` does if asked for them.
    """

    def __init__(
        self,
        sequences: GenerationState,
        criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None,
        keep_scores: bool,
        show_scores: bool,
    ):
        self._sequences = sequences
        self._custom = StoppingCriteriaList([c for c in criteria if type(c) not in KNOWN_CRITERIA])
        self._streamer = streamer
        self._keep_scores, self._show_scores = keep_scores, show_scores
        self._row_scores: list[list[torch.Tensor]] = [[] for _ in range(sequences.batch)]
        self._row_logits: list[list[torch.Tensor]] = [[] for _ in range(sequences.batch)]
        self.finished = [False] * sequences.batch
        self.columns = 0
        self.scores: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []

    @property
    def done(self) -> bool:
        return all(self.finished)

    def add(self, verdict: VerificationResult) -> None:
        """Take in a step's tokens (which are in `sequences` already) and confirm the columns that are now complete."""
        for row, (scores, logits) in enumerate(zip(verdict.scores, verdict.logits, strict=True)):
            self._row_scores[row] += scores
            self._row_logits[row] += logits
        while not self.done and self._column_is_complete():
            self._confirm_column()
        if self.done:
            for row, tokens in enumerate(self._sequences.generated):
                if len(tokens) > self.columns:
                    self._sequences.truncate(row, self.columns)

    def goes_on(self, row: int) -> bool:
        """Whether the row still needs tokens."""
        return not (self.finished[row] and self._pads) and not self._sequences.rests(row)

    def output_ids(self) -> torch.Tensor:
        """`[batch, prompt + generated]` the sequences as plain `generate` returns them."""
        return self._sequences.prefix(self._sequences.prompt_length + self.columns)

    @property
    def _pads(self) -> bool:
        """Whether a finished row is padded; otherwise it goes on until all rows have finished."""
        return self._sequences.pad_id is not None

    def _column_is_complete(self) -> bool:
        return all(
            len(tokens) > self.columns or (finished and self._pads)
            for tokens, finished in zip(self._sequences.generated, self.finished, strict=True)
        )

    def _confirm_column(self) -> None:
        sequences, column = self._sequences, self.columns
        self.columns += 1
        if self._keep_scores:
            self.scores.append(self._stack(self._row_scores, column))
            self.logits.append(self._stack(self._row_logits, column))
        tokens = [text[column] if column < len(text) else sequences.pad_id for text in sequences.generated]
        stops = self._custom_stops()
        if self._streamer is not None:
            self._streamer.put(torch.tensor(tokens))
        at_length = sequences.prompt_length + self.columns >= sequences.max_length
        for row, text in enumerate(sequences.generated):
            if self.finished[row] or not (stops[row] or at_length or tokens[row] in sequences.stop_ids):
                continue
            self.finished[row] = True
            if self._pads and len(text) > self.columns:
                sequences.truncate(row, self.columns)

    def _custom_stops(self) -> list[bool]:
        if not self._custom:
            return [False] * self._sequences.batch
        shown: Any = tuple(self.scores) if self._show_scores else None
        ids = self._sequences.prefix(self._sequences.prompt_length + self.columns)
        return self._custom(ids, shown).tolist()

    def _stack(self, rows: list[list[torch.Tensor]], column: int) -> torch.Tensor:
        blank = torch.zeros_like(next(row[column] for row in rows if len(row) > column))
        return torch.stack([row[column] if len(row) > column else blank for row in rows])
