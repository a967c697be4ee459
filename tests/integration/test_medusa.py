"""Medusa: the tokens of plain `generate` with any heads and any tree, and trees of the right shape."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import TopKLogitsWarper

from hf_specgen import AutoCandidates, MedusaCandidates, NgramCandidates, Schedule
from hf_specgen.adaptive import Fixed
from hf_specgen.candidates.rank_tree import RankTree
from hf_specgen.candidates.tree_plan import ConfidentTree
from hf_specgen.evaluation.cost import CostCurve
from hf_specgen.heads import MedusaHeads
from hf_specgen.heads.acceptance import CONFIDENCE_EDGES, Acceptance, best_tree, confidence_bin
from hf_specgen.tree import children
from tests.helpers import ARCHITECTURES, prompts, tiny_model
from tests.helpers.medusa import fitted_heads, random_heads, states_of

SAMPLING = {"greedy": {}, "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20}}
TREES: dict[str, Any] = {
    "auto": "auto",
    "budget": 12,
    "chain": [[0], [0, 0], [0, 0, 0]],
    "wide": [[rank] for rank in range(8)],
    "short leaf beside deep ones": [[1], [0], [0, 0], [0, 0, 0], [0, 1]],
    "rank above ten": [[0], [12], [12, 3], [0, 11]],
    "unsorted and doubled": [[0, 1, 0], [0], [2], [0, 1], [0]],
}


def both(model: Any, inputs: dict, candidates: Any, **arguments: Any) -> tuple[torch.Tensor, Any]:
    torch.manual_seed(4)
    plain = model.generate(**inputs, **arguments)
    after = torch.rand(2)
    torch.manual_seed(4)
    ours = model.generate(**inputs, **arguments, candidate_generator=candidates, return_dict_in_generate=True)
    assert torch.equal(after, torch.rand(2)), "the random generator does not stand where plain generate left it"
    return plain, ours


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_random_heads_on_every_architecture(architecture: str) -> None:
    """Would catch: a state of the wrong row or node, a tree with misplaced nodes, anything that is not verified."""
    model = tiny_model(architecture)
    for heads in (random_heads(model), random_heads(model, num_layers=2, reads_token=True)):
        for batch, sampling in ((1, "greedy"), (3, "sampled"), (1, "sampled"), (3, "greedy")):
            candidates = MedusaCandidates(heads, policy=Fixed())
            plain, ours = both(model, prompts(batch), candidates, max_new_tokens=16, **SAMPLING[sampling])
            assert torch.equal(plain, ours.sequences), (batch, sampling)
            assert ours.speculation.drafted > 0


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("batch", [1, 3])
def test_every_tree_with_heads_that_know_something(tree: str, batch: int) -> None:
    model = tiny_model("llama")
    heads = fitted_heads(model, prompts(batch))
    for sampling in SAMPLING.values():
        candidates = MedusaCandidates(heads, TREES[tree], policy=Fixed())
        plain, ours = both(model, prompts(batch), candidates, max_new_tokens=30, **sampling)
        assert torch.equal(plain, ours.sequences)
        assert ours.speculation.accepted > 0
        assert sampling == {} or ours.speculation.accepted < ours.speculation.drafted


@pytest.mark.parametrize("processors", [{}, {"repetition_penalty": 1.3}, {"eos_token_id": list(range(30, 60))}])
def test_processors_ends_and_dropped_rows(processors: dict) -> None:
    """Would catch: states that are not put back in place once ended rows have left the batch."""
    model, inputs = tiny_model("qwen3"), prompts(4)
    heads = fitted_heads(model, inputs)
    for sampling in SAMPLING.values():
        torch.manual_seed(1)
        plain = model.generate(**inputs, max_new_tokens=25, pad_token_id=0, **sampling, **processors)
        torch.manual_seed(1)
        candidates = MedusaCandidates(heads, 8)
        ours = model.generate(
            **inputs, max_new_tokens=25, pad_token_id=0, **sampling, **processors, candidate_generator=candidates
        )
        assert torch.equal(plain, ours)


@pytest.mark.parametrize("batch", [1, 3])
def test_with_n_grams_and_a_policy(batch: int) -> None:
    """States stay right through steps that another strategy drafted, and through plain ones."""
    model, inputs = tiny_model("llama"), prompts(batch)
    heads = fitted_heads(model, inputs)
    mixes = (
        AutoCandidates([NgramCandidates(k=4), MedusaCandidates(heads)]),
        MedusaCandidates(heads, policy=Schedule({1: 2, 2: 1})),
        MedusaCandidates(heads),
        MedusaCandidates(heads, policy=Fixed()),
    )
    for candidates in mixes:
        for sampling in SAMPLING.values():
            plain, ours = both(model, inputs, candidates, max_new_tokens=40, **sampling)
            assert torch.equal(plain, ours.sequences)


def test_token_zero_beside_a_short_leaf() -> None:
    """Id 0 is also what padding nodes hold; accepting it must not lead into another row's padding."""
    model, inputs = tiny_model("llama"), prompts(2)
    with torch.no_grad():
        state = model.lm_head.weight[0].clone()
    model.lm_head.weight.data[0] += 0.5 * model.lm_head.weight.data.abs().max() * torch.sign(state)
    try:
        plain, ours = both(model, inputs, MedusaCandidates(fitted_heads(model, inputs), [[1], [0], [0, 0]]))
        assert torch.equal(plain, ours.sequences)
    finally:
        model.lm_head.weight.data[0] = state


