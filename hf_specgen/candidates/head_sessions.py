"""Sessions of draft heads: EAGLE and MTP, Gemma 4 assistants, and heads that predict several depths at once.

Heads that predict several depths at once have one distribution per depth, independent of the path. The most probable
combinations of the depths' tokens form a tree, chosen after one pass of the head.

Sources: Cai et al., "Medusa" (2024), section 2.3.3, for trees of heads; DDTree (2026), https://arxiv.org/abs/2604.12989,
for best-first trees over the distributions of a block.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hf_specgen.candidates.acceptance import MAX_PROBABILITY, CalibratedSession, confidence_by_rank
from hf_specgen.candidates.autoregressive import AutoregressiveSession
from hf_specgen.candidates.base import DraftCall, vocabulary_size
from hf_specgen.candidates.draft_window import DraftWindow
from hf_specgen.candidates.growth import Floats
from hf_specgen.candidates.tree_search import SearchLimits, SearchTree, TreeSize, best_first, draft_of, tree_size
from hf_specgen.grown_tree import GrownTree
from hf_specgen.heads.base import BoundHead
from hf_specgen.heads.eagle import Eagle1Head, Eagle3Head
from hf_specgen.heads.gemma_assistant import AssistantRunner
from hf_specgen.heads.layered_mtp import LayeredRunner
from hf_specgen.heads.medusa import RANKS
from hf_specgen.heads.runner import EagleRunner, ParallelRunner
from hf_specgen.targets.graphs import GRAPH_DEVICES
from hf_specgen.targets.hidden_states import HiddenStateTarget
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult

DEFAULT_NODES = 16
"""Nodes of an "auto" tree without a latency model: most of the gain at a small cost on memory-bound targets."""


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
        self._processed: list[int] = []
        """The position in each row's text of the first feature in the queue."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was received since the call began."""
        return not self._features

    @property
    def has_features(self) -> bool:
        """Whether an active row has features in the queue; none has after a prompt of padding only."""
        rows = enumerate(self._features)
        return any(len(new) for row, features in rows if not self._state.has_ended(row) for new in features)

    def active_rows(self) -> list[bool]:
        """Which rows of the call have not ended."""
        return [not self._state.has_ended(row) for row in range(self._state.batch)]

    def receive(self) -> None:
        """Add the hidden states that the target computed for the tokens kept by the last step."""
        states = self._target.committed_states(self._layers)
        if self.is_empty:
            # The target has processed all but the last token; positions that a given cache held have no features.
            texts = zip(self._state.prompts, self._state.generated, strict=True)
            lengths = [len(prompt) + len(generated) - 1 for prompt, generated in texts]
            states = [row[max(0, len(row) - length) :] for row, length in zip(states, lengths, strict=True)]
            self._processed = [length - len(row) for row, length in zip(states, lengths, strict=True)]
            self._features, self._nothing = [[] for _ in states], states[0][:0]
        for features, new in zip(self._features, states, strict=True):
            features.append(new)

    def take(self, drafting: Sequence[bool] | None = None) -> tuple[list[torch.Tensor], list[list[int]]]:
        """Remove the features of each row `[new, layers * hidden]`, with the token after each of these positions."""
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

    def _next_tokens(self, row: int, count: int) -> list[int]:
        """The token after each of the next `count` positions of a row."""
        prompt, generated = self._state.prompts[row], self._state.generated[row]
        first = self._processed[row] + 1
        begin, end = (max(0, position - len(prompt)) for position in (first, first + count))
        return prompt[first : first + count] + generated[begin:end]


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class EagleSession(AutoregressiveSession):
    """The state of one call with a head that continues from its own output (EAGLE, MTP).

    Attributes:
        runner: the head's cache, and its passes.
    """

    def __init__(
        self,
        call: DraftCall,
        target: HiddenStateTarget,
        bound: BoundHead,
        k: int,
        tree: str | int | None,
        runner: LayeredRunner | None = None,
        window: DraftWindow | None = None,
    ):
        assert call.model is not None
        super().__init__(call, k, tree, 0.0, vocabulary_size(call.model))
        head = bound.head
        device = next(head.parameters()).device.type
        captures = call.compiled and isinstance(head, Eagle1Head | Eagle3Head) and device in GRAPH_DEVICES
        captures = captures and not torch.is_autocast_enabled(device)
        self.runner = runner or EagleRunner(bound, call.state.batch, call.compiled if captures else False)
        self._queue = FeatureQueue(call, target, bound.aux_hidden_state_layers, window, self.runner.restart)
        self._has_prefilled = False

    def draft_at_prefill(self, max_depths: Sequence[int]) -> DraftTree:
        """An empty draft: the target has not computed any hidden states yet."""
        return self.not_drafted(len(max_depths))

    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        if self._queue.is_empty:
            self._queue.receive()
        if not self._has_prefilled and not self._queue.has_features:
            return self.not_drafted(len(max_depths))
        return super().draft(max_depths)

    def observe(self, result: VerificationResult) -> None:
        """Count acceptance, and receive the hidden states of the tokens that were accepted."""
        super().observe(result)
        self._queue.receive()

    def first_scores(self) -> torch.Tensor:
        """Process the text since the last draft with the target's features; rows that have ended are dropped."""
        features, tokens = self._queue.take()
        if self._has_prefilled:
            self.passes.append(sum(map(len, tokens)))
        self._has_prefilled = True
        return self.runner.first_logits(features, tokens, self._queue.active_rows())

    def next_scores(self, tree: GrownTree, new: int) -> torch.Tensor:
        return self.runner.next_logits(tree, new)


