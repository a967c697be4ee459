"""Training passes equal drafting; losses equal naive ones, with their gradients; sharded drafters learn."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import losses
import train_dflash
import train_dspark
import train_eagle
import train_medusa
from conversations import IGNORED
from drafter import choose_anchors
from hf_specgen.heads import MedusaHeads
from hf_specgen.heads.block_drafter import BlockDrafter
from hf_specgen.heads.eagle_drafter import EagleDrafter
from hf_specgen.heads.head_formats import load_head
from hf_specgen.heads.head_text import HeadText
from hf_specgen.targets.model_parts import output_logits
from losses import Drafts, TrainingPositions, acceptance_counts, draft_loss, later_pairs
from target import read_target
from tests.helpers import VOCAB, tiny_model
from tests.helpers.calls import frontier_of
from tests.helpers.head_fixtures import FIXTURES, corrected
from tests.helpers.medusa import random_heads
from tests.helpers.reference import naive_medusa_loss

EAGLE = [name for name in FIXTURES if name.startswith(("eagle3", "speculators_eagle3"))]
BLOCK = ["dflash_zlab", "jetspec_causal", "speculators_dflash_full"]
DSPARK = ["speculators_dspark_vanilla", "speculators_dspark_rnn", "deepspec_dspark_qwen3_vanilla"]
ALL = 99
"""More anchors than there are positions."""


def batch_of(length: int, packed: bool = False) -> dict[str, torch.Tensor]:
    """Two rows, the second one padded; packed: with a second conversation from position 8 on."""
    ids = torch.randint(1, 120, (2, length), generator=torch.Generator().manual_seed(1))
    predicts = torch.zeros(2, length, dtype=torch.bool)
    predicts[0, 3 : 7 if packed else length - 1] = True
    predicts[1, 5 : 7 if packed else length - 4] = True
    positions = torch.arange(length).expand(2, -1).clone()
    if packed:
        positions[:, 8:] -= 8
        predicts[0, 9 : length - 1] = True
    batch = {"input_ids": ids, "labels": torch.where(predicts, ids.roll(-1, dims=1), IGNORED)}
    return batch | {"position_ids": positions}


def conversations_of(batch: dict[str, torch.Tensor]) -> list[tuple[int, int, list[int], int]]:
    """For each predicting position: row, first position of its conversation, its text, place in it."""
    found = []
    for row, root in (batch["labels"] != IGNORED).nonzero().tolist():
        is_packed = bool((batch["position_ids"][:, 8] == 0).all())
        begin = 8 if is_packed and root >= 8 else 0
        end = 8 if is_packed and root < 8 else batch["input_ids"].shape[1]
        found.append((row, begin, batch["input_ids"][row, begin:end].tolist(), root - begin))
    return found


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", [*EAGLE, "speculators_peagle_llama"])
@torch.no_grad()
def test_eagle_training_equals_drafting(name: str, packed: bool) -> None:
    """Would catch: a mask, position, token or fed-back state that is not that of drafting."""
    fixture, depth, batch = FIXTURES[name], 3, batch_of(14, packed)
    bound = load_head(fixture.head_folder).bind(fixture.target)
    features = read_target(fixture.target, batch, bound.aux_hidden_state_layers).features
    anchors = choose_anchors(batch, ALL, 0)
    parallel = bound.head.config.mask_token_id is not None
    draft = train_eagle.parallel_drafts if parallel else train_eagle.training_time_test
    drafted = draft(bound, batch, features, anchors, depth)
    assert anchors.numbers.tolist() == list(range(len(conversations_of(batch))))
    for number, (row, begin, text, root) in enumerate(conversations_of(batch)):
        known, following = features[row, begin : begin + root + 1], text[1 : root + 2]
        if parallel:
            new = HeadText([known], [following], [True])
            logits = EagleDrafter(bound, None, 1).forward_depths(new, depth).logits[0, :, 0]
            for step, state in enumerate(drafted):
                torch.testing.assert_close(bound.target_logits(state[number]), logits[step], atol=1e-4, rtol=1e-4)
            continue
        drafter = EagleDrafter(bound, None, 1)
        outputs = [drafter.forward_text(HeadText([known], [following], [True]))[0]]
        for step in range(1, depth):
            if root + 1 + step < len(text):
                chain = frontier_of(torch.tensor([[text[root + 1 + step]]]), step, step)
                outputs.append(drafter.forward_nodes(chain)[0, 0])
        for step, expected in enumerate(outputs):
            torch.testing.assert_close(bound.logits(drafted[step][number]), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", BLOCK)
@torch.no_grad()
def test_block_training_equals_drafting(name: str, packed: bool) -> None:
    """Would catch: training on masks, positions or hidden states that the head never sees when it drafts."""
    fixture, batch = FIXTURES[name], batch_of(14, packed)
    bound = load_head(fixture.head_folder).bind(fixture.target)
    features = read_target(fixture.target, batch, bound.aux_hidden_state_layers).features
    block = train_dflash.block_states(bound, batch, features, choose_anchors(batch, ALL, 0))
    for number, (row, begin, text, root) in enumerate(conversations_of(batch)):
        drafter = BlockDrafter(bound, None, 1)
        new = HeadText([features[row, begin : begin + root + 1]], [text[1 : root + 2]], [True])
        logits = drafter.forward_depths(new, drafter.config.depth).logits[0, :, 0]
        states = block[number, bound.head.config.first_proposing_position :]
        torch.testing.assert_close(bound.target_logits(states), logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", DSPARK)
@torch.no_grad()
def test_dspark_training_corrects_by_the_true_tokens(name: str) -> None:
    """Would catch: a correction by the token at another position, and a state that is not passed on."""
    fixture, batch = FIXTURES[name], batch_of(14)
    head: Any = load_head(fixture.head_folder)
    bound = head.bind(fixture.target)
    states = read_target(fixture.target, batch, bound.aux_hidden_state_layers)
    drafter = SimpleNamespace(bound=lambda: bound, head=head, args=SimpleNamespace(anchors=ALL), step=0)
    drafts = train_dspark.SparkDrafter.draft(drafter, batch, states)  # type: ignore[arg-type]
    anchors = choose_anchors(batch, ALL, 0)
    block = train_dflash.block_states(bound, batch, states.features, anchors)
    for number, (row, _, text, root) in enumerate(conversations_of(batch)):
        tokens = torch.tensor([text[root + 1 : root + 1 + len(drafts.states)]])
        expected = corrected(bound, block[number : number + 1], tokens)
        for depth in range(tokens.shape[1]):
            state = drafts.states[depth][number : number + 1]
            torch.testing.assert_close(drafts.logits[depth](state), expected.logits[:, depth])
            torch.testing.assert_close(drafts.confidence(state), expected.confidence[:, depth])
        assert row in (0, 1)


def medusa_drafts(model: Any, heads: MedusaHeads, hidden: torch.Tensor, tokens: torch.Tensor | None) -> Drafts:
    outputs: list[Any] = list(heads.lm_heads) if heads.config.own_outputs else [model.lm_head] * heads.config.num_heads
    return Drafts(
        [heads.head_state(head, hidden, tokens) for head in range(heads.config.num_heads)],
        [partial(output_logits, model, matrix=output) for output in outputs],
        trained=[parameter for output in outputs for parameter in output.parameters()],
    )


def positions(hidden: torch.Tensor, answers: list[int]) -> TrainingPositions:
    return TrainingPositions(hidden, torch.randint(3, VOCAB, (len(hidden),)), torch.tensor(answers))


@pytest.mark.parametrize("reads_path", [False, True])
def test_loss_is_the_naive_one(reads_path: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients, over several chunks and answers of different lengths, one too short for any head."""
    monkeypatch.setattr(losses, "CHUNK", 5)
    model = tiny_model("cohere2")  # its logits are scaled
    heads = random_heads(model, reads_path=reads_path).train()
    hidden, tokens = torch.randn(14, 64), torch.randn(14, 3, 64)
    rows = [0] * 7 + [1] + [2] * 6
    loss = draft_loss(model, medusa_drafts(model, heads, hidden, tokens), positions(hidden, rows), {"kl": 1.0}, 0.8)
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in heads.named_parameters()}
    heads.zero_grad()
    expected = naive_medusa_loss(model, heads, hidden, tokens, rows, 0.8)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for name, parameter in heads.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("drafted_ids", [None, torch.arange(0, VOCAB, 2)])
