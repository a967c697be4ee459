"""One strategy object on several models, and several objects of one kind on one model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hf_specgen import AdaptiveDepth, LayerSkipCandidates, MedusaCandidates
from hf_specgen.heads import ExitHead, load_head, save_head
from hf_specgen.heads.exit_head import save_exit_head
from tests.helpers import assert_same_tokens, fresh_model, prompts, tiny_model
from tests.helpers.medusa import random_heads


@pytest.fixture
def adapter(tmp_path: Path) -> str:
    """A folder with an exit adapter for layer 2 of tiny llama."""
    model = tiny_model("llama", num_hidden_layers=3)
    head: Any = ExitHead.from_target(model, 2)
    torch.manual_seed(1)
    save_exit_head(get_peft_model(head, LoraConfig(target_modules=["head"], r=2)), tmp_path, model, "tiny")
    return str(tmp_path)


def accepted_steps(candidates: Any, model: Any) -> list[int]:
    """How many draft tokens each step of a call accepts."""
    statistics = assert_same_tokens(model, prompts(1), candidates, max_new_tokens=30)
    return [step.accepted for step in statistics.rows[0]]


def other_model() -> Any:
    """Tiny llama with another output matrix."""
    model = fresh_model("llama", num_hidden_layers=3)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight[torch.randperm(99, generator=torch.Generator().manual_seed(3))])
    return model


def test_layer_skip_adapter_on_a_second_model_uses_its_output_matrix(adapter: str) -> None:
    """Would catch: the output matrix of the first model kept for all later ones."""
    first, second = tiny_model("llama", num_hidden_layers=3), other_model()
    candidates = LayerSkipCandidates(2, k=3, adapter=adapter)
    accepted_steps(candidates, first)
    fresh = LayerSkipCandidates(2, k=3, adapter=adapter)
    assert accepted_steps(candidates, second) == accepted_steps(fresh, second)
    assert sum(accepted_steps(candidates, second)) > 0


def test_layer_skip_adapter_after_the_model_changed_dtype_runs(adapter: str) -> None:
    """Would catch: an adapter that stays in the dtype of the first call."""
    model, candidates = fresh_model("llama", num_hidden_layers=3), LayerSkipCandidates(2, k=3, adapter=adapter)
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        ids = model.generate(**prompts(1), max_new_tokens=8, candidate_generator=candidates)
        assert ids.shape == (1, 20)


@pytest.mark.parametrize("batch", [1, 3])
def test_medusa_by_folder_then_loaded_with_remembered_acceptance_same_tokens(batch: int, tmp_path: Path) -> None:
    """Would catch: acceptance remembered for 8 positions used for 4 heads. By folder k is unknown at first."""
    model = tiny_model("llama", num_hidden_layers=3)
    save_head(random_heads(model), tmp_path)
    for candidates in (
        MedusaCandidates(str(tmp_path)),
        MedusaCandidates(load_head(str(tmp_path))),
        MedusaCandidates(str(tmp_path)),
    ):
        assert isinstance(candidates.policy, AdaptiveDepth)
        assert_same_tokens(model, prompts(batch), candidates, max_new_tokens=30)
