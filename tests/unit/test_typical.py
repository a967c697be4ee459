"""Typical acceptance is lossy; it accepts by its rule, and when greedy never less than exact verification."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList

from hf_specgen import DraftTree, VerificationResult, Verifier
from hf_specgen.tree import Parents
from hf_specgen.verification import CoupledVerifier, TypicalVerifier
from tests.helpers import RowWiseIdentity
from tests.helpers.goodness_of_fit import FIRST, VOCAB, emitted_by_choose, p_values, target_logits, verify_once, warped
from tests.helpers.reference import any_parents

# Three plausible siblings; the second leads two tokens further, the third three, of which the last is implausible:
#
#   row ─┬─ 0 (token 1)
#        ├─ 1 (token 2) ── 3 (token 1) ── 4 (token 2)
#        └─ 2 (token 3) ── 5 (token 1) ── 6 (token 2) ── 7 (token 9)
BRANCHES: Parents = (-1, -1, -1, 1, 3, 2, 5, 6)
TOKENS = [[1, 2, 3, 1, 2, 1, 2, 9]]


def plausible_logits(tokens: list[int]) -> torch.Tensor:
    """`[1, 9, 16]`: everywhere, only these tokens are likely."""
    logits = torch.full((1, 9, VOCAB), -30.0)
    logits[..., tokens] = torch.tensor([0.2, 0.1, 0.0])
    return logits


def verify(verifier: Verifier, tree: DraftTree, logits: torch.Tensor, walk: bool = False) -> VerificationResult:
    """One greedy step; column by column if `walk`."""
    processors = LogitsProcessorList([RowWiseIdentity()] if walk else [])
    return verify_once(verifier, tree, logits, processors, do_sample=False)


def test_threshold_is_that_of_the_paper() -> None:
    """min(epsilon, alpha * exp(-entropy)), also where a processor has removed tokens (p = 0)."""
    rows = [[0.25, 0.25, 0.5, 0.0], [1.0, 0.0, 0.0, 0.0], [0.97, 0.01, 0.01, 0.01], [0.25] * 4]
    expected = []
    for p in rows:
        entropy = -sum(x * math.log(x) for x in p if x > 0)
        expected.append(min(0.2, 0.4 * math.exp(-entropy)))
    got = TypicalVerifier(epsilon=0.2, alpha=0.4).threshold(torch.tensor(rows))
    assert got.tolist() == pytest.approx(expected, rel=1e-5)  # float32


def test_typical_verify_takes_the_branch_with_the_longest_accepted_path() -> None:
    """Would catch: the first plausible sibling taken; depth counted by drafted instead of accepted nodes."""
    result = verify(TypicalVerifier(), DraftTree(torch.tensor(TOKENS), (BRANCHES,)), plausible_logits([1, 2, 3]))
    assert result.paths == [[1, 3, 4]]  # as deep as the third branch, and before it
    assert result.tokens == [[2, 1, 2, 1]]


def test_typical_verify_takes_the_third_branch_where_the_second_is_rejected() -> None:
    tree = DraftTree(torch.tensor([[1, 2, 3, 1, 9, 1, 2, 9]]), (BRANCHES,))
    assert verify(TypicalVerifier(), tree, plausible_logits([1, 2, 3])).paths == [[2, 5, 6]]


def test_typical_column_walk_takes_the_deepest_drafted_branch() -> None:
    """Column by column nothing is known of deeper nodes; the accepted tokens still follow the rule."""
    tree = DraftTree(torch.tensor(TOKENS), (BRANCHES,))
    result = verify(TypicalVerifier(), tree, plausible_logits([1, 2, 3]), walk=True)
    assert result.paths == [[2, 5, 6]] and result.tokens == [[3, 1, 2, 1]]


@pytest.mark.parametrize("walk", [False, True], ids=["at-once", "column-walk"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_typical_greedy_accepts_at_least_as_much_as_exact(walk: bool, data: st.DataObject) -> None:
    """exp(-entropy) never exceeds the largest probability, so the most likely token is always accepted."""
    parents = [data.draw(any_parents(st.integers(0, 7))) for _ in range(2)]
    nodes = max(map(len, parents))
    numbers = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    logits = 3 * torch.randn(2, 1 + nodes, 4, generator=numbers)
    tree = DraftTree(torch.randint(4, (2, nodes), generator=numbers), tuple(parents))
    exact, typical = verify(CoupledVerifier(), tree, logits), verify(TypicalVerifier(), tree, logits, walk)
    for row in range(2):
        if walk:  # the first token is decided without knowing what comes after it
            assert bool(typical.accepted[row]) >= bool(exact.accepted[row])
        else:
            assert typical.accepted[row] >= exact.accepted[row]


def test_typical_token_after_a_rejected_one_is_sampled_from_p() -> None:
    """Would catch: noise shared between slots.

    It would show at the second position, after a token that was rejected but sampled all the same. 1e-5 as in
    test_rejection.py.
    """

    def unlikely(trials: int, parents: Parents) -> tuple[torch.Tensor, None]:
        return warped(target_logits())[FIRST].argsort()[VOCAB - 12].expand(trials, 1).clone(), None

    texts = emitted_by_choose(TypicalVerifier(epsilon=1.0, alpha=1.0), unlikely, (-1,), 50_000)
    assert 500 < int((texts[:, 1] >= 0).sum()) < 5_000
    assert min(p_values(texts)) > 1e-5
