"""Features, EAGLE's word for the target's hidden states, of which draft heads read those of accepted tokens.

A head reads the features of every accepted token exactly once; they wait in a queue until it drafts.

text               x0   x1   x2   x3 (pending)
hidden states      h0   h1   h2                   of the tokens that the target has processed
a head reads       h0   h1   h2                   and with each of them the token after it
                   x1   x2   x3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import torch

from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.candidates.draft_window import DraftWindow
from hf_specgen.heads.head_text import HeadText, StateText


@dataclass
class _RowQueue:
    """The hidden states of a row that the head has not processed, in the order of the text."""

    parts: list[torch.Tensor]  # consecutive states `[positions, layers * hidden]`
    position: int  # in the text, of the first of these states
    # With a window, the states in the cache of the head: those of the window at the last restart, and those since. They
    # are given to the head again when the row restarts.
    cached_states: torch.Tensor
    cached_tokens: list[int] = field(default_factory=list)  # the token after each of their positions

    @property
    def count(self) -> int:
        """How many positions have states here."""
        return sum(map(len, self.parts))

    def add_cached(self, features: torch.Tensor, tokens: Sequence[int], window: DraftWindow) -> bool:
        """Add features that the head now reads to the cached ones; True if these exceeded the window and were cut."""
        self.cached_states = torch.cat([self.cached_states, features])
        self.cached_tokens = [*self.cached_tokens, *tokens]
        if not window.is_exceeded_by(len(self.cached_tokens)):
            return False
        self.cached_states = torch.cat([self.cached_states[: window.first], self.cached_states[-window.recent :]])
        self.cached_tokens = window.kept(self.cached_tokens)
        return True


class FeatureQueue:
    """Hidden states of accepted tokens that a head has not processed.

    When a row exceeds the window, all states in the window are returned, those that were returned before too.
    """

    def __init__(self, batch: DraftBatch, layers: Sequence[int], window: DraftWindow | None = None):
        self._batch = batch
        self._state = batch.state
        self._layers = layers
        self._window = window
        self._rows: list[_RowQueue] = []
        self._was_read = False  # whether features were removed before

    @property
    def has_rows(self) -> bool:
        """Whether hidden states were received, also if all of them have been removed."""
        return bool(self._rows)

    def receive(self) -> None:
        """Add the hidden states of the tokens that the last step kept; of the prompts at first, and of new rows."""
        states = self._batch.committed_states(self._layers)
        for row, new in zip(self._rows, states, strict=False):  # new rows are last
            row.parts.append(new)
        self._add_rows(states)

    def pop_text(self, max_depths: Sequence[int], *, of_all_rows: bool = False) -> HeadText | None:
        """Remove the features of the rows that draft; `of_all_rows`: of all rows that have not ended.

        None if no row drafts, or none can, see `_can_draft`. Without `of_all_rows` a row that does not draft keeps
        its features for a later draft.
        """
        if not self.has_rows:
            self.receive()
        if not any(max_depths) or not self._can_draft:
            return None
        return self._pop_text_of_rows([inf if depth > 0 or of_all_rows else 0 for depth in max_depths])

    def pop_prompts(self, first: int) -> HeadText:
        """Remove the features of new rows, the row `first` and those after it; the result has these rows alone.

        The last feature of a row stays in the queue for its first draft, unless it is the only one. No row counts as
        restarted, as nothing was computed for new rows.
        """
        limits_of_new = [max(1, row.count - 1) for row in self._rows[first:]]
        text = self._pop_text_of_rows([*[0] * first, *limits_of_new])
        features = text.features[first:]
        tokens = text.tokens[first:]
        return text._replace(features=features, tokens=tokens, active=[True] * len(tokens), restarted=())

    def pop_states(self, limits: Sequence[float]) -> list[torch.Tensor]:
        """Remove the first `limits[row]` features of each row that has not ended: `[removed, layers * hidden]` each."""
        return self._pop_text_of_rows(limits).features

    def available(self, row: int) -> int:
        """How many features of a row are in the queue."""
        return self._rows[row].count

    def keep_rows(self, kept: Sequence[int]) -> None:
        """Continue with these rows, in this order."""
        self._rows = [self._rows[row] for row in kept]

    def append_rows(self, new: int) -> None:
        """Add new rows after the present ones, with the hidden states of their prompts."""
        del new  # their number: rows without a queue are new
        self._add_rows(self._batch.committed_states(self._layers))

    @property
    def _can_draft(self) -> bool:
        """Whether features were removed before, or an active row has some; false if all prompts are padding only."""
        rows = enumerate(self._rows)
        return self._was_read or any(row.count for index, row in rows if not self._state.has_ended(index))

    def _add_rows(self, states: Sequence[torch.Tensor]) -> None:
        """Add the rows that are not in the queue yet, with their hidden states; `states` are of all rows."""
        for row, new in enumerate(states[len(self._rows) :], start=len(self._rows)):
            # The target has processed all tokens but the last one. There are states of padding before the prompt too,
            # which are cut off; and none of the first positions, if the call began with a cache of these.
            length = len(self._state.prompts[row]) + len(self._state.generated[row]) - 1
            states_of_text = new[max(0, len(new) - length) :]
            self._rows.append(_RowQueue([states_of_text], length - len(states_of_text), new[:0]))

    def _pop_text_of_rows(self, limits: Sequence[float]) -> HeadText:
        """Remove the first `limits[row]` features of each row that has not ended, and the token after each.

        A row that exceeds the window is restarted: it gets all features in the window, those removed before included.
        """
        text = HeadText([], [], self._batch.is_active(), is_first=not self._was_read)
        self._was_read = True
        restarted = []
        for index, row in enumerate(self._rows):
            features, tokens = self._pop_states_of_row(index, row, limits[index])
            if self._window is not None and tokens and row.add_cached(features, tokens, self._window):
                features = row.cached_states
                tokens = row.cached_tokens
                restarted.append(index)
            text.features.append(features)
            text.tokens.append(tokens)
        return text._replace(restarted=restarted)

    def _pop_states_of_row(self, index: int, row: _RowQueue, limit: float) -> tuple[torch.Tensor, list[int]]:
        """Remove the first `limit` features of a row, or all of fewer features; returns the token after each, too."""
        if limit <= 0 or not row.parts or self._state.has_ended(index):
            return row.cached_states[:0], []  # no features: an empty tensor of their width
        features = row.parts[0] if len(row.parts) == 1 else torch.cat(row.parts)
        row.parts = []
        if len(features) > limit:  # the later ones stay in the queue
            features, later = features.tensor_split([int(limit)])
            row.parts = [later]
        tokens = self._tokens(index, row.position + 1, row.position + 1 + len(features))
        row.position += len(tokens)
        return features, tokens

    def _tokens(self, row: int, first: int, end: int) -> list[int]:
        """The tokens of a row's text at the positions `first` to `end - 1`."""
        prompt = self._state.prompts[row]
        generated = self._state.generated[row]
        before = len(prompt)
        return prompt[first:end] + generated[max(0, first - before) : max(0, end - before)]


class LastStates:
    """The target's hidden states from which the last token of each row was chosen, for heads that read only these."""

    def __init__(self, batch: DraftBatch, layers: Sequence[int]):
        self._batch = batch
        self._layers = layers

    def states_for(self, max_depths: Sequence[int]) -> StateText | None:
        """The states and the last tokens; None if no row drafts."""
        if not any(max_depths):
            return None
        rows = self._batch.present_rows
        states = self._batch.last_states(self._layers)
        return StateText(states, self._batch.state.pending(), rows, max_depths, tokens_per_pass=[len(rows)])
