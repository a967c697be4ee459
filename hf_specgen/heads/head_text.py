"""What the drafter of a head receives: new text of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch


class HeadText(NamedTuple):
    """New text of the rows: the target's hidden states that the head has not processed, and the token after each."""

    features: list[torch.Tensor]  # [new, layers * target_hidden] of each row; none of a row that has ended
    tokens: list[list[int]]  # of each row the token after each of these positions
    active: list[bool]  # whether each row has not ended
    depths: Sequence[int] = ()  # maximum depth of each row's draft
    tokens_per_pass: Sequence[int] = ()  # over all rows, of the passes over the text; none for the prompts
    restarted: Sequence[int] = ()  # rows whose text exceeds the draft window, which the head reads from its start
    is_first: bool = False  # whether nothing was taken before, so that the texts are the prompts


class FeatureSource(Protocol):
    """Where the drafter of a head takes new text from: `candidates.features.FeatureQueue`."""

    def pop_text(self, max_depths: Sequence[int], *, of_all_rows: bool = False) -> HeadText | None:
        """Remove the features of rows that draft, or of all rows; None if no row drafts. Called in every step."""

    def pop_prompts(self, first: int) -> HeadText:
        """Remove the features of the prompts of new rows, from row `first` on."""

    def receive(self) -> None:
        """Add the hidden states of the tokens that the last step has kept."""

    def keep_rows(self, kept: Sequence[int]) -> None:
        """Continue with these rows, in this order."""

    def append_rows(self, new: int) -> None:
        """Add new rows after the present ones, with the features of their prompts."""


class StateText(NamedTuple):
    """The last token of each row for one draft, with the target's hidden states that chose it."""

    states: torch.Tensor  # [batch, layers * target_hidden]
    pending: list[int]  # the last token of each row
    rows: Sequence[int]  # that have not been dropped
    depths: Sequence[int] = ()  # maximum depth of each row's draft
    tokens_per_pass: Sequence[int] = ()  # tokens, over all rows, of each pass that reads them


class StateSource(Protocol):
    """Where the drafter of a head takes states of last tokens from: `candidates.features.LastStates`."""

    def states_for(self, max_depths: Sequence[int]) -> StateText | None:
        """The states of the last token of each row; None if no row drafts."""