class AssistantSession(AutoregressiveSession):
    """The state of one call with a Gemma 4 assistant; arguments as for `EagleSession`."""

    def __init__(self, call: DraftCall, target: HiddenStateTarget, bound: BoundHead, k: int, tree: str | int | None):
        assert call.model is not None
        super().__init__(call, k, tree, 0.0, vocabulary_size(call.model))
        self._target, self._layers = target, bound.aux_hidden_state_layers
        self._runner = AssistantRunner(bound, target)

    def draft_at_prefill(self, max_depths: Sequence[int]) -> DraftTree:
        """An empty draft: the target has not computed any keys and values yet."""
        return self.not_drafted(len(max_depths))

    def first_scores(self) -> torch.Tensor:
        """One pass over the last token of each row."""
        self.passes.append(len(self._target.rows))
        return self._runner.start(self._target.states_of(self._layers), self.call.state.pending())

    def next_scores(self, tree: GrownTree, new: int) -> torch.Tensor:
        return self._runner.expand(tree, new)


class IndependentHeadsSession(CalibratedSession):
    """Base class: drafts trees from one distribution per depth."""

    def __init__(self, call: DraftCall, depth: int, size: str | int | None, ranks: int):
        super().__init__(call, depth)
        self.ranks = 1 if size is None else ranks
        self._size = size

    @abstractmethod
    def depth_logits(self, depth: int) -> torch.Tensor:
        """Run the head: `[batch, depths, vocab]` float32 logits, for at least `depth` depths."""

    @torch.no_grad()
    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        depths = [min(depth, len(self.calibrations)) for depth in max_depths]
        if max(depths) == 0:
            return self.not_drafted(len(max_depths))
        scores, ranked, confidence = self.ranked_tokens(self.depth_logits(max(depths)))
        size, acceptance = self.tree_size(depths), self.acceptance(confidence)
        trees = [best_combinations(ranked[row], acceptance[row], depth, size) for row, depth in enumerate(depths)]
        nodes = size.best_size([tree.probability for tree in trees])
        draft, tags = draft_of(trees, nodes), [np.array(tree.tags[:nodes], dtype=int).reshape(-1, 2) for tree in trees]
        self._features = [
            (tag[:, 1], confidence[row, tag[:, 0] - 1, tag[:, 1]], tag[:, 0]) for row, tag in enumerate(tags)
        ]
        if self.wants_q and draft.nodes:
            draft = with_q(draft, [(tag[:, 0] - 1).tolist() for tag in tags], scores)
        self._tree = draft
        return draft

    def tree_size(self, depths: Sequence[int]) -> TreeSize:
        """How large the trees become; without a latency model "auto" stands for `DEFAULT_NODES`."""
        has_latency = self.call.depth is not None and self.call.depth.latency is not None
        return tree_size(DEFAULT_NODES if self._size == "auto" and not has_latency else self._size, self.call, depths)

    def ranked_tokens(self, logits: torch.Tensor) -> tuple[torch.Tensor, NDArray[np.integer[Any]], Floats]:
        """The most preferred tokens of each depth.

        Args:
            logits: `[batch, depths, vocab]`.

        Returns:
            `[batch, depths, vocab]` scores after the score-only processors; `[batch, depths, ranks]` tokens, the most
            preferred first; `[batch, depths, ranks]` confidences.
        """
        verification = self.call.verification
        assert verification is not None
        scores = verification.processors.warp(logits.flatten(0, 1)).view(logits.shape)
        steps = [range(len(text), len(text) + logits.shape[1]) for text in self.call.state.generated]
        weights = verification.draft_weights(scores, steps)
        best, tokens = weights.topk(self.ranks, dim=-1)
        probability = best / weights.sum(dim=-1, keepdim=True)
        if self.wants_q:
            probability = confidence_by_rank(scores.softmax(dim=-1).amax(dim=-1), self.ranks)
        # In one transfer; token ids below 2**24 are exact.
        read = torch.cat([tokens, probability], dim=-1).cpu().numpy().astype(np.float64)
        return scores, read[..., : self.ranks].astype(int), read[..., self.ranks :]

    def acceptance(self, confidence: Floats) -> Floats:
        """`[batch, depths, ranks]` acceptance probabilities of confidences."""
        calibrations = self.calibrations[: confidence.shape[1]]
        return np.stack([one.acceptance(confidence[:, depth]) for depth, one in enumerate(calibrations)], axis=1)


