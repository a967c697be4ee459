"""Sessions of draft heads: they pass the target's hidden states to a head's runner, and draft with its logits.

A tree grows level by level. Where the logits of a block are corrected by a state along the path (Domino, DSpark with a
recurrent correction), it grows by the corrected logits after each node, without a further pass. Other block heads:
`one_pass.py`.

Source: DDTree (2026), https://arxiv.org/abs/2604.12989, for best-first trees over the distributions of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from hf_specgen.call import memory
from hf_specgen.candidates.acceptance import NetworkSession
from hf_specgen.candidates.autoregressive import AutoregressiveSession
from hf_specgen.candidates.base import DraftCall, vocabulary_size
from hf_specgen.candidates.draft_window import DraftWindow
from hf_specgen.candidates.tree_search import TreeSize, tree_size
from hf_specgen.grown_tree import GrownTree
from hf_specgen.heads.medusa import MedusaRunner
from hf_specgen.heads.path_head import PathRunner
from hf_specgen.heads.runner import EagleRunner, HeadRunner
from hf_specgen.targets.graphs import LevelPasses
from hf_specgen.targets.hidden_states import HiddenStateTarget
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult


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
        # With a window, of each row what the head has processed since it was restarted.
        self._history: list[tuple[torch.Tensor, list[int]]] = []
        self._features: list[list[torch.Tensor]] = []
        self._processed: list[int] = []  # the position in each row's text of the first feature in the queue
        self.was_taken = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing was received since the call began."""
        return not self._features

    @property
    def can_begin(self) -> bool:
        """Whether an active row has, or had, features in the queue; none has after a prompt of padding only."""
        rows = enumerate(self._features)
        active = [features for row, features in rows if not self._state.has_ended(row)]
        return self.was_taken or any(len(new) for features in active for new in features)

    def active_rows(self) -> list[bool]:
        """Which rows of the call have not ended."""
        return [not self._state.has_ended(row) for row in range(self._state.batch)]

    def receive(self) -> None:
        """Add the hidden states that the target computed for the tokens kept by the last step."""
        states = self._target.committed_states(self._layers)
        if self.is_empty:
            self._nothing = states[0][:0]
            self._begin(states)
            return
        for features, new in zip(self._features, states, strict=True):
            features.append(new)

    def _begin(self, states: Sequence[torch.Tensor]) -> None:
        """Add the rows after those that are known, with the hidden states of their prompts."""
        for row, new in enumerate(states[len(self._features) :], start=len(self._features)):
            # The target has processed all but the last token; positions that a given cache held have no features.
            length = len(self._state.prompts[row]) + len(self._state.generated[row]) - 1
            new = new[max(0, len(new) - length) :]
            self._processed.append(length - len(new))
            self._features.append([new])

    def keep_rows(self, kept: Sequence[int]) -> None:
        """Continue with these rows, and with those that the target has after them."""
        self._features, self._processed = [self._features[row] for row in kept], [self._processed[row] for row in kept]
        self._begin(self._target.committed_states(self._layers))
        if self._history:
            new = [(self._nothing, list[int]()) for _ in self._features[len(kept) :]]
            self._history = [*(self._history[row] for row in kept), *new]

    def take(self, drafting: Sequence[bool] | None = None) -> tuple[list[torch.Tensor], list[list[int]]]:
        """Remove the features of each row `[new, layers * hidden]`, with the token after each of these positions."""
        self.was_taken = True
        features: list[torch.Tensor] = []
        tokens: list[list[int]] = []
        for row, queued in enumerate(self._features):
            if drafting is not None and not drafting[row]:
                features.append(self._nothing)
                tokens.append([])
                continue
            features.append(self._nothing if self._state.has_ended(row) else _joined(queued or [self._nothing]))
            tokens.append(self._next_tokens(row, len(features[row])))
            self._processed[row] += len(tokens[row])
            queued.clear()
            if self._window is not None:
                features[row], tokens[row] = self._within(self._window, row, features[row], tokens[row])
        return features, tokens

    def _within(
        self, window: DraftWindow, row: int, features: torch.Tensor, tokens: list[int]
    ) -> tuple[torch.Tensor, list[int]]:
        """New features and tokens; those of the window, for a head that starts again, once there are too many."""
        self._history = self._history or [(self._nothing, []) for _ in self._features]
        known, text = self._history[row]
        known, text = torch.cat([known, features]), [*text, *tokens]
        if window.is_exceeded_by(len(text)):
            known, text = torch.cat([known[: window.first], known[-window.recent :]]), window.kept(text)
            features, tokens = known, text
            self._restart(row)
        self._history[row] = known, text
        return features, tokens

    def take_prompts(self, first: int) -> tuple[list[torch.Tensor], list[list[int]]]:
        """As `take`, of new rows, the first of which is given; of each but the last feature, if there are more."""
        rest = []
        for row in range(first, len(self._features)):
            [states] = self._features[row]
            count = max(1, len(states) - 1)
            self._features[row] = [states[:count]]
            rest.append(states[count:])
        features, tokens = self.take([row >= first for row in range(len(self._features))])
        for row, states in enumerate(rest, start=first):
            self._features[row].append(states)
        return features[first:], tokens[first:]

    def _next_tokens(self, row: int, count: int) -> list[int]:
        """The token after each of the next `count` positions of a row."""
        prompt, generated = self._state.prompts[row], self._state.generated[row]
        first = self._processed[row] + 1
        begin, end = (max(0, position - len(prompt)) for position in (first, first + count))
        return prompt[first : first + count] + generated[begin:end]


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


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

    def next_scores(self, tree: GrownTree) -> torch.Tensor:
        """`[batch, new, vocab]` logits after the last nodes of a tree."""
        logits: torch.Tensor = self.runner.next_logits(tree)
        return logits


class ReadsFeatures(HeadSession):
    """Mixin of sessions whose head reads the hidden states of all accepted tokens."""

    rows_can_change = True

    def __init__(self, call: DraftCall, target: HiddenStateTarget, runner: HeadRunner, *settings: Any):
        super().__init__(call, target, runner, *settings)
        self.drafting, layers = [True] * call.state.batch, runner.bound.aux_hidden_state_layers
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
        self.drafting = [depth > 0 for depth in max_depths]
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

        Rows that do not draft keep their features: being ahead of slower rows, they may have no new token to continue.
        """
        features, tokens = self.queue.take(self.drafting)
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
