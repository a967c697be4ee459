"""Medusa: the tokens of plain `generate` with any heads and any tree, and trees of the right shape.

Every architecture is tried in `tests/slow/test_architectures.py`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TopKLogitsWarper

from hf_specgen import Call, DraftSession, DraftTree, FixedDepth, LayerSkipCandidates, MedusaCandidates
from hf_specgen.candidates.medusa import HydraSession, RankTree
from hf_specgen.heads import MedusaHeads, load_medusa
from hf_specgen.heads.medusa import CONFIDENCE_EDGES, RANKS, Acceptance, MedusaConfig
from hf_specgen.targets.hidden_states import HiddenStateTarget
from hf_specgen.targets.requirements import OUTPUT_STATE
from losses import Drafts, Learnt
from tests.helpers import SAMPLING, assert_same_tokens, fresh_model, prompts, tiny_model
from tests.helpers.goodness_of_fit import goodness_of_fit
from tests.helpers.medusa import fitted_heads, hidden_states, random_heads
from train_medusa import count_acceptance

TREES: dict[str, Any] = {
    "auto": "auto",
    "budget": 12,
    "chain": [[0], [0, 0], [0, 0, 0]],
    "wide": [[rank] for rank in range(8)],
    "short leaf beside deep ones": [[1], [0], [0, 0], [0, 0, 0], [0, 1]],
    "rank above ten": [[0], [12], [12, 3], [0, 11]],
    "unsorted with duplicates": [[0, 1, 0], [0], [2], [0, 1], [0]],
}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_medusa_any_tree_same_tokens(tree: str, batch: int, sampling: str) -> None:
    """Would catch: a hidden state of a wrong row or node, a tree with misplaced nodes."""
    model, inputs = tiny_model("llama"), prompts(batch)
    heads = fitted_heads(model, inputs, **SAMPLING[sampling])
    candidates = MedusaCandidates(heads, tree=TREES[tree], policy=FixedDepth())
    statistics = assert_same_tokens(model, inputs, candidates, max_new_tokens=28, **SAMPLING[sampling])
    assert statistics.accepted > 0
    assert tree in ("auto", "chain") or statistics.accepted < statistics.drafted


def test_medusa_k_alone_is_the_chain_of_that_length() -> None:
    """Would catch: another meaning of k than that of every other strategy."""
    model, inputs = tiny_model("llama"), prompts(1)
    heads = fitted_heads(model, inputs)
    runs = [
        assert_same_tokens(model, inputs, MedusaCandidates(heads, policy=FixedDepth(), **how), max_new_tokens=20)
        for how in ({"k": 2}, {"tree": [[0], [0, 0]]})
    ]
    assert runs[0].rows == runs[1].rows and max(step.depth for step in runs[0].rows[0]) == 2


def test_medusa_token_zero_beside_a_short_leaf_same_tokens() -> None:
    """Padding nodes hold token 0 too. Would catch: an accepted path that leads into the padding of another row."""
    model, inputs = fresh_model("llama"), prompts(2)
    weight = model.lm_head.weight.data
    weight[0] += 0.5 * weight.abs().max() * torch.sign(weight[0])
    assert_same_tokens(
        model, inputs, MedusaCandidates(fitted_heads(model, inputs), tree=[[1], [0], [0, 0]]), max_new_tokens=20
    )


def test_medusa_rejection_sampling_has_the_distribution_of_the_target() -> None:
    """Goodness of fit of the second and third token together, 8,000 texts; fails by chance once in 10,000 runs.

    The tree skips ranks: would catch siblings that are verified as sampled one after the other although they were not,
    and a q that is not the distribution they were sampled from.
    """
    vocab, rows = 8, 500
    model = fresh_model("llama", vocab_size=vocab)
    model.lm_head.weight.data.normal_(generator=torch.Generator().manual_seed(5)).mul_(0.25)
    candidates = MedusaCandidates(random_heads(model, own_outputs=True), tree=[[0], [2], [3], [0, 1], [0, 2], [2, 0]])
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


class ObservedMedusa(MedusaCandidates):
    """Keeps the hidden states and the generated tokens of every draft."""

    def start(self, call: Call) -> DraftSession:
        self.states: list[torch.Tensor] = []
        self.texts: list[list[list[int]]] = []
        session = super().start(call)
        draft = session.draft

        def observed(budget: Sequence[int]) -> DraftTree:
            assert isinstance(call.target, HiddenStateTarget)
            self.states.append(call.target.states.clone())
            self.texts.append([list(text) for text in call.state.generated])
            return draft(budget)

        session.draft = observed  # type: ignore[method-assign]
        return session


def test_medusa_states_are_those_that_chose_the_last_tokens() -> None:
    """The reference is a forward pass over the whole text: the state at its last token but one."""
    model, inputs = tiny_model("llama"), prompts(3)
    candidates = ObservedMedusa(fitted_heads(model, inputs), 6)
    model.generate(**inputs, max_new_tokens=20, candidate_generator=candidates)
    assert len(candidates.states) > 3
    for states, generated in zip(candidates.states, candidates.texts, strict=True):
        for row, text in enumerate(generated):
            ids = torch.cat([inputs["input_ids"][row], torch.tensor(text)])[None]
            mask = torch.cat([inputs["attention_mask"][row], torch.ones(len(text), dtype=torch.long)])[None]
            expected = hidden_states(model, ids, mask)[0, -2]
            torch.testing.assert_close(states[row], expected, atol=1e-4, rtol=1e-4)


def test_medusa_in_transformers_own_loop_raises() -> None:
    candidates = MedusaCandidates(random_heads(tiny_model("llama")))
    with pytest.raises(ValueError, match="works with generate"):
        candidates.get_candidates(torch.tensor([[1, 2]]))


# Heads


def test_new_heads_return_the_state_of_the_target() -> None:
    model = tiny_model("llama")
    heads = MedusaHeads.from_target(model, num_heads=3, num_layers=2, reads_token=True)
    state = torch.randn(5, 64)
    assert torch.equal(heads(state, torch.randn(5, 1, 64)), state[:, None].expand(5, 3, 64))


@pytest.mark.parametrize("heads", [1, 3])
def test_medusa_vocabulary_smaller_than_the_ranks_same_tokens(heads: int) -> None:
    """Would catch: a rank that reaches into the next head's tokens."""
    model = tiny_model("llama", vocab_size=6)
    inputs = {"input_ids": torch.tensor([[1, 2, 3, 4]])}
    candidates = MedusaCandidates(random_heads(model, num_heads=heads), tree=20)
    assert_same_tokens(model, inputs, candidates, max_new_tokens=12)


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


