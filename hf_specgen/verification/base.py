"""Verification: which of the guesses stand, and what comes after them?

At every node of the draft tree the target's logits decide which token comes next: one of the guesses there, or another.
Following those picks down the tree gives the accepted path; the pick after its last node is the bonus token. How a pick
is made is all that distinguishes the modes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hf_specgen.state import GenerationState
from hf_specgen.tree import DraftTree, accepted_path
from hf_specgen.verification.processors import LogitsPipeline


@dataclass
class VerificationResult:
    """The outcome of one step.

    Args:
        paths: the accepted nodes of each row that the text goes on from, top down; None for a row that took no part.
        tokens: the tokens that each row emits: those of its path, then one more, as a rule the target's own (the
            bonus token). Where a row ends or has to wait for others, the last one may be a guess too.
        accepted: how many of each row's emitted tokens were guesses.
        scores: if asked for, the processed scores behind each emitted token: per row a list of `[vocab]`.
        logits: if asked for, the same before the processors.
    """

    paths: list[list[int] | None]
    tokens: list[list[int]]
    accepted: list[int]
    scores: list[list[torch.Tensor]] = field(default_factory=list)
    logits: list[list[torch.Tensor]] = field(default_factory=list)


class Verifier(ABC):
    """Decides which guesses stand. Subclass it and pass an instance as `verification=` for a mode of your own.

    `begin` is called at the start of each `generate` call; a subclass only has to say how a token is chosen.
    """

    def begin(self, scorer: LogitsPipeline, sequences: GenerationState, do_sample: bool, keep_scores: bool) -> None:
        """Bind to one call.

        Args:
            scorer: applies the logits processors.
            sequences: the text so far; `verify` appends to it.
            do_sample: as in the generation config.
            keep_scores: whether verdicts carry scores and logits.
        """
        self.scorer, self.sequences = scorer, sequences
        self.do_sample, self.keep_scores = do_sample, keep_scores

    @abstractmethod
    def choose(
        self, scores: torch.Tensor, steps: Sequence[Sequence[int]], tree: DraftTree, nodes: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Choose the token that follows each of some nodes (all of them at once, or one per row).

        Args:
            scores: `[batch, slots, vocab]` processed scores, float32.
            steps: `[batch][slots]` which generated token each slot decides, 0 the first. Empty if nothing is sampled.
            tree: the draft. A slot that chooses the token of one of its node's children accepts that child.
            nodes: `[batch][slots]` the tree node that each slot follows; -1 is the row's last token. Where a row has
                fewer nodes than others, what its last slots choose does not matter.

        Returns:
            `[batch, slots]` tokens.
        """

    @property
    def wants_q(self) -> bool:
        """Whether a draft that was drawn at random should carry the probabilities it was drawn with (`DraftTree.q`)."""
        return False

    def draft_weights(self, scores: torch.Tensor, steps: Sequence[Sequence[int]]) -> torch.Tensor:
        """How much this verifier would welcome each token as a guess: the best guess has the largest weight.

        Args:
            scores: `[batch, places, draft vocab]` the draft's scores after its processors, on any device.
            steps: `[batch][places]` which generated token each guess is for; those of a row which takes no part do not
                matter.

        Returns:
            `[batch, places, draft vocab]`, not negative. Here the draft's own probabilities.
        """
        return scores.float().softmax(dim=-1)

    def sample_draft(self, scores: torch.Tensor, steps: Sequence[int]) -> torch.Tensor:
        """Draw draft tokens in the way that makes this verifier accept most of them.

        Args:
            scores: `[batch, draft vocab]` the draft's scores after its processors, on any device.
            steps: which generated token each row's guess is for.

        Returns:
            `[batch]` tokens.
        """
        return self.draft_weights(scores[:, None], [[step] for step in steps])[:, 0].argmax(dim=-1)

    def max_lead(self) -> float:
        """How many tokens a row may be ahead of the slowest one."""
        return float("inf")

    def confirmed(self, step: int) -> None:
        """Every row has passed `step`; nothing before it will be asked for again."""

    def end(self, step: int) -> None:
        """The call ends with `step` generated columns."""

    def verify(self, tree: DraftTree, logits: torch.Tensor, active: Sequence[bool]) -> VerificationResult:
        """Accept the guesses that the target makes itself, and append what each row emits to its text.

        Args:
            tree: the draft.
            logits: `[batch, 1 + nodes, vocab]` of the target: after each row's last token, then after each node.
            active: the rows that take part.

        Returns:
            the verdict; an emitted row ends where the row comes to rest.
        """
        logits = logits.to(device=self.sequences.device, dtype=torch.float32)
        if self.scorer.score_only:
            return self._verify_at_once(tree, logits, active)
        return _ColumnWalk(self, tree, logits, active).run()

    def _verify_at_once(self, tree: DraftTree, logits: torch.Tensor, active: Sequence[bool]) -> VerificationResult:
        scores = self.scorer.all_nodes(logits)
        steps = self._steps(tree, active) if self.do_sample else []
        chosen = self.choose(scores, steps, tree, [range(-1, tree.nodes)] * tree.batch)
        guessed, chosen_tokens = tree.tokens.tolist(), chosen.tolist()
        verdict = VerificationResult([None] * tree.batch, [[] for _ in range(tree.batch)], [0] * tree.batch)
        for row in range(tree.batch):
            if not active[row]:
                continue
            path, tokens = accepted_path(guessed[row], tree.parents[row], chosen_tokens[row])
            emitted = self.sequences.extend(row, tokens)
            verdict.paths[row], verdict.tokens[row] = path[: emitted - 1], tokens[:emitted]
            verdict.accepted[row] = min(len(path), emitted)
        if self.keep_scores:
            verdict.scores = _along(scores, verdict)
            verdict.logits = _along(logits, verdict)
        return verdict

    def _steps(self, tree: DraftTree, active: Sequence[bool]) -> list[list[int]]:
        """Which generated token each node decides; rows that take no part are given steps that somebody else has."""
        lengths = [len(tokens) for tokens in self.sequences.generated]
        earliest = min(length for length, is_active in zip(lengths, active, strict=True) if is_active)
        return [
            [(length if is_active else earliest) + depth for depth in tree.depths(row)]
            for row, (length, is_active) in enumerate(zip(lengths, active, strict=True))
        ]


