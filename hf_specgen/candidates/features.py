"""Collects the inputs of draft heads: the target's hidden states of accepted tokens, and the tokens after them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_specgen.candidates.base import DraftCall
from hf_specgen.heads.base import AttachedHead
from hf_specgen.targets.hidden_states import HiddenStateTarget


class UnreadFeatures:
    """The hidden states of each row that the head has not read yet; a head takes them when it drafts.

    Args:
        call: the call.
        target: keeps the hidden states of its passes.
        attached: the head on its target.
    """

    def __init__(self, call: DraftCall, target: HiddenStateTarget, attached: AttachedHead):
        self._state, self._target, self._taps = call.state, target, attached.taps
        config = attached.head.config
        self._width = config.num_taps * config.target_hidden_size
        self._unread: list[list[torch.Tensor]] = []
        self._read: list[int] = []
        """The position in each row's text of the first unread feature."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was received since the call began."""
        return not self._unread

    @property
    def has_features(self) -> bool:
        """Whether a row that has not ended has unread features; none has after a prompt of padding only."""
        unread = enumerate(self._unread)
        return any(len(new) for row, features in unread if not self._state.has_ended(row) for new in features)

    def receive(self) -> None:
        """Add the hidden states that the target computed for the tokens kept by the last step."""
        states = self._target.committed_states(self._taps)
        if self.is_empty:
            # The target has read everything but the last token; positions that a given cache held have no features.
            texts = zip(self._state.prompts, self._state.generated, strict=True)
            known = [len(prompt) + len(generated) - 1 for prompt, generated in texts]
            states = [row[max(0, len(row) - count) :] for row, count in zip(states, known, strict=True)]
            self._read = [count - len(row) for row, count in zip(states, known, strict=True)]
            self._unread = [[] for _ in states]
        for unread, new in zip(self._unread, states, strict=True):
            unread.append(new)

    def take(self, drafting: Sequence[bool] | None = None) -> tuple[list[torch.Tensor], list[list[int]]]:
        """For each row the unread features `[new, taps * hidden]`, and the token after each of these positions.

        What was taken counts as read.

        Args:
            drafting: the rows whose features are taken, without those that have ended; None for all of these.
        """
        nothing = self._target.pass_states.new_zeros(0, self._width)
        features: list[torch.Tensor] = []
        tokens: list[list[int]] = []
        for row, unread in enumerate(self._unread):
            if drafting is not None and not drafting[row]:
                features.append(nothing)
                tokens.append([])
                continue
            features.append(nothing if self._state.has_ended(row) else torch.cat([nothing, *unread]))
            tokens.append(self._next_tokens(row, len(features[row])))
            self._read[row] += len(tokens[row])
            unread.clear()
        return features, tokens

    def _next_tokens(self, row: int, count: int) -> list[int]:
        """The token after each of the next `count` unread positions of a row."""
        prompt, generated = self._state.prompts[row], self._state.generated[row]
        first = self._read[row] + 1
        begin, end = (max(0, place - len(prompt)) for place in (first, first + count))
        return prompt[first : first + count] + generated[begin:end]


def unfinished_rows(call: DraftCall) -> Sequence[bool]:
    """Which rows of a call have not ended."""
    return [not call.state.has_ended(row) for row in range(call.state.batch)]
