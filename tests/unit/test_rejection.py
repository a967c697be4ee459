"""Promise 3: rejection sampling keeps the target's distribution, and a draft that lies about q is noticed."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList

from hf_specgen import DraftTree
from hf_specgen.state import GenerationState
from hf_specgen.tree import Parents, children
from hf_specgen.verification import RejectionVerifier, rejection
from hf_specgen.verification.processors import LogitsPipeline
from tests import goodness, reference_rejection
from tests.goodness import VOCAB, emitted, p_values, previous_tokens, processed, target_logits
from tests.helpers import RowWisePrefixReader

TRIALS = 200_000
CHAIN: Parents = (-1, 0, 1)
TREE: Parents = (-1, -1, -1, 0, 0, 1)  # three guesses; the first is continued twice, the second once
SIBLINGS: Parents = (-1, -1)

FAIR = 1e-5
"""A right verifier falls below this p-value once in 1e5 positions. The seeds are fixed, so a pass stays a pass; with
some 20 positions, the chance that a change of the random numbers asks for another seed is 2e-4."""
CAUGHT = 1e-12
"""A wrong one has to fall below this at some position."""


def drawn(trials: int, parents: Parents) -> tuple[torch.Tensor, torch.Tensor]:
    """An honest draft: the negated logits, processed; elder siblings taken out before the next one is drawn."""
    own = torch.Generator().manual_seed(2)
    tokens, q = torch.zeros(trials, len(parents), dtype=torch.long), torch.zeros(trials, len(parents), VOCAB)
    table = processed(-target_logits())
    for node, parent in enumerate(parents):
        q[:, node] = table[previous_tokens(tokens, parents, node)]
        elder = [other for other in range(node) if parents[other] == parent]
        left = q[:, node].scatter(1, tokens[:, elder], 0.0)
        tokens[:, node] = torch.multinomial(left, 1, generator=own)[:, 0]
    return tokens, q


def not_drawn(trials: int, parents: Parents) -> tuple[torch.Tensor, None]:
    """The target's third favourite, then its fourth and so on: nothing is left to chance."""
    tokens = torch.zeros(trials, len(parents), dtype=torch.long)
    favourites = target_logits().argsort(dim=1, descending=True)
    for node, parent in enumerate(parents):
        tokens[:, node] = favourites[previous_tokens(tokens, parents, node), 2 + parents[:node].count(parent)]
    return tokens, None


def mixed(trials: int, parents: Parents) -> tuple[torch.Tensor, torch.Tensor]:
    """The root's last child is the smallest token that its siblings left, and has zeros for its q."""
    tokens, q = drawn(trials, parents)
    *elder, last = children(parents)[0]
    tokens[:, last] = torch.ones(trials, VOCAB).scatter(1, tokens[:, elder], 0.0).argmax(dim=1)
    q[:, last] = 0
    return tokens, q


def misreported(trials: int, parents: Parents) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws after temperature and top-k, but reports what it had before them."""
    tokens, q = drawn(trials, parents)
    for node in range(len(parents)):
        q[:, node] = (-target_logits()).softmax(dim=-1)[previous_tokens(tokens, parents, node)]
    return tokens, q


@pytest.mark.parametrize(("draw", "parents"), [(drawn, CHAIN), (drawn, TREE), (not_drawn, TREE), (mixed, SIBLINGS)])
def test_every_position_has_the_distribution_of_the_target(draw: goodness.Draw, parents: Parents) -> None:
    """Would catch: any error in acceptance, residual, siblings or bonus token."""
    texts = emitted(RejectionVerifier(), draw, parents, TRIALS)
    assert (texts[:, 1] >= 0).float().mean() > 0.1  # accepted at least one guess
    assert min(p_values(texts)) > FAIR


@pytest.mark.parametrize("walk", [False, True])
def test_the_whole_of_verify_has_it_too(walk: bool) -> None:
    """Would catch: slots of the column walk taken for those of the whole tree. Row by row, so fewer trials."""

    class Nothing(RowWisePrefixReader):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores

    processors = LogitsProcessorList([*goodness.warpers(), *([Nothing()] if walk else [])])
    texts = goodness.emitted_by_verify(RejectionVerifier(), drawn, TREE, 20_000, processors)
    assert min(p_values(texts)) > FAIR


def test_acceptance_is_the_overlap_of_p_and_q() -> None:
    """alpha = sum_v min(p_v, q_v) (Leviathan et al., theorem 3.5); 5 sigma of 200,000 trials is below 0.006."""
    p, q = (processed(sign * target_logits())[goodness.FIRST] for sign in (1, -1))
    texts = emitted(RejectionVerifier(), drawn, (-1,), TRIALS)
    accepted = (texts[:, 1] >= 0).float().mean()
    assert float(accepted) == pytest.approx(float(torch.minimum(p, q).sum()), abs=0.006)


def test_a_misreported_q_is_caught() -> None:
    """The fit has power: q is the distribution before the draft's processors."""
    assert min(p_values(emitted(RejectionVerifier(), misreported, CHAIN, TRIALS))) < CAUGHT