# Trees


def test_rank_tree_of_paths() -> None:
    tree = RankTree.from_paths([[0, 1, 0], [0], [2], [0, 1], [0]])
    assert (tree.ranks, tree.parents, tree.depth, tree.width) == ((0, 2, 1, 0), (-1, -1, 0, 2), 3, 3)
    assert tree.cut(2) == RankTree((0, 2, 1), (-1, -1, 0)) and tree.cut(0) == RankTree((), ())
    assert tree.drawn_in_order.ranks == (0, 1, 0, 0)


def test_profile_keys_of_loaded_modules_differ_by_object() -> None:
    """Would catch: the acceptance of one set of heads, or of one exit adapter, remembered for another."""
    model = tiny_model("llama")
    first, second = random_heads(model), random_heads(model)
    assert MedusaCandidates(first).profile_key() != MedusaCandidates(second).profile_key()
    assert MedusaCandidates(first).profile_key() == MedusaCandidates(first).profile_key()
    adapters = torch.nn.Identity(), torch.nn.Identity()
    keys = {LayerSkipCandidates(1, adapter=adapter).profile_key() for adapter in (*adapters, adapters[0])}
    assert len(keys) == 2


# Medusa heads that read the path before their token (Hydra): the same tokens, and logits of each node's own path


HYDRA = {"reads_token": True, "reads_path": True}


