"""Typical acceptance is lossy; what it does accept follows its rule, and it never accepts less than greedy coupling."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList

from hf_specgen import DraftTree
from hf_specgen.state import GenerationState
from hf_specgen.tree import Parents
from hf_specgen.verification import CoupledVerifier, TypicalVerifier, VerificationResult, Verifier
from hf_specgen.verification.processors import LogitsPipeline
from tests import goodness
from tests.goodness import VOCAB
from tests.helpers import RowWisePrefixReader
from tests.reference import any_parents


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epsilon": 0.0}, "epsilon must be above 0 and at most 1, got 0.0"),
        ({"epsilon": 1.5}, "epsilon must be above 0 and at most 1, got 1.5"),
        ({"alpha": -0.1}, "alpha must be above 0 and at most 1, got -0.1"),
        ({"alpha": math.nan}, "alpha must be above 0 and at most 1, got nan"),
    ],
)
def test_parameters(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TypicalVerifier(**arguments)


def test_it_is_called_lossy() -> None:
    assert (TypicalVerifier.__doc__ or "").startswith("LOSSY")


def test_the_threshold_is_that_of_the_paper() -> None:
    """min(epsilon, alpha * exp(-entropy)), also where a processor has removed tokens (p = 0)."""
    rows = [[0.25, 0.25, 0.5, 0.0], [1.0, 0.0, 0.0, 0.0], [0.97, 0.01, 0.01, 0.01], [0.25] * 4]
    expected = []
    for p in rows:
        entropy = -sum(x * math.log(x) for x in p if x > 0)
        expected.append(min(0.2, 0.4 * math.exp(-entropy)))
    got = TypicalVerifier(epsilon=0.2, alpha=0.4).threshold(torch.tensor(rows))
    assert got.tolist() == pytest.approx(expected, rel=1e-5)  # float32


def verify(
    verifier: Verifier, tree: DraftTree, logits: torch.Tensor, walk: bool = False, sampled: bool = False
) -> VerificationResult:
    sequences = GenerationState(torch.ones(tree.batch, 1, dtype=torch.long), None, (), float("inf"), None)

    class Nothing(RowWisePrefixReader):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores

    scorer = LogitsPipeline(LogitsProcessorList([Nothing()] if walk else []), sequences)
    verifier.begin(scorer, sequences, sampled, False)
    return verifier.verify(tree, logits, [True] * tree.batch)


# Three plausible guesses; the second leads two tokens on, the third three, of which the last is implausible:
#
#   row ─┬─ 0 (token 1)
#        ├─ 1 (token 2) ── 3 (token 1) ── 4 (token 2)
#        └─ 2 (token 3) ── 5 (token 1) ── 6 (token 2) ── 7 (token 9)
BRANCHES: Parents = (-1, -1, -1, 1, 3, 2, 5, 6)
TOKENS = [[1, 2, 3, 1, 2, 1, 2, 9]]


def plausible_logits(tokens: list[int]) -> torch.Tensor:
    """`[1, 9, 16]`: everywhere, only these tokens have a chance."""
    logits = torch.full((1, 9, VOCAB), -30.0)
    logits[..., tokens] = torch.tensor([0.2, 0.1, 0.0])
    return logits


def test_the_deepest_accepted_branch_is_taken() -> None:
    """Would catch: the first plausible guess taken; and depth counted by what was drafted, not by what stands."""
    verdict = verify(TypicalVerifier(), DraftTree(torch.tensor(TOKENS), (BRANCHES,)), plausible_logits([1, 2, 3]))
    assert verdict.paths == [[1, 3, 4]]  # as deep as the third branch, and before it
    assert verdict.tokens == [[2, 1, 2, 1]]
    longer = DraftTree(torch.tensor([[1, 2, 3, 1, 9, 1, 2, 9]]), (BRANCHES,))
    assert verify(TypicalVerifier(), longer, plausible_logits([1, 2, 3])).paths == [[2, 5, 6]]


def test_the_walk_takes_the_branch_that_was_drafted_deepest() -> None:
    """Column by column nothing is known of what lies below; the accepted tokens still follow the rule."""
    tree = DraftTree(torch.tensor(TOKENS), (BRANCHES,))
    verdict = verify(TypicalVerifier(), tree, plausible_logits([1, 2, 3]), walk=True)
    assert verdict.paths == [[2, 5, 6]] and verdict.tokens == [[3, 1, 2, 1]]


@pytest.mark.parametrize("walk", [False, True])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_greedy_it_goes_at_least_as_far_as_coupled(walk: bool, data: st.DataObject) -> None:
    """exp(-entropy) never exceeds the largest probability, so the favourite is always accepted."""
    parents = [data.draw(any_parents(st.integers(0, 7))) for _ in range(2)]
    nodes = max(map(len, parents))
    numbers = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    logits = 3 * torch.randn(2, 1 + nodes, 4, generator=numbers)
    tree = DraftTree(torch.randint(4, (2, nodes), generator=numbers), tuple(parents))
    coupled, typical = verify(CoupledVerifier(), tree, logits), verify(TypicalVerifier(), tree, logits, walk)
    for row in range(2):
        if walk:  # the first token is decided without knowing what comes after it
            assert bool(typical.accepted[row]) >= bool(coupled.accepted[row])
        else:
            assert typical.accepted[row] >= coupled.accepted[row]


def test_after_a_rejected_guess_the_token_is_drawn_from_p() -> None:
    """Would catch: noise shared between slots. It would show at the second position, after a guess was rejected but
    drawn all the same. p-values as in test_rejection.py."""

    def least_likely(trials: int, parents: Parents) -> tuple[torch.Tensor, None]:
        return goodness.processed(target)[goodness.FIRST].argsort()[VOCAB - 12].expand(trials, 1).clone(), None

    target = goodness.target_logits()
    texts = goodness.emitted(TypicalVerifier(epsilon=1.0, alpha=1.0), least_likely, (-1,), 200_000)
    assert 1_000 < int((texts[:, 1] >= 0).sum()) < 10_000
    assert min(goodness.p_values(texts)) > 1e-5