class _ColumnWalk:
    """Verification where processors read the text: down the accepted paths, one generated column after the other.

    Rows may start at different columns. A column is decided once for all rows that have reached it.
    """

    def __init__(self, verifier: Verifier, tree: DraftTree, logits: torch.Tensor, active: Sequence[bool]):
        self._verifier, self._sequences = verifier, verifier.sequences
        self._tree, self._guessed, self._logits = tree, tree.tokens.tolist(), logits
        self._node = [-1] * tree.batch
        self._walking = [row for row in range(tree.batch) if active[row]]
        self._verdict = VerificationResult(
            [[] if is_active else None for is_active in active], [[] for _ in active], [0] * tree.batch
        )
        if verifier.keep_scores:
            self._verdict.scores = [[] for _ in active]
            self._verdict.logits = [[] for _ in active]

    def run(self) -> VerificationResult:
        """Walk until every row has made a pick that its draft did not foresee."""
        rows = torch.arange(self._tree.batch, device=self._logits.device)
        while self._walking:
            step = min(len(self._sequences.generated[row]) for row in self._walking)
            members = [row for row in self._walking if len(self._sequences.generated[row]) == step]
            nodes = torch.tensor([node + 1 for node in self._node], device=rows.device)
            logits = self._logits[rows, nodes]  # [batch, vocab]
            scores = self._verifier.scorer.column(step, logits)
            chosen = self._choose(scores, step)
            on_draft = [self._take(row, chosen[row], scores, logits) for row in members]
            if self._verifier.scorer.lockstep and not all(on_draft):
                break
        for row, path in enumerate(self._verdict.paths):
            if path:
                del path[len(self._verdict.tokens[row]) - 1 :]
        return self._verdict

    def _choose(self, scores: torch.Tensor, step: int) -> list[int]:
        steps, nodes = [[step]] * len(scores), [[node] for node in self._node]
        return self._verifier.choose(scores[:, None], steps, self._tree, nodes)[:, 0].tolist()

    def _take(self, row: int, token: int, scores: torch.Tensor, logits: torch.Tensor) -> bool:
        """Emit a token; True if the row stays in step with its draft, or has come to its end."""
        self._sequences.extend(row, [token])
        self._verdict.tokens[row].append(token)
        if self._verifier.keep_scores:
            self._verdict.scores[row].append(scores[row])
            self._verdict.logits[row].append(logits[row])
        parents, guessed, node = self._tree.parents[row], self._guessed[row], self._node[row]
        child = next((i for i, parent in enumerate(parents) if parent == node and guessed[i] == token), None)
        ended = self._sequences.rests(row)
        self._verdict.accepted[row] += child is not None
        if child is None or ended:
            self._walking.remove(row)
            return ended
        self._node[row] = child
        path = self._verdict.paths[row]
        assert path is not None
        path.append(child)
        return True


def _along(values: torch.Tensor, verdict: VerificationResult) -> list[list[torch.Tensor]]:
    """`[batch, 1 + nodes, vocab]` read along each row's emitted tokens."""
    picked: list[list[torch.Tensor]] = []
    for row, path in enumerate(verdict.paths):
        nodes = [] if path is None else [0, *(node + 1 for node in path)]
        picked.append([values[row, node] for node in nodes])
    return picked