@pytest.mark.parametrize("verification", ["rejection", "typical"])
@pytest.mark.parametrize("batch", [1, 3])
def test_other_verification_modes(verification: str, batch: int) -> None:
    """Greedy, rejection is lossless to the token; sampled, both run and repeat under a seed."""
    model, inputs = tiny_model("llama"), prompts(batch)
    candidates = MedusaCandidates(fitted_heads(model, inputs), [[0], [2], [0, 0], [0, 3], [2, 0]])
    arguments = {**inputs, "max_new_tokens": 20, "candidate_generator": candidates, "verification": verification}
    if verification == "rejection":
        assert torch.equal(model.generate(**arguments), model.generate(**inputs, max_new_tokens=20))
    runs = []
    for _ in range(2):
        torch.manual_seed(8)
        runs.append(model.generate(**arguments, do_sample=True, top_k=10))
    assert torch.equal(*runs)
    assert candidates.speculation is not None and candidates.speculation.accepted > 0


def test_rejection_samples_the_targets_distribution() -> None:
    """Goodness of fit of the second and third token together, 8,000 texts; fails by chance once in 10,000 runs.

    The tree passes over ranks: would catch siblings that are judged as drawn one after the other and were not, and a q
    that is not the distribution they were drawn from.
    """
    vocab, rows = 8, 500
    model = copy.deepcopy(tiny_model("llama", vocab_size=vocab))
    model.lm_head.weight.data.normal_(generator=torch.Generator().manual_seed(5)).mul_(0.25)
    candidates = MedusaCandidates(random_heads(model, own_outputs=True), [[0], [2], [3], [0, 1], [0, 2], [2, 0]])
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
    expected = len(seen) * joint_of_last_two(model, prompt, top_k=6)
    assert chi_square_p(counts, expected) > 1e-4


def joint_of_last_two(model: Any, prompt: torch.Tensor, top_k: int) -> torch.Tensor:
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


def chi_square_p(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """The probability of a worse fit; cells that expect less than 5 are one cell."""
    rare = expected < 5
    pairs = [*zip(counts[~rare].tolist(), expected[~rare].tolist(), strict=True)]
    if float(expected[rare].sum()) >= 5:
        pairs.append((float(counts[rare].sum()), float(expected[rare].sum())))
    statistic = sum((count - wanted) ** 2 / wanted for count, wanted in pairs)
    half = torch.tensor((len(pairs) - 1) / 2, dtype=torch.double)
    return float(torch.special.gammaincc(half, torch.tensor(statistic / 2, dtype=torch.double)))


def test_states_are_those_that_chose_the_last_tokens() -> None:
    """The reference: a forward pass over the whole text; the state before the last token."""
    model, inputs = tiny_model("llama"), prompts(3)
    seen: list[torch.Tensor] = []
    texts: list[list[list[int]]] = []

    class Spy(MedusaCandidates):
        def bind(self, context: Any, model: Any) -> Any:
            drafter = super().bind(context, model)
            draft = drafter.draft

            def spied(context: Any) -> Any:
                seen.append(context.target.states.clone())
                texts.append([list(text) for text in context.generated])
                return draft(context)

            drafter.draft = spied  # type: ignore[method-assign]
            return drafter

    model.generate(**inputs, max_new_tokens=20, candidate_generator=Spy(fitted_heads(model, inputs), 6))
    assert len(seen) > 3
    for states, generated in zip(seen, texts, strict=True):
        for row, text in enumerate(generated):
            ids = torch.cat([inputs["input_ids"][row], torch.tensor(text)])[None]
            mask = torch.cat([inputs["attention_mask"][row], torch.ones(len(text), dtype=torch.long)])[None]
            expected = states_of(model, ids, mask)[0, -2]
            torch.testing.assert_close(states[row], expected, atol=1e-4, rtol=1e-4)


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_model("llama")
    hooks = len(model.lm_head._forward_pre_hooks)

    def broken(*_: Any) -> None:
        raise RuntimeError("stop here")

    candidates = MedusaCandidates(random_heads(model))
    model.generate(**prompts(1), max_new_tokens=4, candidate_generator=candidates)
    assert candidates._attached is not None
    candidates._attached[1].logits = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="stop here"):
        model.generate(**prompts(1), max_new_tokens=9, candidate_generator=candidates)
    assert len(model.lm_head._forward_pre_hooks) == hooks