def best_combinations(
    tokens: NDArray[np.integer[Any]], acceptance: Floats, depth: int, size: TreeSize
) -> SearchTree[tuple[int, int]]:
    """The most probable tree of a row whose tokens at a depth do not depend on the path; tags are depth and rank.

    Args:
        tokens, acceptance: `[depths, ranks]` of each depth, most preferred first: the token, and the probability that
            it is accepted, given that the path before it was.

    Example:
        >>> tokens, acceptance = np.array([[5, 6], [7, 8]]), np.array([[0.6, 0.3], [0.9, 0.1]])
        >>> best_combinations(tokens, acceptance, 2, TreeSize(3)).tokens
        [5, 7, 6]
    """
    values = np.minimum(acceptance, MAX_PROBABILITY).tolist()
    ranked = [
        [(token, value, (level, rank)) for rank, (token, value) in enumerate(zip(*pair, strict=True))]
        for level, pair in enumerate(zip(tokens.tolist(), values, strict=True), start=1)
    ]
    return best_first((0, 0), lambda _, level: ranked[level], depth, SearchLimits(size.max_nodes))


def with_q(draft: DraftTree, depths: Sequence[Sequence[int]], scores: torch.Tensor) -> DraftTree:
    """The draft with the probabilities of each node's depth; `scores` are `[batch, depths, vocab]`."""
    sources = [[*row, *[0] * (draft.nodes - len(row))] for row in depths]
    index = torch.tensor(sources, device=scores.device)[..., None].expand(-1, -1, scores.shape[-1])
    return DraftTree(draft.token_lists(), draft.parents, scores.softmax(dim=-1).gather(1, index))


class ParallelSession(IndependentHeadsSession):
    """The state of one call with a head that drafts all depths in one pass: DFlash, JetSpec, P-EAGLE."""

    def __init__(
        self,
        call: DraftCall,
        target: HiddenStateTarget,
        bound: BoundHead,
        runner: ParallelRunner,
        depth: int,
        tree: str | int | None,
        window: DraftWindow | None = None,
    ):
        super().__init__(call, depth, tree, min(RANKS, bound.head.config.draft_vocab_size))
        self.runner = runner
        self._queue = FeatureQueue(call, target, bound.aux_hidden_state_layers, window, runner.restart)
        self.passes: list[int] = []
        self._drafting: list[bool] = []

    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        if self._queue.is_empty:
            self._queue.receive()
        self.passes, self._drafting = [], [depth > 0 for depth in max_depths]
        return super().draft(max_depths)

    def observe(self, result: VerificationResult) -> None:
        """Count acceptance, and receive the hidden states of the tokens that were accepted."""
        super().observe(result)
        self._queue.receive()

    def depth_logits(self, depth: int) -> torch.Tensor:
        """Process the text since the last draft with the target's features, and draft; ended rows are dropped.

        Rows that do not draft keep their features: being ahead of slower rows, they may have no new token to continue.
        """
        features, tokens = self._queue.take(self._drafting)
        active = self._queue.active_rows()
        self.passes = [sum(active) * depth]
        return self.runner.draft(features, tokens, active, depth).float()
