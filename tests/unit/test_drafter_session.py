"""`DrafterSession` with a drafter that is one small class."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from hf_specgen.candidates.drafter_session import DrafterSession
from hf_specgen.device_tree import Frontier
from hf_specgen.drafter import Drafter
from hf_specgen.verification import VerificationResult
from tests.helpers.calls import StubModel, make_batch, make_state

VOCAB = 20


class LastTokens(NamedTuple):
    """The last token of each row."""

    tokens: torch.Tensor
    depths: Sequence[int]
    tokens_per_pass: list[int]


class NextNumberDrafter(Drafter[LastTokens]):
    """A drafter that proposes after each token the next number, and less likely the one after it."""

    def __init__(self, state: Any):
        self._state = state
        self.committed: list[Any] = []

    def take_uncached(self, max_depths: Sequence[int]) -> LastTokens | None:
        tokens = torch.tensor(self._state.pending())
        return LastTokens(tokens, max_depths, [len(tokens)]) if any(max_depths) else None

    def forward_text(self, text: LastTokens) -> torch.Tensor:
        return self._logits(text.tokens)

    def forward_nodes(self, frontier: Frontier) -> torch.Tensor:
        return self._logits(frontier.tokens)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        self.committed.append(paths)

    def _logits(self, tokens: torch.Tensor) -> torch.Tensor:
        following = torch.nn.functional.one_hot((tokens + 1) % VOCAB, VOCAB)
        return 6.0 * following + 4.0 * following.roll(1, dims=-1)


def session_of(texts: list[list[int]], **settings: Any) -> tuple[DrafterSession, NextNumberDrafter]:
    batch = make_batch(make_state(texts), model=StubModel(vocab=VOCAB))
    drafter = NextNumberDrafter(batch.state)
    return DrafterSession(batch, drafter, **settings), drafter


@pytest.mark.parametrize("depths", [[3, 3], [3, 1]])
def test_drafter_session_drafts_a_chain_with_a_pass_a_level(depths: list[int]) -> None:
    """Would catch: logits of one row added to another, drafts beyond a row's depth, passes that are not counted."""
    session, _ = session_of([[1, 2], [7]], k=3, tree=None)
    tree = session.draft(depths)
    expected = [[3, 4, 5][: depths[0]], [8, 9, 10][: depths[1]]]
    assert [
        tokens[: len(parents)] for tokens, parents in zip(tree.token_lists(), tree.parents, strict=True)
    ] == expected
    assert list(session.tokens_per_pass) == [2, *[sum(depth > 0 for depth in depths)] * 2]


def test_drafter_session_commits_accepted_nodes_by_the_order_of_their_expansion() -> None:
    """Would catch: nodes counted by their place in the tree, nodes that were never expanded, plain steps left out."""
    session, drafter = session_of([[1, 2]], k=3, tree=6)
    tree = session.draft([3])
    tokens, parents = tree.token_lists()[0], tree.parents[0]
    first = next(node for node, parent in enumerate(parents) if parent == -1 and tokens[node] == 3)
    second = next(node for node, parent in enumerate(parents) if parent == first and tokens[node] == 4)
    session.observe(VerificationResult([[first, second]], [[3, 4, 9]], [2]))
    [[numbers]] = drafter.committed
    assert numbers[0] == 0 and len(numbers) in (1, 2), "the likeliest node of level 1 is expanded first"
    assert not session.draft([0]).nodes
    session.observe(VerificationResult([[]], [[5]], [0]))
    assert drafter.committed[-1] == [[]]