def test_every_loss_is_the_naive_one(drafted_ids: torch.Tensor | None) -> None:
    """Would catch: a loss over chunks, or over a smaller vocabulary, that is not the one of its name."""
    model, hidden, answers = tiny_model("llama"), torch.randn(9, 64), [0] * 5 + [1] * 4
    known, matrix = positions(hidden, answers), torch.randn(VOCAB if drafted_ids is None else len(drafted_ids), 64)
    state = torch.randn(9, 64)
    drafts = Drafts([state], [lambda some: some @ matrix.T], first=0, drafted_ids=drafted_ids)
    ids = torch.arange(VOCAB) if drafted_ids is None else drafted_ids
    p, q = output_logits(model, hidden)[:, ids].softmax(-1), (state @ matrix.T).softmax(-1)
    tv, kl = (p - q).abs().sum(-1) / 2, (p * (p.log() - q.log())).sum(-1)
    rate = torch.exp(-3 * (1 - tv))
    inside = torch.isin(known.tokens, ids)
    place = torch.searchsorted(ids, known.tokens[inside])
    expected = {"kl": kl, "tv": tv, "lk": rate * kl + (1 - rate) * tv}
    expected["ce"] = cross_entropy(q.log()[inside], place, reduction="none")
    for name, each in expected.items():
        loss = draft_loss(model, drafts, known, {name: 2.0}, 1.0)
        torch.testing.assert_close(loss, 2 * each.sum(), rtol=1e-4, atol=1e-4)


