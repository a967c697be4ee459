"""A strategy that proposes the tokens of plain `generate` with an adjustable accuracy."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from hf_specgen import Call, Candidates, DraftSession, DraftTree, Policy
from hf_specgen.tree import Parents
from tests.helpers.models import VOCAB


class Oracle(Candidates):
    """Drafts from the known output: every proposal is accepted, some are, or none.

    Args:
        answers: `[batch, generated]` the tokens of plain `generate`.
        accuracy: probability that a proposed token is the right one.
        k: depth of a draft.
        branching: add a wrong sibling before every node, so that the accepted path is never the leftmost one and the
            accepted keys and values have to be moved.
        policy: as for every strategy.
    """

    def __init__(
        self,
        answers: torch.Tensor,
        accuracy: float,
        k: int = 4,
        branching: bool = False,
        *,
        policy: Policy | None = None,
    ):
        super().__init__(k, policy)
        self.answers, self.accuracy, self.branching = answers.tolist(), accuracy, branching

    def start(self, call: Call) -> DraftSession:
        return _OracleSession(self, call)


class _OracleSession(DraftSession):
    def __init__(self, oracle: Oracle, call: Call):
        super().__init__(call)
        self._oracle = oracle
        self._random = torch.Generator().manual_seed(3)

    def draft(self, budget: Sequence[int]) -> DraftTree:
        return DraftTree.from_nodes([self._row(row, depth) for row, depth in enumerate(budget)])

    def draft_at_prefill(self, budget: Sequence[int]) -> DraftTree:
        return self.draft(budget)

    def _row(self, row: int, depth: int) -> tuple[list[int], Parents]:
        done = len(self.call.state.generated[row])
        truth = self._oracle.answers[row][done : done + min(self._oracle.k, depth)]
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for answer in truth:
            right = float(torch.rand((), generator=self._random)) < self._oracle.accuracy
            if self._oracle.branching:
                tokens.append((answer + 1) % VOCAB)
                parents.append(parent)
            tokens.append(answer if right else (answer + 2) % VOCAB)
            parents.append(parent)
            parent = len(tokens) - 1
        return tokens, tuple(parents)


class FailingOracle(Oracle):
    """An `Oracle` that is always right, and raises `RuntimeError` when it is asked for another draft after `steps`."""

    def __init__(self, answers: torch.Tensor, steps: int = 2):
        super().__init__(answers, 1.0)
        self.steps = steps

    def start(self, call: Call) -> DraftSession:
        return _FailingSession(self, call)


class _FailingSession(_OracleSession):
    def __init__(self, oracle: FailingOracle, call: Call):
        super().__init__(oracle, call)
        self._left = oracle.steps

    def draft(self, budget: Sequence[int]) -> DraftTree:
        if self._left == 0:
            raise RuntimeError("the draft session failed")
        self._left -= 1
        return super().draft(budget)

    def draft_at_prefill(self, budget: Sequence[int]) -> DraftTree:
        return DraftTree.empty(len(budget))


ORACLES: dict[str, Any] = {
    "always": partial(Oracle, accuracy=1.0),
    "sometimes": partial(Oracle, accuracy=0.6),
    "never": partial(Oracle, accuracy=0.0),
    "tree": partial(Oracle, accuracy=0.7, branching=True),
}
"""Oracles of every accuracy."""