def test_fresh_heads_say_what_the_target_says() -> None:
    model = tiny_model("llama")
    heads = MedusaHeads.from_target(model, num_heads=3, num_layers=2, reads_token=True)
    state = torch.randn(5, 64)
    assert torch.equal(heads(state, torch.randn(5, 64)), state[:, None].expand(5, 3, 64))


def test_rank_trees() -> None:
    tree = RankTree.from_paths([[0, 1, 0], [0], [2], [0, 1], [0]])
    assert (tree.ranks, tree.parents, tree.depth, tree.width) == ((0, 2, 1, 0), (-1, -1, 0, 2), 3, 3)
    assert tree.cut(2) == RankTree((0, 2, 1), (-1, -1, 0)) and tree.cut(0) == RankTree((), ())
    assert tree.drawn_in_order.ranks == (0, 1, 0, 0)
    assert tree.places(10).tolist() == [0, 2, 11, 20]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ([], "no paths"),
        ([[0], []], "not a list of ranks"),
        ([[0], [-1]], "not a list of ranks"),
        ([[0], [1, 0]], r"but not its beginning \[1\]"),
        ("widest", 'must be "auto"'),
        (0, "at least 1 node"),
        (True, "at least 1 node"),
        (2.5, "is a list of paths"),
        ([0, 1], "is a list of paths"),
    ],
)
def test_bad_trees(tree: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MedusaCandidates("somewhere", tree=tree)


def test_trees_that_do_not_fit_the_heads() -> None:
    model = tiny_model("llama")
    for tree, message in (([[0], [0, 0], [0, 0, 0]], "3 deep, but there are 2 heads"), ([[0], [99]], "ends at 98")):
        with pytest.raises(ValueError, match=message):
            candidates = MedusaCandidates(random_heads(model, num_heads=2), tree)
            model.generate(**prompts(1), candidate_generator=candidates)


def brute_force_best(probabilities: list[list[float]], price: float, max_nodes: int) -> float:
    """The best value of any prefix-closed set of paths, by trying all of them."""
    paths = [(r,) for r in range(len(probabilities[0]))]
    paths += [(a, b) for a in range(len(probabilities[0])) for b in range(len(probabilities[1]))]
    best = 1.0
    for chosen in range(1, 2 ** len(paths)):
        tree = {path for index, path in enumerate(paths) if chosen >> index & 1}
        if len(tree) > max_nodes or any(len(path) == 2 and path[:1] not in tree for path in tree):
            continue
        expected = 1.0
        for path in tree:
            likely = 1.0
            for head, rank in enumerate(path):
                likely *= probabilities[head][rank]
            expected += likely
        best = max(best, expected / (1 + price * len(tree)))
    return best


@pytest.mark.parametrize("price", [0.0, 0.05, 0.2, 0.9])
def test_the_best_tree_is_the_best(price: float) -> None:
    """Against all trees of two heads and three ranks."""
    probabilities = [[0.6, 0.2, 0.1], [0.5, 0.3, 0.02]]
    paths, expected = best_tree(probabilities, lambda nodes: 1 + price * nodes, max_nodes=8)
    value = expected / (1 + price * len(paths))
    assert value == pytest.approx(brute_force_best(probabilities, price, 8))


def test_sure_heads_get_deep_trees_and_dear_targets_small_ones() -> None:
    acceptance = Acceptance.untuned(4)
    assert confidence_bin(0.99) == len(CONFIDENCE_EDGES)
    flat, steep = CostCurve((1, 64), (1.0, 1.1), 256, 1), CostCurve((1, 2), (1.0, 2.0), 256, 1)
    sure, unsure = (
        ConfidentTree(acceptance, flat).tree([1.0] * 4, 1),
        ConfidentTree(acceptance, flat).tree([0.1] * 4, 1),
    )
    assert sure.depth == 4 and len(children(sure.parents)[0]) <= len(children(unsure.parents)[0])
    assert len(ConfidentTree(acceptance, steep).tree([0.1] * 4, 1).ranks) == 0
    assert len(ConfidentTree(acceptance, flat).tree([0.5] * 4, 8).ranks) < len(
        ConfidentTree(acceptance, flat).tree([0.5] * 4, 1).ranks
    )


def test_only_inside_our_loop() -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="works with generate"):
        MedusaCandidates(random_heads(model)).get_candidates(torch.tensor([[1, 2]]))
