"""Draft trees of draft models: what they gain, and their distribution under rejection sampling."""

from typing import Any

import pytest
import torch

from hf_specgen import AdaptiveDepth, DraftModelCandidates
from hf_specgen.depth import CostCurve, LatencyModel
from tests.helpers.goodness_of_fit import fit_of_two_tokens
from tests.helpers.models import small_llama

LATENCY = LatencyModel.from_curves(CostCurve((1, 65), (1.0, 1.1), 256, 1), draft_token=0.05)


def llama(layers: int, seed: int) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4}
    settings = {"num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "eos_token_id": 1}
    return small_llama(40, seed, initializer_range=0.2, **sizes, **settings)


@pytest.fixture(scope="module")
def target() -> Any:
    return llama(2, 0)


@pytest.fixture(scope="module")
def draft(target: Any) -> Any:
    """A draft that agrees with the target often, but not always: the target with noise on its weights."""
    model = llama(2, 0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.01 * torch.randn(weight.shape, generator=generator)
    return model


def inputs(batch: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 40, (batch, 9), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, : 2 * row] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def generate(model: Any, seed: int = 0, **kwargs: Any) -> None:
    torch.manual_seed(seed)
    model.generate(max_new_tokens=28, **kwargs)


def test_trees_accept_more_tokens_per_step_than_a_chain_of_the_same_depth(target: Any, draft: Any) -> None:
    """Would catch: a tree whose further branches are never accepted, which would be verified for nothing."""
    tokens_per_step = []
    for candidates in (DraftModelCandidates(draft, k=5), DraftModelCandidates(draft, k=5, tree=24)):
        emitted = steps = 0
        for seed in range(4):
            generate(target, seed, **inputs(3), do_sample=True, candidate_generator=candidates)
            assert candidates.speculation is not None
            emitted, steps = emitted + candidates.speculation.emitted, steps + candidates.speculation.steps
        tokens_per_step.append(emitted / steps)
    assert tokens_per_step[1] > 1.1 * tokens_per_step[0]


@pytest.mark.parametrize("tree", [6, "auto"])
def test_trees_rejection_sampling_has_the_distribution_of_the_target(tree: Any) -> None:
    """Would catch: siblings that count as independent, a wrong q, nodes left out because of their tokens.

    6,000 samples of two tokens; fails by chance once in 1,000 runs of another seed.
    """
    target, draft = small_llama(6, 0), small_llama(6, 3)
    candidates = DraftModelCandidates(draft, k=2, tree=tree, policy=AdaptiveDepth(LATENCY) if tree == "auto" else None)
    assert fit_of_two_tokens(target, torch.tensor([[2, 3, 4]]), candidates, calls=12) > 1e-3
