"""Verification: which draft tokens are accepted, and which token follows the last accepted one.

At every node of the draft tree a token is chosen from the target's logits: that of a child, or another. Following
these choices down the tree gives the accepted path; the choice after its last node is the bonus token. The
verification modes differ only in how they choose.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hf_specgen.call import Call
from hf_specgen.tree import DraftTree, children
from hf_specgen.verification.criteria import CustomCriteria
from hf_specgen.verification.processors import LogitsPipeline, ScoreProcessors
from hf_specgen.verification.result import ChosenPaths, VerificationResult, accepted_path, values_along_paths

INVALID = -1
"""Returned where no token can be sampled: the weights are NaN, as the softmax of NaN, inf or all -inf scores is."""
INVALID_SCORES = "probability tensor contains either `inf`, `nan` or element < 0"
"""What `torch.multinomial` raises then."""


class Verifier(ABC):
    """A verification mode: settings only, so one object may serve any number of calls and threads.

    Subclass it, return a session from `start`, and pass an instance as `verification=`.
    """

    @abstractmethod
    def start(self, call: Call) -> VerificationSession:
        """Return the session of a call."""


class VerificationSession(ABC):
    """The state of a verification mode in one `generate` call; a subclass implements `choose`.

    Args:
        call: the call.

    Attributes:
        processors: applies the logits processors of the call at the nodes of a draft.
        wants_q: whether a draft that was sampled should carry the probabilities it was sampled with (`DraftTree.q`).
        predicted_tokens: for each row, the tokens that an earlier run sampled with the same noise; empty if unknown.
    """

    wants_q = False
    predicted_tokens: Sequence[Sequence[int]] = ()
    _has_failed = False  # whether a token could not be sampled, behind a position that was emitted

    def __init__(self, call: Call):
        self.call = call
        self.processors = LogitsPipeline(call.logits_processor, call.state, call.do_sample)
        if call.keeps_scores and self.processors.lockstep and call.state.pad_id is not None:
            names = ", ".join(self.processors.lockstep)
            raise ValueError(
                f"output_scores= includes those of rows that have ended, which {names} may compute from all "
                "rows; set row_wise = True on a processor whose rows are independent, leave output_scores= out, or "
                "use plain generate(candidate_generator=None)"
            )

    @abstractmethod
    def choose(
        self,
        scores: torch.Tensor,
        token_indices: Sequence[Sequence[int]],
        tree: DraftTree,
        nodes: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        """Choose the token that follows each of the given nodes (all nodes of the tree, or one per row).

        Args:
            scores: `[batch, queries, vocab]` processed scores, float32 unless a processor has returned another dtype.
            token_indices: `[batch][queries]` the index of the generated token that each query decides, 0 the first.
                Read only if tokens are sampled; may be empty otherwise.
            tree: the draft. A query that chooses the token of one of its node's children accepts that child.
            nodes: `[batch][queries]` the tree node that each query follows; -1 is the row's last token. Where a row has
                fewer nodes than others, the choices of its last queries are ignored.

        Returns:
            `[batch, queries]` tokens; `INVALID` where the scores are no distribution to sample from.
        """

    def draft_scores(
        self, scores: torch.Tensor, token_indices: Sequence[Sequence[int]], tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Scores of each token as a draft token: their softmax estimates how likely it is to be accepted.

        Args:
            scores: `[batch, positions, …, draft vocab]` the draft's scores after its processors, on any device.
            token_indices: `[batch][positions]` the index of the generated token that each draft token is for, or
                `[batch][1]` if all of a row are for the same; ignored for rows that take no part.
            tokens: `[batch, positions, draft vocab]` the ids, if the scores are not those of tokens 0, 1, 2, …

        Returns:
            Of the shape of the scores: by default these, perturbed by `draft_noise` where that is not None.
        """
        return with_noise(scores, self.draft_noise(token_indices, scores.device), tokens)

    @property
    def score_processors(self) -> ScoreProcessors:
        """The logits processors that a drafter's logits pass through: the score-only ones of the call."""
        return self.call.draft_processors or self.processors.score_processors

    @property
    def uses_draft_noise_only(self) -> bool:
        """Whether `draft_scores` depend on the scores and `draft_noise` alone."""
        return type(self).draft_scores is VerificationSession.draft_scores

    def draft_noise(self, token_indices: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor | None:
        """`[batch, positions, vocab]` the noise with which the target samples generated tokens, if it is known."""
        return None

    def max_row_skew(self) -> float:
        """How many tokens a row may be ahead of the slowest row."""
        return float("inf")

    def confirm(self, positions: int) -> None:
        """Receive the number of emitted positions; what was kept for them is no longer needed."""

    def end(self, positions: int) -> None:
        """End the call after `positions` emitted positions; also called after an exception."""

    def verify(
        self, tree: DraftTree, logits: torch.Tensor, active: Sequence[bool], criteria: CustomCriteria | None = None
    ) -> VerificationResult | None:
        """Accept the draft tokens that `choose` returns, and emit the next token; a row's tokens end where it ends.

        Args:
            tree: the draft.
            logits: `[batch, 1 + nodes, vocab]` of the target: after each row's last token, then after each node.
            active: the rows that take part.
            criteria: custom stopping criteria, behind which processors that may keep a state are not called.

        Returns:
            None if the draft must be left out, as a token whose states are NaN makes all scores NaN: 0 * NaN is NaN.

        Raises:
            RuntimeError: as plain sampling does, if the scores of an emitted token are NaN, infinite or all -inf.
        """
        if self._has_failed:
            raise RuntimeError(INVALID_SCORES)
        if logits.dtype != torch.float32 or logits.device != self.call.state.device:
            logits = logits.to(device=self.call.state.device, dtype=torch.float32)
        # Logits are looked at before a processor that may keep a state, or replace NaN by numbers, receives them.
        validates = not self.processors.score_only or self.processors.score_processors.hides_nan
        if tree.nodes and validates and bool(are_nan(logits)[list(active)].any()):
            return None
        if self.processors.score_only:
            chosen = self._choose_at_once(tree, logits, active)
        else:
            chosen = self._choose_by_position(tree, logits, active, criteria)
        result = VerificationResult([None] * tree.batch, [[] for _ in range(tree.batch)], [0] * tree.batch)
        for row, (path, tokens) in chosen.paths.items():
            emitted = self.call.state.count_until_end(row, tokens)
            if INVALID in tokens[:emitted]:  # a stopping criterion may come first: the next step chooses that token
                emitted = tokens.index(INVALID)
                if not emitted and tree.nodes and bool(are_nan(logits)[row, 0]):  # only NaN can come from the draft
                    return None
                if not emitted:
                    raise RuntimeError(INVALID_SCORES)
                # Stateful processors must not be called for that token again.
                self._has_failed |= bool(self.processors.may_be_stateful)
            result.paths[row] = path[: emitted - 1]
            result.tokens[row] = tokens[:emitted]
            result.accepted[row] = min(len(path), emitted)
        if self.call.keeps_scores:
            result.scores = values_along_paths(chosen.scores, result.paths)
        if self.call.keeps_logits:
            result.logits = values_along_paths(chosen.logits, result.paths)
        return result

    def _checked_choices(
        self,
        scores: torch.Tensor,
        token_indices: Sequence[Sequence[int]],
        tree: DraftTree,
        nodes: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        """What `choose` returns; `TypeError` for anything but `[batch, queries]` integers."""
        choices: Any = self.choose(scores, token_indices, tree, nodes)
        is_integer = isinstance(choices, torch.Tensor) and not choices.is_floating_point()
        if not is_integer or choices.shape != scores.shape[:2]:
            returned = f"{choices.dtype} {list(choices.shape)}" if isinstance(choices, torch.Tensor) else repr(choices)
            expected = f"a tensor of {list(scores.shape[:2])} token ids"
            raise TypeError(f"{type(self).__name__}.choose must return {expected}, got {returned:.60}")
        return choices

    def _choose_at_once(self, tree: DraftTree, logits: torch.Tensor, active: Sequence[bool]) -> ChosenPaths:
        """Choose the token after every node, then follow the choices down the tree."""
        scores = self.processors.score_processors(logits)
        token_indices = self._token_indices(tree, active) if self.call.do_sample else []
        choices = self._checked_choices(scores, token_indices, tree, [range(-1, tree.nodes)] * tree.batch)
        chosen = tree.read_with(choices)
        # The argmax of a query whose logits are all NaN is token 0.
        if tree.nodes and any(0 in tokens for tokens in chosen):
            pairs = zip(chosen, are_nan(logits).tolist(), strict=True)
            chosen = [[INVALID if nan else token for token, nan in zip(*pair, strict=True)] for pair in pairs]
        draft_tokens = tree.token_lists()
        rows = [row for row in range(tree.batch) if active[row]]
        paths = {row: accepted_path(draft_tokens[row], tree.parents[row], chosen[row]) for row in rows}
        return ChosenPaths(paths, scores, logits)

    def _choose_by_position(
        self, tree: DraftTree, logits: torch.Tensor, active: Sequence[bool], criteria: CustomCriteria | None
    ) -> ChosenPaths:
        """Choose position by position along the accepted paths, for processors that depend on the preceding tokens.

        Rows may start at different positions. A position is decided once for all rows that have reached it, until every
        row has chosen a token outside its draft or has ended; in lockstep, until one row has chosen such a token. The
        chosen tokens are appended to the state tentatively, so that processors see them. Processors that may keep a
        state are not called behind a position at which a criterion stops a row; there all rows are at the same one.
        """
        state = self.call.state
        draft_tokens = tree.token_lists()
        nodes = [-1] * tree.batch  # the last accepted node of each row
        paths: dict[int, list[int]] = {row: [] for row in range(tree.batch) if active[row]}
        emitted: dict[int, list[int]] = {row: [] for row in paths}
        scores = [dict[int, torch.Tensor]() for _ in active]  # by row and query
        logits_of = [dict[int, torch.Tensor]() for _ in active]
        undecided_rows = list(paths)  # rows whose last choice was a draft token, after which another one may follow
        must_stop = False  # because of a lockstep processor or a stopping criterion
        scores_by_position = list[torch.Tensor]()
        early_criteria = criteria if self.processors.may_be_stateful else None
        with state.tentative():
            while undecided_rows and not must_stop:
                # The first position that is not decided; the choices count for the rows that have reached it.
                index = min(len(state.generated[row]) for row in undecided_rows)
                logits_at = torch.stack([logits[row, node + 1] for row, node in enumerate(nodes)])
                processed = self.processors.scores_at(index, logits_at)
                choices = self._checked_choices(
                    processed[:, None], [[index]] * tree.batch, tree, [[node] for node in nodes]
                )
                tokens = tree.read_with(choices)
                for row in [row for row in undecided_rows if len(state.generated[row]) == index]:
                    [token] = tokens[row]
                    query = nodes[row] + 1
                    scores[row][query] = processed[row]
                    logits_of[row][query] = logits_at[row]
                    emitted[row].append(token)
                    child = None
                    has_ended = False
                    if token != INVALID:
                        state.append(row, [token])
                        siblings = children(tree.parents[row])[query]
                        has_ended = state.has_ended(row)
                        child = next((node for node in siblings if draft_tokens[row][node] == token), None)
                    if child is not None:
                        paths[row].append(child)
                        nodes[row] = child
                    if child is None or has_ended:
                        undecided_rows.remove(row)
                        must_stop |= bool(self.processors.lockstep) and not has_ended
                scores_by_position.append(processed)
                if early_criteria and not any(INVALID in tokens for tokens in emitted.values()):
                    must_stop |= early_criteria.check_chosen(1 + index, scores_by_position)
        return ChosenPaths({row: (paths[row], emitted[row]) for row in paths}, scores, logits_of)

    def _token_indices(self, tree: DraftTree, active: Sequence[bool]) -> list[list[int]]:
        """The index of the token that each query decides; for rows that take no part, those of an active row."""
        lengths = [len(tokens) for tokens in self.call.state.generated]
        earliest = min(length for length, is_active in zip(lengths, active, strict=True) if is_active)
        return [
            [(length if is_active else earliest) + depth for depth in tree.depths(row)]
            for row, (length, is_active) in enumerate(zip(lengths, active, strict=True))
        ]


def argmax(scores: torch.Tensor) -> torch.Tensor:
    """`scores.argmax(dim=-1)`: the first of equal maxima, and NaN before any number.

    On a CPU numpy finds it, by vector instructions, in a tenth of torch's time: for 17 nodes and a vocabulary of 8,192
    in 13 instead of 136 microseconds, of a decoding loop of a few hundred.
    """
    # What numpy can read in place.
    if scores.is_cpu and scores.dtype == torch.float32 and not scores.requires_grad:
        tokens = torch.empty(scores.shape[:-1], dtype=torch.int64)
        np.argmax(scores.numpy(), axis=-1, out=tokens.numpy())
        return tokens
    return scores.argmax(dim=-1)


def are_nan(logits: torch.Tensor) -> torch.Tensor:
    """`[batch, queries]` whether logits `[batch, queries, vocab]` are NaN; of each query the first one is read.

    A hidden state of NaN makes all logits of its query NaN.
    """
    return logits[..., 0].isnan()


def sample_with_noise(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Sample a token with probability proportional to its weight: the argmax of weight / exponential noise.

    Args:
        weights: `[…, vocab]`, not negative, not all zero.
        noise: exponential, of a shape that broadcasts to that of the weights.

    Returns:
        `[…]` tokens, never one whose weight is zero; `INVALID` where a weight is NaN.

    Source: the Gumbel-max trick, in the exponential form that `torch.multinomial` uses.

    Example:
        >>> sample_with_noise(torch.tensor([[0.5, 0.5], [float("nan"), 1.0]]), torch.tensor([[2.0, 1.0]])).tolist()
        [1, -1]
    """
    scores = weights / noise
    best = argmax(scores)
    values = scores.gather(-1, best[..., None])[..., 0]
    return best.masked_fill(values.isnan(), INVALID)


def exponential_noise(
    shape: Sequence[int], device: torch.device, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Noise for `sample_with_noise`, in a shape whose last dimension is the vocabulary."""
    return torch.empty(tuple(shape), dtype=torch.float32, device=device).exponential_(generator=generator)


def with_noise(scores: torch.Tensor, noise: torch.Tensor | None, tokens: torch.Tensor | None) -> torch.Tensor:
    """`perturbed` scores of the tokens `[batch, positions, draft vocab]`, or of all; the scores without noise."""
    if noise is None:
        return scores
    return perturbed(scores, noise if tokens is None else noise.gather(2, tokens))


def perturbed(scores: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Scores with noise: their argmax is the token that `sample_with_noise` samples from the softmax of `scores`.

    The softmax of the result is weight / noise, normalised. `scores` are `[batch, positions, …, vocab]`, the noise
    `[batch, positions, vocab]` of a vocabulary of any size.
    """
    vocab = min(scores.shape[-1], noise.shape[-1])
    noise = noise.view(*noise.shape[:2], *[1] * (scores.dim() - 3), -1)[..., :vocab]
    return scores[..., :vocab] - noise.log()
