"""A strategy that proposes the tokens of plain `generate` with an adjustable accuracy."""

from functools import partial
from typing import Any

import torch

from tests.fuzz.scripted import Nodes, Script, Scripted
from tests.helpers.models import VOCAB


class Oracle(Scripted):
    """Drafts from `[batch, generated]` tokens of plain `generate`, each of which is right with probability `accuracy`.

    `branching` adds a wrong sibling before every node, so that the accepted path is never the leftmost one and its keys
    and values have to be moved.
    """

    def __init__(self, answers: torch.Tensor, accuracy: float, k: int = 4, branching: bool = False, policy: Any = None):
        super().__init__(self._script, k, policy)
        self.answers, self.accuracy, self.branching = answers.tolist(), accuracy, branching

    def _script(self) -> Script:
        random = torch.Generator().manual_seed(3)

        def propose(row: int, generated: list[int], depth: int) -> Nodes:
            tokens, parents, parent = list[int](), list[int](), -1
            for answer in self.answers[row][len(generated) :][: min(self.k, depth)]:
                right = float(torch.rand((), generator=random)) < self.accuracy
                level = [(answer + 1) % VOCAB] if self.branching else []
                level.append(answer if right else (answer + 2) % VOCAB)
                tokens += level
                parents += [parent] * len(level)
                parent = len(tokens) - 1
            return tokens, tuple(parents)

        return propose


ORACLES: dict[str, Any] = {
    "always": partial(Oracle, accuracy=1.0),
    "sometimes": partial(Oracle, accuracy=0.6),
    "never": partial(Oracle, accuracy=0.0),
    "tree": partial(Oracle, accuracy=0.7, branching=True),
}
"""Oracles of every accuracy."""
