"""Sessions of draft heads: they pass the target's hidden states to a head's runner, and draft with its logits.

A tree grows level by level. Where the logits of a block are corrected by a state along the path (Domino, DSpark with a
recurrent correction), it grows by the corrected logits after each node, without a further pass. Other block heads:
`one_pass.py`.

Source: DDTree (2026), https://arxiv.org/abs/2604.12989, for best-first trees over the distributions of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, cast

import torch

from hf_specgen.call import memory
from hf_specgen.candidates.acceptance import NetworkSession
from hf_specgen.candidates.autoregressive import AutoregressiveSession
from hf_specgen.candidates.base import DraftCall, vocabulary_size
from hf_specgen.candidates.draft_window import DraftWindow
from hf_specgen.candidates.tree_size import TreeSize, tree_size
from hf_specgen.device_tree import Frontier
from hf_specgen.heads.medusa import MedusaRunner
from hf_specgen.heads.path_head import PathRunner
from hf_specgen.heads.runner import EagleRunner, HeadRunner
from hf_specgen.targets.hidden_states import HiddenStateTarget
from hf_specgen.targets.passes import LevelPasses
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult


@dataclass
class _Queued:
    """Hidden states of a row, in the order of the text, and the position in the text of the first of them.

    With a window, `history` is what the head has processed since it was restarted, and the token after each.
    """

    parts: list[torch.Tensor]
    position: int
    history: tuple[torch.Tensor, list[int]]

    @property
    def count(self) -> int:
        """How many positions there are."""
        return sum(map(len, self.parts))


class FeatureQueue:
    """The inputs of a head: hidden states of accepted tokens that it has not processed, and the token after each."""

    def __init__(
        self,
        call: DraftCall,
        target: HiddenStateTarget,
        layers: Sequence[int],
        window: DraftWindow | None = None,
        restart: Callable[[int], None] = lambda row: None,
    ):
        self._state, self._target, self._layers = call.state, target, layers
        self._window, self._restart = window, restart
        self._rows: list[_Queued] = []
        self.was_taken = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing was received since the call began."""
        return not self._rows

    @property
    def can_begin(self) -> bool:
        """Whether an active row has, or had, features in the queue; none has after a prompt of padding only."""
        rows = enumerate(self._rows)
        return self.was_taken or any(row.count for index, row in rows if not self._state.has_ended(index))

    def active_rows(self) -> list[bool]:
        """Which rows of the call have not ended."""
        return [not self._state.has_ended(row) for row in range(self._state.batch)]

    def available(self, row: int) -> int:
        """How many features of a row are in the queue."""
        return self._rows[row].count

    def receive(self) -> None:
        """Add the hidden states that the target computed for the tokens kept by the last step."""
        states = self._target.committed_states(self._layers)
        for row, new in zip(self._rows, states, strict=False):
            row.parts.append(new)
        self._begin(states)

    def _begin(self, states: Sequence[torch.Tensor]) -> None:
        """Add the rows after those that are known, with the hidden states of their prompts."""
        for row, new in enumerate(states[len(self._rows) :], start=len(self._rows)):
            # The target has processed all but the last token; positions that a given cache held have no features.
            length = len(self._state.prompts[row]) + len(self._state.generated[row]) - 1
            new = new[max(0, len(new) - length) :]
            self._rows.append(_Queued([new], length - len(new), (new[:0], [])))

    def keep_rows(self, kept: Sequence[int]) -> None:
        """Continue with these rows, and with those that the target has after them."""
        self._rows = [self._rows[row] for row in kept]
        self._begin(self._target.committed_states(self._layers))

    def take(self, limits: Sequence[float] | None = None) -> tuple[list[torch.Tensor], list[list[int]]]:
        """Remove at most so many features of each row that has not ended, by default all of them.

        Returns:
            Of each row the features `[new, layers * hidden]`, and the token after each of these positions.
        """
        self.was_taken = True
        taken = [
            self._take(index, row, inf if limits is None else limits[index]) for index, row in enumerate(self._rows)
        ]
        return [features for features, _ in taken], [tokens for _, tokens in taken]

    def _take(self, index: int, row: _Queued, limit: float) -> tuple[torch.Tensor, list[int]]:
        if limit <= 0 or not row.parts or self._state.has_ended(index):
            return row.history[0][:0], []
        features = row.parts[0] if len(row.parts) == 1 else torch.cat(row.parts)
        row.parts = []
        if len(features) > limit:
            features, rest = features.tensor_split([int(limit)])
            row.parts = [rest]
        tokens = self._tokens(index, row.position + 1, row.position + 1 + len(features))
        row.position += len(tokens)
        if (window := self._window) is None:
            return features, tokens
        known, text = torch.cat([row.history[0], features]), [*row.history[1], *tokens]
        if window.is_exceeded_by(len(text)):  # the head starts again
            known, text = torch.cat([known[: window.first], known[-window.recent :]]), window.kept(text)
            features, tokens = known, text
            self._restart(index)
        row.history = known, text
        return features, tokens

    def take_prompts(self, first: int) -> tuple[list[torch.Tensor], list[list[int]]]:
        """As `take`, of new rows, the first of which is given; of each but the last feature, if there are more."""
        new = [max(1, row.count - 1) for row in self._rows[first:]]
        features, tokens = self.take([*[0] * first, *new])
        return features[first:], tokens[first:]

    def _tokens(self, row: int, first: int, end: int) -> list[int]:
        """The tokens of a row's text from a position on."""
        prompt, generated = self._state.prompts[row], self._state.generated[row]
        before = len(prompt)
        return prompt[first:end] + generated[max(0, first - before) : max(0, end - before)]


