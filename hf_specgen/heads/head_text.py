"""What the drafter of a head receives: new text of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch


class NewFeatures(NamedTuple):
    """What a head has not processed: the target's hidden states of accepted tokens, and the token after each.

    Args:
        features: of each row `[new, layers * target_hidden]`; none of a row that has ended.
        tokens: of each row the token after each of these positions.
        active: whether each row has not ended.
        restarted: rows whose text exceeds the draft window, of which the head reads the window from its start.
        is_first: whether nothing was taken before, so that the texts are the prompts.
    """

    features: list[torch.Tensor]
    tokens: list[list[int]]
    active: list[bool]
    restarted: Sequence[int] = ()
    is_first: bool = False


class FeatureSource(Protocol):
    """Where the drafter of a head takes new text from: `candidates.features.FeatureQueue`."""

    def take(self, max_depths: Sequence[int], *, of_all_rows: bool = False) -> NewFeatures | None:
        """Remove the features of rows that draft, or of all rows; None if no row drafts. Called in every step."""

    def take_prompts(self, first: int) -> NewFeatures:
        """Remove the features of the prompts of new rows, from row `first` on."""

    def receive(self) -> None:
        """Add the hidden states of the tokens that the last step has kept."""

    def keep_rows(self, kept: Sequence[int]) -> None:
        """Continue with these rows, in this order."""

    def append_rows(self, new: int) -> None:
        """Add new rows after the present ones, with the features of their prompts."""


class HeadText(NamedTuple):
    """New text of the rows for one draft, see `NewFeatures`.

    Args:
        depths: maximum depth of each row's draft.
        passes: tokens, over all rows, of the passes that process the text; none for the prompts.
    """

    features: list[torch.Tensor]
    tokens: list[list[int]]
    active: list[bool]
    depths: Sequence[int] = ()
    passes: Sequence[int] = ()


class StateText(NamedTuple):
    """The last token of each row for one draft, with the target's hidden states that chose it.

    Args:
        states: `[batch, layers * target_hidden]`.
        pending: the last token of each row.
        rows: the rows that have not been dropped.
        depths: maximum depth of each row's draft.
        passes: tokens, over all rows, of each pass that reads them.
    """

    states: torch.Tensor
    pending: list[int]
    rows: Sequence[int]
    depths: Sequence[int] = ()
    passes: Sequence[int] = ()


class StateSource(Protocol):
    """Where the drafter of a head takes states of last tokens from: `candidates.features.LastStates`."""

    def take(self, max_depths: Sequence[int]) -> StateText | None:
        """The states of the last token of each row; None if no row drafts."""
