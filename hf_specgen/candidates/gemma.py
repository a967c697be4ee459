"""Gemma 4 assistants: small models that draft with the keys and values of their target.

Source: Google, "Gemma 4" (2026), as implemented by `transformers.models.gemma4_assistant`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_specgen.candidates.autoregressive import AutoregressiveSession
from hf_specgen.candidates.base import DraftCall, DraftSession, vocabulary_size
from hf_specgen.candidates.head_candidates import HeadCandidates
from hf_specgen.heads.assistant_reader import AssistantReader
from hf_specgen.heads.base import AttachedHead, DraftHead
from hf_specgen.heads.gemma_assistant import AssistantHead
from hf_specgen.targets.hidden_states import HiddenStateTarget
from hf_specgen.tree import DraftTree


class GemmaAssistantCandidates(HeadCandidates):
    """Drafts with a Gemma 4 assistant.

    Args:
        head_or_path: a loaded assistant, or a folder or Hub id of one.
        k, tree, taps, policy: as for `HeadCandidates`.

    Raises:
        TypeError: if the head is neither a `DraftHead` nor a path.
        ValueError: if a number is out of range; at the first call, if the assistant does not fit the target.

    Example:
        >>> GemmaAssistantCandidates("google/gemma-4-E2B-it-assistant", k=4)
        GemmaAssistantCandidates('google/gemma-4-E2B-it-assistant', k=4)
    """

    max_depth = 8
    """Maximum depth of k="auto": without a cache, one hidden state and the last token stand for all draft tokens."""

    def check(self, head: DraftHead) -> None:
        if not isinstance(head, AssistantHead):
            raise ValueError(
                f"{self._name!r} is a {type(head).__name__}, not a Gemma 4 assistant; use the strategy made for it"
            )

    def begin(self, call: DraftCall, target: HiddenStateTarget, attached: AttachedHead) -> DraftSession:
        return _AssistantSession(call, target, attached, self.k, self.tree)


class _AssistantSession(AutoregressiveSession):
    """The state of one call; arguments as for `EagleSession`."""

    def __init__(
        self, call: DraftCall, target: HiddenStateTarget, attached: AttachedHead, k: int, tree: str | int | None
    ):
        assert call.model is not None
        super().__init__(call, k, tree, 0.0, vocabulary_size(call.model))
        self._target, self._taps = target, attached.taps
        self._reader = AssistantReader(attached, target)

    def draft_at_prefill(self, max_depths: Sequence[int]) -> DraftTree:
        """Nothing: the target has not computed any keys and values yet."""
        return self.not_drafted(len(max_depths))

    def first_scores(self) -> torch.Tensor:
        """One pass over the last token of each row."""
        self.passes.append(len(self._target.rows))
        return self._reader.start(self._target.states_of(self._taps), self.call.state.pending())

    def next_scores(self, tree: DraftTree, new: int) -> torch.Tensor:
        return self._reader.expand(tree, new)