class HeadSession(NetworkSession):
    """Mixin of sessions with a head that reads hidden states of the target.

    Args:
        runner: the head's cache, and its passes.
        k, tree: maximum depth and size of a draft.
        window: the part of the texts that the head reads; None: all of it.
    """

    passes: list[int]

    def __init__(
        self,
        call: DraftCall,
        target: HiddenStateTarget,
        runner: Any,
        k: int,
        tree: str | int | None,
        window: DraftWindow | None = None,
    ):
        assert call.model is not None
        super().__init__(call, k, tree, vocabulary_size(call.model))  # type: ignore[call-arg]  # that of the next class
        self.target, self.runner, self.window = target, runner, window
        self.token_ids = getattr(runner, "token_ids", None)

    def next_scores(self, frontier: Frontier) -> torch.Tensor:
        """`[batch, new, vocab]` logits after the nodes of a frontier."""
        logits: torch.Tensor = self.runner.next_logits(frontier)
        return logits


class ReadsFeatures(HeadSession):
    """Mixin of sessions whose head reads the hidden states of all accepted tokens."""

    rows_can_change = True

    def __init__(self, call: DraftCall, target: HiddenStateTarget, runner: HeadRunner, *settings: Any):
        super().__init__(call, target, runner, *settings)
        layers = runner.bound.aux_hidden_state_layers
        self.limits: list[float] = []  # of what is taken from the queue: rows that do not draft keep their features
        self.queue = FeatureQueue(call, target, layers, self.window, runner.restart)
        if self.window is None:
            self.watch_length()

    def keep_rows(self, kept: Sequence[int], new: int) -> None:
        self.queue.keep_rows(kept)
        self.runner.keep_rows(kept, new)
        if new and kept and self.runner.cache.lengths:
            self.runner.read_prompts(*self.queue.take_prompts(len(kept)))

    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        if self.queue.is_empty:
            self.queue.receive()
        self.limits = [inf if depth > 0 else 0 for depth in max_depths]
        if not self.queue.can_begin:
            return self.not_drafted(len(max_depths))
        return super().draft(max_depths)  # type: ignore[safe-super]

    def observe(self, result: VerificationResult) -> None:
        """Receive the hidden states of the tokens that were accepted."""
        super().observe(result)
        self.queue.receive()


class EagleSession(ReadsFeatures, AutoregressiveSession):
    """The state of one call with a head that continues from its own output (EAGLE, MTP)."""

    def first_scores(self) -> torch.Tensor:
        """Process the text since the last draft with the target's features; rows that have ended are dropped."""
        return cast(torch.Tensor, self.runner.first_logits(*self._new, self.queue.active_rows()))

    def first_levels(self) -> LevelPasses | None:
        is_prefill = not self.queue.was_taken
        self._new = self.queue.take()
        if not is_prefill:
            self.passes.append(sum(map(len, self._new[1])))
        passes = self.level_passes()
        text = None if passes is None else self.runner.new_text(*self._new)
        return None if passes is None or text is None else passes._replace(text=text)

    def after_text(self, *results: Any) -> None:
        self.runner.after_text(*results)

    def level_passes(self) -> LevelPasses | None:
        return self.runner.level_passes() if isinstance(self.runner, EagleRunner) else None

    def after_levels(self, states: torch.Tensor | None, expanded: int) -> None:
        self.runner.after_levels(states)


class LastStateSession(HeadSession, AutoregressiveSession):
    """The state of one call with a head that reads one state of each row: Gemma 4 assistants, Hydra heads."""

    @property
    def rows_can_change(self) -> bool:  # type: ignore[override]
        return isinstance(self.runner, MedusaRunner)

    def first_scores(self) -> torch.Tensor:
        """One pass over the last token of each row."""
        self.passes.append(len(self.target.rows))
        states = self.target.states_of(self.runner.bound.aux_hidden_state_layers)
        return cast(torch.Tensor, self.runner.first_logits(states, self.call.state.pending()))


class MeasuresLayout(ReadsFeatures):
    """Mixin of sessions with a `PathRunner`, whose measured layout of a block is remembered for later calls."""

    def __init__(self, call: DraftCall, target: HiddenStateTarget, runner: PathRunner, *settings: Any):
        super().__init__(call, target, runner, *settings)
        self._key = "layout", call.drafting.key
        if runner.config.measures_layout:
            runner.lead = memory.recall(call.model if self.remembers else None, self._key, lambda: 0)

    def end(self) -> None:
        super().end()
        if self.runner.lead is not None and self.remembers:
            memory.store(self.call.model, self._key, self.runner.lead)


class PathSession(MeasuresLayout, AutoregressiveSession):
    """The state of one call with a block head whose correction has a state along the path: Domino, recurrent DSpark."""

    def first_scores(self) -> torch.Tensor:
        """Process the text since the last draft with the target's features, and run the block; ended rows are dropped.

        A row that does not draft, being ahead of slower ones, may have no new token to continue.
        """
        features, tokens = self.queue.take(self.limits)
        active = self.queue.active_rows()
        self.passes.append(sum(active) * self.runner.config.block_size)
        return cast(torch.Tensor, self.runner.first_logits(features, tokens, active))

    def tree_size(self, depths: Sequence[int]) -> TreeSize:
        """As for other drafters, but deeper levels cost nothing."""
        return tree_size(self._size, self.call, depths, only_pass=self.runner.config.block_size)

    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        draft = super().draft(max_depths)
        self.passes = self.passes[:1]
        return draft
