"""Training EAGLE and block heads: passes equal to those of drafting, short runs, and what is saved."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import train_dflash
import train_eagle
from draft_loss import later_pairs
from head_training import choose_anchors, read_target
from hf_specgen import AutoCandidates
from hf_specgen.grown_tree import GrownTree
from hf_specgen.heads.head_formats import load_head
from hf_specgen.heads.runner import BlockRunner, EagleRunner
from tests.helpers.head_fixtures import find_fixtures
from tests.helpers.recipes import arguments

ROOT = Path(__file__).parents[1] / "assets" / "fixtures"
FIXTURES = {fixture.folder.name: fixture for fixture in find_fixtures(ROOT)}
EAGLE = [
    name
    for name, found in FIXTURES.items()
    if found.family == "autoregressive" and name.startswith(("eagle3", "speculators_eagle3"))
]
BLOCK = ["dflash_zlab", "jetspec_causal", "speculators_dflash_full"]
ALL = 99
"""More anchors than there are positions."""


def batch_of(length: int) -> dict[str, torch.Tensor]:
    """Two conversations, the second one padded."""
    ids = torch.randint(1, 120, (2, length), generator=torch.Generator().manual_seed(1))
    predicts, mask = torch.zeros(2, length, dtype=torch.bool), torch.ones(2, length, dtype=torch.long)
    predicts[0, 3 : length - 1] = True
    predicts[1, 5 : length - 4] = True
    mask[1, length - 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "predicts": predicts}


@pytest.mark.parametrize("name", EAGLE)
@torch.no_grad()
def test_training_time_test_equals_drafting(name: str) -> None:
    """Would catch: a mask, position, token or fed-back state that is not that of drafting."""
    fixture, depth, batch = FIXTURES[name], 3, batch_of(12)
    bound = load_head(fixture.head_folder).bind(fixture.target)
    features = read_target(fixture.target, bound, batch).features
    drafts = train_eagle.training_time_test(bound, batch, features, ALL, depth)
    positions = batch["predicts"].nonzero().tolist()
    assert drafts.anchors.tolist() == list(range(len(positions)))
    for number, (row, root) in enumerate(positions):
        text = batch["input_ids"][row].tolist()
        runner = EagleRunner(bound, 1)
        outputs = [runner.extend([features[row, : root + 1]], [text[1 : root + 2]]).output[0, 0]]
        for step in range(1, depth):
            if root + 1 + step < len(text):
                chain = GrownTree(torch.tensor([text[root + 2 : root + 2 + step]]))
                outputs.append(runner.expand(chain, 1).output[0, 0])
        for step, expected in enumerate(outputs):
            torch.testing.assert_close(drafts.states[step][number], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", BLOCK)
@torch.no_grad()
def test_block_training_equals_drafting(name: str) -> None:
    fixture, batch = FIXTURES[name], batch_of(14)
    bound = load_head(fixture.head_folder).bind(fixture.target)
    features = read_target(fixture.target, bound, batch).features
    drafts = train_dflash.block_drafts(bound, batch, features, ALL)
    for number, (row, root) in enumerate(batch["predicts"].nonzero().tolist()):
        text = batch["input_ids"][row].tolist()
        runner = BlockRunner(bound, 1)
        logits = runner.draft([features[row, : root + 1]], [text[1 : root + 2]], [True], runner.depth)[0]
        for depth, state in enumerate(drafts.states):
            torch.testing.assert_close(bound.target_logits(state[number]), logits[depth], atol=1e-4, rtol=1e-4)


def test_anchors_are_predicting_positions() -> None:
    predicts = batch_of(12)["predicts"]
    places, valid, numbers = choose_anchors(predicts, 4)
    rows = torch.arange(2)[:, None].expand_as(places)
    assert predicts[rows[valid], places[valid]].all()
    assert torch.equal(predicts.nonzero()[numbers], torch.stack([rows[valid], places[valid]], dim=1))


def test_later_pairs_stay_inside_an_answer() -> None:
    index, learns = later_pairs(torch.tensor([0, 0, 0, 1, 1]), 1)
    assert index.tolist() == [0] and learns.tolist() == [2]


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        (train_eagle, ["--taps", "1", "2", "3", "--draft-vocab-size", "600"]),
        (train_eagle, ["--taps", "2", "--layers", "1", "3", "--norm-output", "true", "--fc-norm", "true"]),
        (train_dflash, ["--layers", "2", "3", "--taps", "1", "3"]),
        (train_dflash, ["--causal", "true", "--taps", "2"]),
    ],
    ids=["eagle", "eagle 3.1", "dflash", "jetspec"],
)
def test_recipe_saves_a_head_that_drafts(recipe: Any, settings: list[str], folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    output = f"{recipe.__name__}-{len(settings)}-{settings[1]}"
    held_out = ["--evaluation", str(folder / "held-out.jsonl"), "--evaluation-per-domain", "1"]
    recipe.main(arguments(folder, output, "--depth", "3", *settings, *held_out))
    target: Any = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7, 8]])
    candidates = AutoCandidates.from_pretrained(folder / output, k=3)
    assert torch.equal(
        target.generate(ids, max_new_tokens=6, candidate_generator=candidates), target.generate(ids, max_new_tokens=6)
    )
    card = (folder / output / "README.md").read_text(encoding="utf-8")
    assert "depth 3" in card and "tokens per step" in card


def test_recipe_continues_with_a_saved_head(folder: Path) -> None:
    """Further training starts from the saved weights: without a learning rate they stay."""
    first = ["--depth", "2", "--taps", "2"]
    train_eagle.main(arguments(folder, "first", *first))
    more = ["--head", str(folder / "first"), "--learning-rate", "0"]
    train_eagle.main(arguments(folder, "second", *first, *more))
    one, two = (load_head(folder / name) for name in ("first", "second"))
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(tensor, copy.deepcopy(two.state_dict()[name]))