def test_acceptance_counts_are_those_of_replayed_drafts() -> None:
    """Chains of a draft model, and those of heads, counted position by position."""
    model, hidden, answers = tiny_model("llama"), torch.randn(9, 64), torch.tensor([0] * 5 + [1] * 4)
    matrix, rows = model.lm_head.weight.detach() + 0.02 * torch.randn(VOCAB, 64), torch.tensor([0] * 5 + [1] * 4)
    top_p, known = output_logits(model, hidden).argmax(-1), TrainingPositions(hidden, answers, answers)
    for first, states in ((0, [hidden]), (1, [hidden.roll(-1, 0), hidden.roll(-2, 0)])):
        drafts = Drafts(states, [lambda some: some @ matrix.T] * len(states), first=first)
        counts = acceptance_counts(model, drafts, known, rows, 2)
        for depth in range(2):
            chains = 0
            index, later = later_pairs(answers, first + depth)
            for place in later.tolist():
                places = range(place - depth, place + 1)
                chains += all((hidden[one] @ matrix.T).argmax(-1) == top_p[one] for one in places)
            assert int(counts[:, depth, 2].sum()) == chains and int(counts[:, depth, 0].sum()) == len(index)


def medusa_arguments(**fields: Any) -> SimpleNamespace:
    """Those of new heads and their loss."""
    shape = {"num_heads": 2, "num_layers": 1, "own_outputs": False, "reads_path": False, "lora_rank": 0}
    return SimpleNamespace(
        heads=None, target="target", loss={"kl": 1.0}, decay=0.8, **shape | {"loss_vocab_size": 40} | fields
    )


