"""Rejection sampling has the target's distribution, and a draft that misreports its q is detected."""

import math
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessorList

from hf_specgen import DraftTree, VerificationResult, Verifier
from hf_specgen.candidates.tree_builder import TreeBuilder
from hf_specgen.tree import Parents, children
from hf_specgen.verification import ExactVerifier, RejectionVerifier, TypicalVerifier, rejection
from hf_specgen.verification.path_session import Nodes, PathSession
from tests.helpers.goodness_of_fit import (
    FIRST,
    VOCAB,
    Draw,
    emitted,
    p_values,
    previous_tokens,
    start_session,
    target_logits,
    verify_once,
    warped,
)
from tests.helpers.processors import RowWiseIdentity
from tests.helpers.reference import any_parents

TRIALS = 30_000
CHAIN: Parents = (-1, 0, 1)
TREE: Parents = (-1, -1, -1, 0, 0, 1)
"""Three siblings; the first has two children, the second one."""
SIBLINGS: Parents = (-1, -1)

PLAUSIBLE = 1e-5
"""A correct verifier has a smaller p-value at one position in 1e5. Seeds are fixed, so a pass stays a pass; with some
20 positions, the probability that a change of the random numbers requires another seed is 2e-4."""
REFUTED = 1e-12
"""An incorrect verifier must have a smaller p-value at some position."""


def sampled(trials: int, parents: Parents) -> tuple[torch.Tensor, torch.Tensor]:
    """A correct draft: from the warped negated logits, siblings without replacement."""
    return drawn(trials, parents, -target_logits())


def close(trials: int, parents: Parents) -> tuple[torch.Tensor, torch.Tensor]:
    """A correct draft whose logits are close to those of the target."""
    noise = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3))
    return drawn(trials, parents, target_logits() + 0.7 * noise)