def test_shared_random_numbers_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fit has power: the draft wins the very race that the residual is drawn by."""
    noise = torch.empty(TRIALS, 1, VOCAB).exponential_()

    def racing(trials: int, parents: Parents) -> tuple[torch.Tensor, torch.Tensor]:
        q = processed(-target_logits())[goodness.FIRST].expand(trials, 1, VOCAB)
        return (q / noise).argmax(dim=-1), q

    assert min(p_values(emitted(RejectionVerifier(), racing, (-1,), TRIALS)[:, :1])) > FAIR
    monkeypatch.setattr(rejection, "exponential", lambda *_: noise)
    assert min(p_values(emitted(RejectionVerifier(), racing, (-1,), TRIALS)[:, :1])) < CAUGHT


def test_a_residual_that_siblings_do_not_update_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fit has power: every sibling is judged as if it were the first."""
    first: list[torch.Tensor] = []

    def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        first.append(p)
        return (first[0] - q).clamp(min=0)

    monkeypatch.setattr(rejection, "residual", residual)
    assert min(p_values(emitted(RejectionVerifier(), drawn, SIBLINGS, TRIALS))) < CAUGHT


def test_a_q_that_keeps_drawn_siblings_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fit has power: siblings drawn without replacement, judged as if the drawn ones had been put back."""
    right = rejection.draft_distribution

    def kept(q: torch.Tensor, node: torch.Tensor, token: torch.Tensor, elder: torch.Tensor, p: torch.Tensor):
        return right(q, node, token, elder[..., :0], p)

    monkeypatch.setattr(rejection, "draft_distribution", kept)
    assert min(p_values(emitted(RejectionVerifier(), drawn, SIBLINGS, TRIALS))) < CAUGHT


def test_agrees_with_the_reference() -> None:
    """Same uniforms, same decisions and residuals: 300 slots of 0 to 3 siblings. 1e-4: float32 against double."""
    random = torch.Generator().manual_seed(4)
    tokens, q = drawn(300, (-1, -1, -1))
    q[::5, 1] = 0
    p = processed(target_logits())[torch.randint(VOCAB, (300, 1), generator=random)]
    uniforms = torch.rand(300, 1, 3, generator=random)
    table = torch.arange(3).repeat(300, 1, 1)
    for row in range(300):
        table[row, 0, row % 4 :] = -1
    guessed = torch.where(table >= 0, tokens[:, None], -1)
    accepted, rest = rejection.judge(p, q, table, guessed, uniforms)
    for row in range(300):
        guesses = [(int(t), d.tolist() if d.any() else None) for t, d in zip(tokens[row], q[row], strict=True)]
        token, left = reference_rejection.judge(p[row, 0].tolist(), guesses[: row % 4], uniforms[row, 0, : row % 4])
        assert int(accepted[row, 0]) == token
        if token < 0:
            assert rest[row, 0].tolist() == pytest.approx(left, abs=1e-4)
    assert 20 < int((accepted >= 0).sum()) < 280


def test_a_draft_that_equals_the_target_is_always_accepted() -> None:
    """Would catch: a division by the residual's mass, which is zero here, or rounding taken for a rejection."""
    p = processed(target_logits())
    tokens = torch.multinomial(p, 1)[:, :, None]
    table = torch.zeros(VOCAB, 1, 1, dtype=torch.long)
    almost_one = torch.full((VOCAB, 1, 1), 1 - 2**-24)
    accepted, rest = rejection.judge(p[:, None], p[:, None], table, tokens, almost_one)
    assert torch.equal(accepted, tokens[..., 0]) and not rest.isnan().any()


def test_the_draft_has_random_numbers_of_its_own() -> None:
    """Would catch: drafting that shifts the numbers of verification, and runs that do not repeat."""
    scores = torch.randn(3, VOCAB)
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        verifier = RejectionVerifier()
        verifier.begin(None, None, True, False)  # type: ignore[arg-type]
        state = torch.get_rng_state()
        runs.append(torch.stack([verifier.sample_draft(scores, [0] * 3) for _ in range(2000)]))
        assert torch.equal(torch.get_rng_state(), state)
        assert verifier.wants_q
    assert torch.equal(*runs)
    share = torch.stack([(runs[0] == token).float().mean(dim=0) for token in range(VOCAB)], dim=1)
    assert torch.allclose(share, scores.softmax(dim=-1), atol=0.06)  # 5 sigma of 2000 draws


def one_guess(q: torch.Tensor) -> list[int]:
    """What a verifier with 16 tokens emits for one guess, token 2."""
    sequences = GenerationState(torch.full((1, 1), goodness.FIRST), None, (), float("inf"), None)
    verifier = RejectionVerifier()
    verifier.begin(LogitsPipeline(LogitsProcessorList(), sequences), sequences, True, False)
    tree = DraftTree(torch.tensor([[2]]), ((-1,),), q)
    return verifier.verify(tree, target_logits()[None, [goodness.FIRST, 2]], [True]).tokens[0]


def test_a_q_larger_or_smaller_than_the_vocabulary() -> None:
    assert one_guess(torch.full((1, 1, 4), 0.25))
    with pytest.raises(ValueError, match="q has 17 tokens, the target has 16; cut"):
        one_guess(torch.ones(1, 1, 17))
