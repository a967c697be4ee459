"""Medusa: the tokens of plain `generate` with any heads and any tree size, and logits of the right states and paths.

Every architecture is tried in `tests/slow/test_architectures.py`.
"""

from typing import Any

import pytest
import torch
from transformers import TopKLogitsWarper

from hf_specgen import FixedDepth, LayerSkipCandidates, MedusaCandidates
from hf_specgen.grown_tree import GrownTree
from hf_specgen.heads import MedusaConfig, MedusaHeads
from hf_specgen.heads.medusa import MedusaRunner
from tests.helpers import SAMPLING, assert_same_tokens, fresh_model, prompts, tiny_model
from tests.helpers.goodness_of_fit import goodness_of_fit
from tests.helpers.medusa import fitted_heads, hidden_states, random_heads

HYDRA = {"reads_token": True, "reads_path": True}
SIZES: dict[str, dict[str, Any]] = {"auto": {"tree": "auto"}, "tree": {"tree": 12}, "chain": {"k": 2}}


def hydra_heads(model: Any, inputs: dict[str, torch.Tensor], **sampling: Any) -> MedusaHeads:
    """Heads that often predict the output for these inputs, and depend on the path a little."""
    fitted, generator = fitted_heads(model, inputs, **sampling), torch.Generator().manual_seed(3)
    heads = MedusaHeads.from_target(model, num_heads=3, own_outputs=True, **HYDRA)
    heads.load_state_dict(fitted.state_dict(), strict=False)
    with torch.no_grad():
        for matrix in heads.token_maps:
            matrix.weight += 0.01 * torch.randn(matrix.weight.shape, generator=generator)
    return heads.eval()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("build", [fitted_heads, hydra_heads], ids=["Medusa", "Hydra"])
def test_medusa_any_tree_same_tokens(build: Any, size: str, batch: int, sampling: str) -> None:
    """Would catch: a hidden state of a wrong row or node, a tree with misplaced nodes."""
    model, inputs = tiny_model("llama"), prompts(batch)
    heads = build(model, inputs, **SAMPLING[sampling])
    candidates = MedusaCandidates(heads, policy=FixedDepth(), **SIZES[size])
    statistics = assert_same_tokens(model, inputs, candidates, max_new_tokens=28, **SAMPLING[sampling])
    assert statistics.accepted > 0
    assert max(step.depth for step in statistics.rows[0]) == (2 if size == "chain" else 3)


@pytest.mark.parametrize("heads", [1, 3])
def test_medusa_vocabulary_smaller_than_the_ranks_same_tokens(heads: int) -> None:
    """Would catch: a rank that reaches into the next head's tokens."""
    model = tiny_model("llama", vocab_size=6)
    inputs = {"input_ids": torch.tensor([[1, 2, 3, 4]])}
    candidates = MedusaCandidates(random_heads(model, num_heads=heads), tree=20)
    assert_same_tokens(model, inputs, candidates, max_new_tokens=12)


def test_medusa_rejection_sampling_has_the_distribution_of_the_target() -> None:
    """Goodness of fit of the second and third token together, 8,000 texts; fails by chance once in 10,000 runs.

    Would catch siblings that are verified as sampled one after the other although they were not, and a q that is not
    the distribution they were sampled from.
    """
    vocab, rows = 8, 500
    model = fresh_model("llama", vocab_size=vocab)
    model.lm_head.weight.data.normal_(generator=torch.Generator().manual_seed(5)).mul_(0.25)
    candidates = MedusaCandidates(random_heads(model, own_outputs=True), tree=6)
    prompt = torch.tensor([[3, 1, 7, 4]])
    texts = []
    for seed in range(16):
        torch.manual_seed(seed)
        arguments = {"max_new_tokens": 3, "do_sample": True, "top_k": 6, "verification": "rejection"}
        ids = model.generate(prompt.expand(rows, -1), candidate_generator=candidates, **arguments)
        texts.append(ids[:, -3:])
    assert candidates.speculation is not None and candidates.speculation.accepted > 0
    seen = torch.cat(texts)
    counts = (seen[:, 1] * vocab + seen[:, 2]).bincount(minlength=vocab**2).double()
    expected = len(seen) * joint_probabilities(model, prompt, top_k=6)
    assert goodness_of_fit(counts.numpy()[None], expected.numpy()[None]) > 1e-4


def joint_probabilities(model: Any, prompt: torch.Tensor, top_k: int) -> torch.Tensor:
    """`[vocab * vocab]` exact probabilities of the second and third token after the prompt."""
    vocab = model.config.vocab_size

    def following(prefixes: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits = model(prefixes).logits[:, -1]
        return TopKLogitsWarper(top_k)(prefixes, logits).double().softmax(dim=-1)

    tokens = torch.arange(vocab)
    one = torch.cat([prompt.expand(vocab, -1), tokens[:, None]], dim=1)
    two = torch.cat([one.repeat_interleave(vocab, dim=0), tokens.repeat(vocab)[:, None]], dim=1)
    first, second = following(prompt)[0], following(one)
    third = following(two).view(vocab, vocab, vocab)
    return torch.einsum("a,ab,abc->bc", first, second, third).flatten()


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
    for heads in (fitted_heads(model, inputs), hydra_heads(model, inputs)):
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