def drawn(trials: int, parents: Parents, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A draft that is sampled from logits after each token, siblings without replacement."""
    own = torch.Generator().manual_seed(2)
    tokens, q = torch.zeros(trials, len(parents), dtype=torch.long), torch.zeros(trials, len(parents), VOCAB)
    table = warped(logits)
    for node, parent in enumerate(parents):
        q[:, node] = table[previous_tokens(tokens, parents, node)]
        earlier = [other for other in range(node) if parents[other] == parent]
        left = q[:, node].scatter(1, tokens[:, earlier], 0.0)
        tokens[:, node] = torch.multinomial(left, 1, generator=own)[:, 0]
    return tokens, q


def deterministic(trials: int, parents: Parents) -> tuple[torch.Tensor, None]:
    """The target's third most likely token, then its fourth and so on, without q."""
    tokens = torch.zeros(trials, len(parents), dtype=torch.long)
    ranked = target_logits().argsort(dim=1, descending=True)
    for node, parent in enumerate(parents):
        tokens[:, node] = ranked[previous_tokens(tokens, parents, node), 2 + parents[:node].count(parent)]
    return tokens, None


def mixed(trials: int, parents: Parents) -> tuple[torch.Tensor, torch.Tensor]:
    """The root's last child is deterministic: the smallest token that its siblings do not have, with q all zeros."""
    tokens, q = sampled(trials, parents)
    *earlier, last = children(parents)[0]
    tokens[:, last] = torch.ones(trials, VOCAB).scatter(1, tokens[:, earlier], 0.0).argmax(dim=1)
    q[:, last] = 0
    return tokens, q


def misreported(trials: int, parents: Parents) -> tuple[torch.Tensor, torch.Tensor]:
    """Sampled after temperature and top-k, but q is the distribution before them."""
    tokens, q = sampled(trials, parents)
    for node in range(len(parents)):
        q[:, node] = (-target_logits()).softmax(dim=-1)[previous_tokens(tokens, parents, node)]
    return tokens, q


WALK = RowWiseIdentity()
DRAFTS = [(sampled, CHAIN), (sampled, TREE), (close, TREE), (deterministic, TREE), (mixed, SIBLINGS)]


@pytest.mark.parametrize(("draw", "parents", "walks"), [*((*case, ()) for case in DRAFTS), (sampled, TREE, (WALK,))])
def test_rejection_every_position_has_the_distribution_of_the_target(draw: Draw, parents: Any, walks: Any) -> None:
    """Would catch: an error in the acceptance test, residual, siblings, bonus token, or queries of single positions."""
    texts = emitted(RejectionVerifier(), draw, parents, TRIALS // (2 if walks else 1), *walks)
    assert (texts[:, 1] >= 0).float().mean() > 0.1  # accepted at least one draft token
    assert min(p_values(texts)) > PLAUSIBLE


def test_goodness_of_fit_misreported_q_is_detected() -> None:
    """The test has power: q is the distribution before the draft's processors."""
    assert min(p_values(emitted(RejectionVerifier(), misreported, CHAIN, TRIALS))) < REFUTED


def test_goodness_of_fit_noise_shared_by_draft_and_residual_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test has power: the draft token is the argmax under the noise that the residual is sampled with."""
    noise = torch.empty(TRIALS, 1, VOCAB).exponential_()

    def draw(trials: int, parents: Parents) -> tuple[torch.Tensor, torch.Tensor]:
        q = warped(-target_logits())[FIRST].expand(trials, 1, VOCAB)
        return (q / noise).argmax(dim=-1), q

    assert min(p_values(emitted(RejectionVerifier(), draw, (-1,), TRIALS)[:, :1])) > PLAUSIBLE
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda tensor, **_: tensor.copy_(noise.view(tensor.shape)))
    assert min(p_values(emitted(RejectionVerifier(), draw, (-1,), TRIALS)[:, :1])) < REFUTED


@pytest.mark.parametrize(("draw", "parents"), DRAFTS)
def test_path_weights_agree_with_the_reference(draw: Draw, parents: Parents) -> None:
    """Rows of different lengths, and a target that differs from node to node. 1e-4: float32 against double."""
    trials, random = 60, torch.Generator().manual_seed(5)
    tokens, q = draw(trials, parents)
    p = warped(target_logits())[torch.randint(VOCAB, (trials, 1 + len(parents)), generator=random)]
    lengths = torch.randint(len(parents) + 1, (trials, 1), generator=random)
    padded = (torch.tensor(parents) + 1).expand(trials, -1)
    weights, rest = rejection.path_weights(p, q, tokens, padded, torch.arange(len(parents)) < lengths)
    for row, length in enumerate(lengths[:, 0].tolist()):
        given = [None if q is None or not q[row, node].any() else q[row, node].tolist() for node in range(length)]
        expected, left = reference_path_weights(p[row].tolist(), given, tokens[row, :length].tolist(), parents[:length])
        assert weights[row].tolist() == pytest.approx([*expected, *[0] * (len(parents) - length)], abs=1e-4)
        for query in range(1 + length):
            assert rest[row, query].tolist() == pytest.approx(left[query], abs=1e-4)


@pytest.mark.parametrize(("parents", "least"), [(CHAIN, 1.03), (TREE, 1.008)])
def test_rejection_paths_accept_more_than_tokens_one_by_one(parents: Parents, least: float) -> None:
    """The same drafts, verified position by position; the tree is two tokens deep: 1.013."""
    tokens = []
    for walks in ((), (WALK,)):
        texts = emitted(RejectionVerifier(), close, parents, 6_000, *walks)
        tokens.append(float((texts >= 0).sum()))
    assert tokens[0] > least * tokens[1]


@pytest.mark.parametrize(
    "verifier", [RejectionVerifier(), TypicalVerifier(epsilon=1e-6, alpha=1e-6)], ids=["p/q", "typical"]
)
@given(data=st.data())
def test_accepted_path_has_no_padding(verifier: Verifier, data: st.DataObject) -> None:
    """`PathSession.choose` takes every node above the accepted one; rows differ in length, some tokens are unknown."""
    parents = [data.draw(any_parents(st.integers(0, 7))) for _ in range(3)]
    nodes = max(map(len, parents))
    numbers = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    tokens = torch.randint(-1, 8, (3, nodes), generator=numbers)
    tree = DraftTree(tokens.clamp(min=0), tuple(parents))
    drafted = Nodes.of_tree(tree, tokens.device)
    drafted = drafted._replace(are_real=drafted.are_real & (tokens >= 0))
    scores = torch.randn(3, 1 + nodes, 8, generator=numbers)
    last, _ = cast(PathSession, start_session(verifier, 3)).accept(scores, tree, drafted)
    on_path = tree.structure().ancestors[torch.arange(3), last][:, 1:]
    assert not bool((on_path & ~drafted.are_real).any())


def test_path_weights_q_equal_to_p_accepts_always() -> None:
    """Would catch: a division by the mass of the residual, which is zero here; rounding taken for a rejection."""
    p = warped(target_logits())
    tokens, parents = torch.multinomial(p, 1), torch.zeros(VOCAB, 1, dtype=torch.long)
    weights, rest = rejection.path_weights(p[:, None].repeat(1, 2, 1), p[:, None], tokens, parents, tokens >= 0)
    assert bool((weights[:, 1] > 1 - 1e-6).all()) and not rest.isnan().any()


def test_rejection_has_float32_whatever_the_default_dtype_is() -> None:
    """Would catch: acceptance by random numbers of 8 bits after `torch.set_default_dtype(torch.bfloat16)`."""
    tree, logits = DraftTree(torch.tensor([[2, 5, 7]]), (CHAIN,)), target_logits()[None, [FIRST, 2, 5, 7]]
    runs = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            torch.manual_seed(3)
            runs.append([verify_once(RejectionVerifier(), tree, logits).tokens for _ in range(200)])
        finally:
            torch.set_default_dtype(torch.float32)
    assert runs[0] == runs[1]


def test_draft_scores_have_their_own_random_numbers_and_repeats() -> None:
    """Would catch: drafting that changes the random numbers of verification, and runs that do not repeat."""
    scores = torch.randn(3, VOCAB)
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        session = start_session(RejectionVerifier(), 3)
        state = torch.get_rng_state()
        runs.append(torch.stack([session.draft_scores(scores, []).argmax(dim=-1) for _ in range(2000)]))
        assert torch.equal(torch.get_rng_state(), state)
        assert session.wants_q
    assert torch.equal(*runs)
    share = torch.stack([(runs[0] == token).float().mean(dim=0) for token in range(VOCAB)], dim=1)
    assert torch.allclose(share, scores.softmax(dim=-1), atol=0.06)  # 5 sigma of 2000 draws


def emitted_for_one_token(q: torch.Tensor) -> list[int]:
    """What a row with a vocabulary of 16 emits for one draft token, 2."""
    tree = DraftTree(torch.tensor([[2]]), ((-1,),), q)
    return verify_once(RejectionVerifier(), tree, target_logits()[None, [FIRST, 2]]).tokens[0]


def test_rejection_q_smaller_than_the_vocabulary_is_padded() -> None:
    """Would catch: an error of shapes with a draft model of fewer tokens."""
    assert emitted_for_one_token(torch.full((1, 1, 4), 0.25))


# Typical acceptance is lossy; it accepts by its rule, and when greedy never less than exact verification


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
    """One greedy step; position by position if `walk`."""
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


def test_typical_column_walk_takes_the_first_plausible_branch() -> None:
    """Position by position nothing is known of deeper nodes; the accepted tokens still follow the rule."""
    tree = DraftTree(torch.tensor([[9, 2, 3, 1, 2, 1, 2, 9]]), (BRANCHES,))
    result = verify(TypicalVerifier(), tree, plausible_logits([1, 2, 3]), walk=True)
    assert result.paths == [[1, 3, 4]] and result.tokens == [[2, 1, 2, 1]]


@pytest.mark.parametrize("walk", [False, True], ids=["at-once", "by-position"])
@given(data=st.data())
def test_typical_greedy_accepts_at_least_as_much_as_exact(walk: bool, data: st.DataObject) -> None:
    """exp(-entropy) never exceeds the largest probability, so the most likely token is always accepted.

    At once the path is the deepest one whose tokens all exceed the threshold, found here node by node.
    """
    parents = [data.draw(any_parents(st.integers(0, 7))) for _ in range(2)]
    nodes = max(map(len, parents))
    numbers = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    logits = 3 * torch.randn(2, 1 + nodes, 8, generator=numbers)
    tree = DraftTree([[row[:node].count(row[node]) for node in range(len(row))] for row in parents], tuple(parents))
    exact, typical = verify(ExactVerifier(), tree, logits), verify(TypicalVerifier(), tree, logits, walk)
    is_plausible = (p := logits.softmax(dim=-1)) > TypicalVerifier().threshold(p)[..., None]
    for row in range(2):
        paths: list[list[int]] = [[]]
        for node, (token, parent) in enumerate(zip(tree.token_lists()[row], parents[row], strict=False)):
            above = [path for path in paths if (path[-1] if path else -1) == parent]
            paths += [[*path, node] for path in above if is_plausible[row, parent + 1, token]]
        if walk:  # the first token is decided without knowing what comes after it
            assert bool(typical.accepted[row]) >= bool(exact.accepted[row])
        else:
            assert typical.paths[row] == max(paths, key=len) and typical.accepted[row] >= exact.accepted[row]


def test_typical_token_after_a_rejected_one_is_sampled_from_p() -> None:
    """Would catch: noise shared by queries, at the second position, after a token that was rejected but sampled."""

    def unlikely(trials: int, parents: Parents) -> tuple[torch.Tensor, None]:
        return warped(target_logits())[FIRST].argsort()[VOCAB - 12].expand(trials, 1).clone(), None

    texts = emitted(TypicalVerifier(epsilon=1.0, alpha=1.0), unlikely, (-1,), TRIALS)
    assert 500 < int((texts[:, 1] >= 0).sum()) < 5_000
    assert min(p_values(texts)) > 1e-5


# Rejection sampling of paths, in plain Python without tensors: written to be verified by reading

Distribution = list[float]


def normalised(weights: Sequence[float]) -> Distribution:
    """The weights divided by their sum."""
    total = sum(weights)
    return [weight / total for weight in weights]


def reference_path_weights(
    p: Sequence[Distribution], q: Sequence[Distribution | None], tokens: Sequence[int], parents: Sequence[int]
) -> tuple[list[float], list[Distribution]]:
    """Acceptance of whole paths: `rejection.path_weights` for one row, query by query from the root down.

    For each query (the row's last token, then each node) the probability that it is accepted if everything below it was
    rejected, and the distribution of the next token then.
    """
    weights, rest = [1.0] * (len(tokens) + 1), [list(values) for values in p]
    for query in range(len(tokens) + 1):
        seen: list[int] = []
        for node in (node for node, parent in enumerate(parents) if parent == query - 1):
            given, token, weight = q[node], tokens[node], weights[query]
            if given is None:
                drawn = [float(other == token) for other in range(len(rest[query]))]
            else:
                drawn = normalised([0.0 if other in seen else value for other, value in enumerate(given)])
            weights[node + 1] = min(1.0, weight * rest[query][token] / drawn[token])
            excess = [max(0.0, weight * one - other) for one, other in zip(rest[query], drawn, strict=True)]
            seen.append(token)
            weights[query] = sum(excess) / (sum(excess) + 1 - weight)
            if weights[query]:  # otherwise the query is never reached, or its child never rejected
                rest[query] = normalised(excess)
    return weights, rest


def test_tree_without_nodes_from_a_device_can_be_indexed_by() -> None:
    """Would catch: float indices of a draft whose levels were expanded, and of which no node is verified."""
    builder = TreeBuilder([2], 2, torch.tensor([[4]]))
    builder.add(torch.tensor([[[5, 6]]]), torch.tensor([[[0.6, 0.3]]]).log())
    tree, _ = builder.best_with_expanded(0, expanded_first=True)
    nodes = Nodes.of_tree(tree, torch.device("cpu"))
    assert tree.keeps_placeholders and nodes.tokens.shape == (1, 0)
    assert torch.zeros(1, 1, 9)[:, nodes.parents[0], nodes.tokens[0]].shape == (1, 0)
