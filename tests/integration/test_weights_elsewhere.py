"""Models whose weights are offloaded, compiled or wrapped: the tokens of plain `generate`, or the true reason."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_specgen import DraftModelCandidates, FixedDepth, LayerSkipCandidates, MedusaCandidates, NgramCandidates
from tests.helpers import assert_same_tokens, perturbed_copy, prompts
from tests.helpers.medusa import random_heads
from tests.helpers.models import fresh_model

accelerate = pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")


def offloaded(kind: str, folder: Path) -> Any:
    """A model whose weights are moved to where they are used, layer by layer."""
    model = fresh_model("llama")
    if kind == "cpu":
        return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    if kind == "disk":
        accelerate.disk_offload(model, offload_dir=str(folder), execution_device=torch.device("cpu"))
        return model
    on_device = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    layers = {f"model.layers.{index}": "cpu" if index < 1 else "disk" for index in range(2)}
    return accelerate.dispatch_model(model, {**on_device, **layers}, main_device="cpu", offload_dir=str(folder))


STRATEGIES: dict[str, Callable[[], Any]] = {
    "n-grams": lambda: NgramCandidates(k=3, tree=6),
    "draft": lambda: DraftModelCandidates(fresh_model("llama"), k=3),
    "layer skip": lambda: LayerSkipCandidates(1, k=3),
    "Medusa": lambda: MedusaCandidates(random_heads(fresh_model("llama")), policy=FixedDepth()),
}


@pytest.mark.parametrize("kind", ["cpu", "disk", "device_map"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_offloaded_target_same_tokens_or_refused(kind: str, strategy: str, tmp_path: Path) -> None:
    """Would catch: inputs and masks made on the "meta" device, heads that read weights which are not there."""
    is_refused = strategy == "Medusa" and kind != "device_map"
    with pytest.raises(ValueError, match="output matrix offloaded") if is_refused else nullcontext():
        assert_same_tokens(offloaded(kind, tmp_path), prompts(2), STRATEGIES[strategy](), max_new_tokens=6)


def test_offloaded_draft_model_same_tokens() -> None:
    """Would catch: a draft whose inputs are made on the "meta" device."""
    draft = offloaded("cpu", Path())
    statistics = assert_same_tokens(
        fresh_model("llama"), prompts(2), DraftModelCandidates(draft, k=3), max_new_tokens=8
    )
    assert statistics.accepted > 0


@pytest.mark.parametrize("strategy", ["n-grams", "Medusa"])
def test_compiled_target_same_tokens(strategy: str) -> None:
    """Would catch: hooks that a compiled forward cannot trace, and a compilation in every step."""
    model, candidates = fresh_model("llama"), STRATEGIES[strategy]()
    model.compile(backend=lambda graph, inputs: pytest.fail("a pass was compiled"))
    plain = fresh_model("llama").generate(**prompts(2), max_new_tokens=8)
    assert torch.equal(plain, model.generate(**prompts(2), max_new_tokens=8, candidate_generator=candidates))


def with_lora(model: Any) -> Any:
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


def test_draft_model_with_lora_drafts_as_its_wrapper_does() -> None:
    """Would catch: a refusal for the wrapper's signature, or a draft without its adapter."""
    model = fresh_model("llama")
    draft = with_lora(perturbed_copy(model, noise=0.1))
    statistics = assert_same_tokens(model, prompts(2), DraftModelCandidates(draft, k=3), max_new_tokens=8)
    merged = DraftModelCandidates(draft.merge_and_unload(), k=3)
    assert assert_same_tokens(model, prompts(2), merged, max_new_tokens=8).accepted == statistics.accepted


def with_prefix() -> Any:
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return peft.get_peft_model(fresh_model("llama"), config).eval()


def test_prefix_tuning_is_refused() -> None:
    """Would catch: a crash inside the loop, or a draft that silently lacks its prefix."""
    with pytest.raises(ValueError, match="prefix or prompt tuning"):
        with_prefix().generate(**prompts(1), max_new_tokens=4, candidate_generator=NgramCandidates(k=3))
    with pytest.raises(ValueError, match="PREFIX_TUNING"):
        DraftModelCandidates(with_prefix(), k=3)
