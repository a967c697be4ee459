"""The draft window: a drafter reads the first tokens of a long text and the most recent ones.

A draft head or draft model proposes worse tokens beyond the length that it was trained on. Within a window its
positions stay small, as do its cache and the time of its passes. Once the recent part has doubled, the drafter's cache
is computed again from the window alone: one pass in as many tokens as the window has.

Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023), for the first tokens.
"""

from __future__ import annotations

import logging
from collections import Counter
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from hf_specgen.call import as_count
from hf_specgen.candidates.draft_batch import RowState

logger = logging.getLogger("hf_specgen")

MIN_DRAFTS = 32  # drafts in texts of a length before its acceptance is compared with that of other lengths
FIRST_TOKENS = 4  # first tokens of a window that is given by its recent part, as in the paper
DraftWindowSetting = int | tuple[int, int] | Literal["auto"] | None
"""Recent tokens; or first and recent tokens; "auto" beyond the length that the drafter was trained on; None never."""


class DraftWindow(NamedTuple):
    """How many tokens at the beginning and at the end of a text a drafter reads.

    Example:
        >>> DraftWindow(1, 2).is_exceeded_by(5), DraftWindow(1, 2).is_exceeded_by(6)
        (False, True)
        >>> DraftWindow(1, 2).kept([1, 2, 3, 4, 5, 6])
        [1, 5, 6]
    """

    first: int
    recent: int

    def is_exceeded_by(self, tokens: int) -> bool:
        """Whether a number of tokens exceeds what the drafter's cache may hold."""
        return tokens > self.first + 2 * self.recent

    def kept(self, tokens: list[int]) -> list[int]:
        """The tokens inside the window."""
        size = self.first + self.recent
        return tokens if len(tokens) <= size else [*tokens[: self.first], *tokens[-self.recent :]]


def warn_of_length(outcomes: Counter[tuple[int, bool]], name: str) -> None:
    """Log a warning, once for each drafter and length, if long texts have much less acceptance than shorter ones.

    `outcomes` counts drafts by the bits of the length of the text, and by whether they had an accepted token. A fall of
    the rate by 0.4 is none between kinds of text: the bundled EAGLE-3 head has 0.83 to 1.0 in texts as long as those it
    was trained on, and 0.07 to 0.15 in texts of four times that length.
    """
    drafts = {bits: outcomes[bits, True] + outcomes[bits, False] for bits, _ in outcomes}
    rates = {bits: outcomes[bits, True] / count for bits, count in drafts.items() if count >= MIN_DRAFTS}
    longest = max(rates, default=0)
    if rates and rates[longest] < max(rates.values()) - 0.4:
        _warn(
            "after more than %d tokens far fewer drafts of %s are accepted than in shorter texts: set draft_window to "
            "the number of tokens that it was trained on",
            2 ** (longest - 1),
            name,
        )


def check_window(setting: DraftWindowSetting) -> DraftWindowSetting:
    """The setting; `ValueError` if it is no window."""
    if setting is None or (isinstance(setting, str) and setting == "auto"):
        return setting
    first, recent = setting if isinstance(setting, tuple) and len(setting) == 2 else (0, setting)
    sizes = as_count(first, 0), as_count(recent, 1)
    if sizes[0] is not None and sizes[1] is not None:
        return (sizes[0], sizes[1]) if isinstance(setting, tuple) else sizes[1]
    raise ValueError(
        f'draft_window must be "auto", None, a number of recent tokens or a pair (first, recent), got {setting!r}'
    )


def draft_window(setting: DraftWindowSetting, config: Any, texts: RowState) -> DraftWindow | None:
    """The window of a call, by what the drafter's config states of the longest text in training, and of positions."""
    trained_length = getattr(config, "trained_length", None)
    positions = getattr(getattr(config, "layer", config), "max_position_embeddings", None)
    longest = max(map(len, texts.prompts), default=0) + texts.max_new_tokens
    fitting = None if positions is None else (positions - FIRST_TOKENS) // 2
    recent = min((size for size in (trained_length, fitting) if size is not None), default=0)
    most = FIRST_TOKENS + 2 * recent  # that the drafter reads with the default window
    if setting == "auto":
        return DraftWindow(FIRST_TOKENS, recent) if recent > 0 and longest > most else None
    window = None
    if setting is not None:
        window = DraftWindow(*setting) if isinstance(setting, tuple) else DraftWindow(FIRST_TOKENS, int(setting))
    read = longest if window is None else min(longest, window.first + 2 * window.recent)
    if trained_length is not None and read > most:
        _warn(
            "with draft_window=%r the drafter may read more than %d tokens, but it was trained on %d; far beyond them "
            'fewer of its tokens are accepted: draft_window="auto" lets it read %d',
            setting,
            most,
            trained_length,
            most,
        )
    return window


@lru_cache
def _warn(message: str, *values: object) -> None:
    """Log a warning, once for each message and values."""
    logger.warning(message, *values)