def test_medusa_loss_over_the_most_frequent_tokens_is_the_naive_one() -> None:
    """Would catch: other rows of the output matrix, its bias left out, or p normalised over all tokens."""
    model = tiny_model("cohere2").requires_grad_(False)  # its logits are scaled
    model.lm_head.bias = torch.nn.Parameter(torch.randn(VOCAB), requires_grad=False)
    batch = batch_of(20)
    batch["input_ids"] %= VOCAB
    batch["labels"] = torch.where(batch["labels"] == IGNORED, IGNORED, batch["labels"] % VOCAB)
    drafter = train_medusa.MedusaDrafter(medusa_arguments(), model, [{"labels": batch["labels"].flatten().tolist()}])
    drafter.heads.load_state_dict(random_heads(model, num_heads=2).state_dict())
    ids = drafter.learnt_ids
    assert ids is not None and len(ids) == 40
    assert set(ids.tolist()) >= {*batch["labels"].flatten().tolist()} - {IGNORED}
    hidden = drafter.states(batch).hidden
    of_row = batch["labels"].ne(IGNORED).nonzero()[:, 0]
    log_p = output_logits(model, hidden)[:, ids].log_softmax(-1)
    expected = torch.zeros(())
    for depth in range(2):
        log_q = output_logits(model, drafter.heads.head_state(depth, hidden))[:, ids].log_softmax(-1)
        later = (torch.arange(len(hidden)) + depth + 1).clamp(max=len(hidden) - 1)
        inside = (of_row[later] == of_row) & (torch.arange(len(hidden)) + depth + 1 < len(hidden))
        kl = (log_p[later].exp() * (log_p[later] - log_q)).sum(-1)
        expected = expected + 0.8**depth * kl[inside].sum()
    torch.testing.assert_close(drafter(**batch)["loss"], expected / len(hidden))
    assert "learnt_ids" not in drafter.state_dict()


@pytest.mark.parametrize("fields", [{"own_outputs": True}, {"lora_rank": 2}])
def test_medusa_loss_over_fewer_tokens_needs_the_shared_output_matrix(fields: dict[str, Any]) -> None:
    """Would catch: logits over all tokens compared with those of a few."""
    with pytest.raises(ValueError, match="loss_vocab_size is for heads that share the target's output matrix"):
        train_medusa.MedusaDrafter(medusa_arguments(**fields), tiny_model("llama"), [{"labels": [3]}])


@pytest.mark.parametrize("lengths", [[1, 1, 1], [2, 1]])
def test_answers_too_short_for_some_heads(lengths: list[int]) -> None:
    """Every parameter still gets a gradient: zeros, without which several processes would wait for each other."""
    model = tiny_model("llama")
    heads = random_heads(model).train()
    answers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).tolist()
    hidden = torch.randn(len(answers), 64)
    draft_loss(
        model, medusa_drafts(model, heads, hidden, None), positions(hidden, answers), {"kl": 1.0}, 0.8
    ).backward()
    assert all(parameter.grad is not None for parameter in heads.parameters())


def test_no_more_than_a_chunk_of_logits_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for the backward pass: states and sums, nothing of `[positions, vocab]`."""
    monkeypatch.setattr(losses, "CHUNK", 4)
    model = tiny_model("llama")
    heads = random_heads(model, own_outputs=True).train()
    hidden = torch.randn(40, 64)
    kept: list[tuple[int, ...]] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    drafts, known = medusa_drafts(model, heads, hidden, None), positions(hidden, [0] * 40)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        draft_loss(model, drafts, known, {"kl": 1.0}, 0.8).backward()
    vocabulary = [shape for shape in kept if VOCAB in shape]
    assert max(shape[0] for shape in vocabulary if shape[-1] == VOCAB and shape[0] != 64) <= 4
    assert sum(shape == (VOCAB, 64) for shape in vocabulary) <= 3 * 10 * 2 + 3  # matrices in use, one gradient a head