def hydra_heads(model: Any, inputs: dict[str, torch.Tensor], **sampling: Any) -> MedusaHeads:
    """Heads that often predict the output for these inputs, and depend on the path a little."""
    fitted, generator = fitted_heads(model, inputs, **sampling), torch.Generator().manual_seed(3)
    heads = MedusaHeads.from_target(model, num_heads=3, own_outputs=True, **HYDRA)
    heads.load_state_dict(fitted.state_dict(), strict=False)
    with torch.no_grad():
        for matrix in heads.token_maps:
            matrix.weight += 0.01 * torch.randn(matrix.weight.shape, generator=generator)
    return heads.eval()


def test_hydra_logits_of_every_node_are_those_of_its_own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every result of a level against the head of the node's depth, computed for this node alone."""
    model, inputs = tiny_model("llama"), prompts(3)
    original, compared = HydraSession.next_scores, 0

    def next_scores(session: HydraSession, tree: DraftTree, new: int) -> torch.Tensor:
        nonlocal compared
        scores = original(session, tree, new)
        states, embed = session._target.states_of((OUTPUT_STATE,)), model.get_input_embeddings()
        heads = session._runner.heads
        for row, text in enumerate(session.call.state.generated):
            for index in range(new):
                node, path = tree.nodes - new + index, []
                while node >= 0:
                    path.insert(0, int(tree.tokens[row, node]))
                    node = tree.parents[row][node]
                if len(path) < heads.config.num_heads:
                    tokens = embed(torch.tensor([text[-1], *path]))
                    expected = heads.lm_heads[len(path)](heads.head_state(len(path), states[row], tokens))
                    torch.testing.assert_close(scores[row, index], expected, atol=1e-4, rtol=1e-4)
                    compared += 1
        return scores

    monkeypatch.setattr(HydraSession, "next_scores", next_scores)
    candidates = MedusaCandidates(hydra_heads(model, inputs), tree=10, policy=FixedDepth())
    assert_same_tokens(model, inputs, candidates, max_new_tokens=12)
    assert compared > 30


def test_heads_with_too_few_tokens_name_what_they_read() -> None:
    heads = MedusaHeads(MedusaConfig(hidden_size=8, vocab_size=9, num_heads=2, **HYDRA))
    with pytest.raises(ValueError, match="head 1 reads 2 tokens"):
        heads(torch.zeros(1, 8), torch.zeros(1, 1, 8))


def test_counted_acceptance_is_high_for_fitted_heads_and_read_by_the_next_call(tmp_path: Path) -> None:
    """Would catch: later heads counted where their tokens could not have been accepted."""
    model, inputs = tiny_model("llama"), prompts(1)
    heads = fitted_heads(model, inputs)
    ids = model.generate(**inputs, max_new_tokens=24)
    hidden = model.model(ids).last_hidden_state[0, inputs["input_ids"].shape[1] - 1 : -1]
    learnt = Learnt(hidden, ids[0, inputs["input_ids"].shape[1] :], torch.zeros(len(hidden), dtype=torch.long))
    counted = {}
    for name, some in (("fitted", heads), ("random", random_heads(model))):
        hits = torch.zeros(some.config.num_heads, len(CONFIDENCE_EDGES) + 1, RANKS)
        seen = torch.zeros(some.config.num_heads, len(CONFIDENCE_EDGES) + 1)
        states = [some.head_state(head, hidden) for head in range(some.config.num_heads)]
        outputs = list(some.lm_heads) if some.config.own_outputs else [model.lm_head] * len(states)
        drafts = Drafts(states, [lambda state, _, matrix=output: matrix(state) for output in outputs])
        count_acceptance(drafts, learnt, hits, seen)
        counted[name] = hits[0, :, 0].sum() / seen[0].sum()
        assert seen[0].sum() == len(hidden) - 1 and seen[1].sum() <= hits[0].sum()
    assert counted["fitted"] > 0.9 and counted["random"] < 0.5
    heads.config.acceptance = [[list(ranks) for ranks in bins] for bins in Acceptance.untuned(len(states)).table]
    heads.save_pretrained(tmp_path)
    assert load_medusa(tmp_path, model).config.acceptance == heads.config.acceptance
    ours = model.generate(**inputs, max_new_tokens=24, candidate_generator=MedusaCandidates(str(tmp_path), tree=8))
    assert torch.equal(ours, model.generate(**inputs, max_new_tokens=24))
