"""Medusa: the tokens of plain `generate` with any heads and any tree size, and logits of the right states and paths.

Every architecture is tried in `tests/slow/test_architectures.py`.
"""

from typing import Any

import pytest
import torch

from hf_specgen import FixedDepth, LayerSkipCandidates, MedusaCandidates
from hf_specgen.grown_tree import GrownTree
from hf_specgen.heads import MedusaConfig, MedusaHeads
from hf_specgen.heads.medusa import MedusaRunner
from tests.helpers import assert_same_tokens, fresh_model, prompts, tiny_model
from tests.helpers.goodness_of_fit import fit_of_two_tokens
from tests.helpers.medusa import fitted_heads, hidden_states, random_heads
from tests.helpers.models import small_llama

HYDRA = {"reads_token": True, "reads_path": True}


@pytest.mark.parametrize("heads", [1, 3])
def test_medusa_vocabulary_smaller_than_the_ranks_same_tokens(heads: int) -> None:
    """Would catch: a rank that reaches into the next head's tokens."""
    model = tiny_model("llama", vocab_size=6)
    inputs = {"input_ids": torch.tensor([[1, 2, 3, 4]])}
    candidates = MedusaCandidates(random_heads(model, num_heads=heads), tree=20)
    assert_same_tokens(model, inputs, candidates, max_new_tokens=12)


def test_medusa_rejection_sampling_has_the_distribution_of_the_target() -> None:
    """6,000 texts; fails by chance once in 1,000 runs of another seed.

    Would catch siblings that are verified as sampled one after the other although they were not, and a q that is not
    the distribution they were sampled from.
    """
    target = small_llama(8, 5)
    candidates = MedusaCandidates(random_heads(target, own_outputs=True), tree=6)
    assert fit_of_two_tokens(target, torch.tensor([[3, 1, 7, 4]]), candidates, calls=12) > 1e-3


def test_medusa_and_hydra_logits_are_those_of_each_rows_state_and_each_nodes_path(monkeypatch: Any) -> None:
    """Every result against the head for one node alone, with the state of a pass over the whole text."""
    model, inputs = tiny_model("llama"), prompts(3)
    texts: list[list[int]] = []
    paths: list[list[list[int]]] = [[], [], []]
    compared = 0

    def expected(runner: Any, row: int, path: list[int]) -> torch.Tensor:
        nonlocal compared
        compared += 1
        ids = torch.cat([inputs["input_ids"][row], torch.tensor(texts[row])])[None]
        mask = torch.cat([inputs["attention_mask"][row], torch.ones(len(texts[row]), dtype=torch.long)])[None]
        heads, tokens = runner.bound.head, model.get_input_embeddings()(torch.tensor([texts[row][-1], *path]))
        return heads.lm_heads[len(path)](heads.head_state(len(path), hidden_states(model, ids, mask)[0, -2], tokens))

    class Checked(MedusaRunner):
        def first_logits(self, states: torch.Tensor, pending: Any) -> torch.Tensor:
            logits = super().first_logits(states, pending)
            texts[:] = [list(text) for text in sessions[-1].call.state.generated]
            for row in range(3):
                torch.testing.assert_close(logits[row], expected(self, row, []), atol=1e-4, rtol=1e-4)
            return logits

        def next_logits(self, tree: GrownTree) -> torch.Tensor:
            logits = super().next_logits(tree)
            pairs = zip(tree.above.tolist(), tree.tokens.tolist(), strict=True)
            before = paths[:] if tree.level > 1 else [[[]]] * 3
            for row, pair in enumerate(pairs):
                paths[row] = [[*before[row][at], token] for at, token in zip(*pair, strict=True)]
                for index, path in enumerate(paths[row]):
                    torch.testing.assert_close(logits[row, index], expected(self, row, path), atol=1e-4, rtol=1e-4)
            return logits

        def all_logits(self, states: torch.Tensor, pending: Any, heads: int) -> torch.Tensor:
            logits = super().all_logits(states, pending, heads)
            texts[:] = [list(text) for text in sessions[-1].call.state.generated]
            for row in range(3):
                for head in range(heads):
                    own = expected(self, row, [0] * head)
                    torch.testing.assert_close(logits[row, head], own, atol=1e-4, rtol=1e-4)
            return logits

    sessions: list[Any] = []
    start = MedusaCandidates.start
    monkeypatch.setattr(MedusaCandidates, "start", lambda *args: sessions.append(start(*args)) or sessions[-1])
    monkeypatch.setattr("hf_specgen.candidates.draft_heads.MedusaRunner", Checked)
    for heads in (fitted_heads(model, inputs), random_heads(model, own_outputs=True, **HYDRA)):
        candidates = MedusaCandidates(heads, tree=10, policy=FixedDepth())
        compared = 0
        assert_same_tokens(model, inputs, candidates, max_new_tokens=12)
        assert compared > 20


def test_new_heads_return_the_state_of_the_target() -> None:
    model = tiny_model("llama")
    heads = MedusaHeads.from_target(model, num_heads=3, num_layers=2, reads_token=True)
    state = torch.randn(5, 64)
    path = torch.randn(5, 1, 64)
    assert all(torch.equal(heads.head_state(head, state, path), state) for head in range(3))


def test_medusa_target_in_changing_dtypes_leaves_the_given_heads_unchanged() -> None:
    """The heads follow the dtype of their target from call to call; the caller's own are not rounded."""
    model = fresh_model("llama")
    heads = random_heads(model)
    before = {name: tensor.clone() for name, tensor in heads.state_dict().items()}
    candidates = MedusaCandidates(heads)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        model.to(dtype)
        model.generate(**prompts(1), max_new_tokens=4, candidate_generator=candidates)
    assert all(torch.equal(before[name], tensor) for name, tensor in heads.state_dict().items())


def test_profile_keys_of_loaded_modules_differ_by_object() -> None:
    """Would catch: the acceptance of one set of heads, or of one exit adapter, remembered for another."""
    model = tiny_model("llama")
    first, second = random_heads(model), random_heads(model)
    assert MedusaCandidates(first).profile_key() != MedusaCandidates(second).profile_key()
    assert MedusaCandidates(first).profile_key() == MedusaCandidates(first).profile_key()
    adapters = torch.nn.Identity(), torch.nn.Identity()
    keys = {LayerSkipCandidates(1, adapter=adapter).profile_key() for adapter in (*adapters, adapters[0])}
    assert len(keys) == 2


def test_medusa_wrong_uses_raise() -> None:
    heads, sizes = random_heads(tiny_model("llama")), {"target_hidden_size": 8, "num_aux_hidden_states": 1}
    with pytest.raises(ValueError, match="works with generate"):
        MedusaCandidates(heads).get_candidates(torch.tensor([[1, 2]]))
    with pytest.raises(ValueError, match=r"tree must be \"auto\", a positive number of nodes, or None, got \[\[0\]\]"):
        MedusaCandidates(heads, tree=[[0]])  # type: ignore[arg-type]
    config = MedusaConfig(hidden_size=8, vocab_size=9, draft_vocab_size=9, num_heads=2, **sizes, **HYDRA)
    with pytest.raises(ValueError, match="head 1 reads 2 tokens"):
        MedusaHeads(config).head_state(1, torch.zeros(1, 8), torch.zeros(1, 1, 8))
