"""The tokens of plain `generate` on a GPU: strategies, batches, sampling, devices of the weights."""

import copy
from typing import Any

import pytest
import torch

from hf_specgen import (
    Candidates,
    CombinedCandidates,
    DraftModelCandidates,
    FixedDepth,
    LayerSkipCandidates,
    MedusaCandidates,
    NgramCandidates,
    NgramHistory,
    RecyclingCandidates,
)
from tests.cuda.helpers import draft, inputs, model, same_tokens
from tests.helpers import SAMPLING, perturbed_copy
from tests.helpers.medusa import random_heads
from tests.helpers.models import VOCAB, fresh_model


def strategy(name: str, architecture: str = "llama") -> Candidates:
    made: dict[str, Any] = {
        "n-grams": lambda: NgramCandidates(k=4),
        "history": lambda: NgramCandidates(history=NgramHistory()),
        "recycling": lambda: RecyclingCandidates(),
        "draft chain": lambda: DraftModelCandidates(draft(architecture), k=3),
        "draft tree": lambda: DraftModelCandidates(draft(architecture), k=3, tree=6),
        "layer skip": lambda: LayerSkipCandidates(1, k=3),
        "medusa": lambda: MedusaCandidates(random_heads(fresh_model(architecture)).to("cuda"), policy=FixedDepth()),
        "combined": lambda: CombinedCandidates(
            [NgramCandidates(), DraftModelCandidates(draft(architecture))], policy=FixedDepth()
        ),
        "combined default": CombinedCandidates,
    }
    return made[name]()


NAMES = (
    "n-grams",
    "history",
    "recycling",
    "draft chain",
    "draft tree",
    "layer skip",
    "medusa",
    "combined",
    "combined default",
)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("mode", SAMPLING)
@pytest.mark.parametrize("name", NAMES)
def test_strategy_on_cuda_same_tokens(name: str, mode: str, batch: int) -> None:
    statistics = same_tokens(model(), inputs(batch), strategy(name), **SAMPLING[mode])
    assert statistics.drafted > 0


@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "qwen3", "gpt2", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("mode", SAMPLING)
def test_architecture_on_cuda_same_tokens(architecture: str, mode: str) -> None:
    target = model(architecture)
    candidates = DraftModelCandidates(perturbed_copy(fresh_model(architecture)).to("cuda"), k=3, tree=6)
    assert same_tokens(target, inputs(2), candidates, **SAMPLING[mode]).drafted > 0


def test_rejection_sampling_on_cuda_gives_tokens_of_the_vocabulary() -> None:
    arguments = {"candidate_generator": strategy("draft tree"), "verification": "rejection", "do_sample": True}
    ids = model().generate(**inputs(3), max_new_tokens=24, **arguments)
    assert ids.shape[1] == 12 + 24
    assert ids.min() >= 0 and ids.max() < VOCAB


def test_draft_on_the_cpu_same_tokens() -> None:
    """A draft on another device than the target's."""
    on_cpu = perturbed_copy(fresh_model("llama"))
    assert same_tokens(model(), inputs(2), DraftModelCandidates(on_cpu, k=3)).drafted > 0


def test_offloaded_target_same_tokens() -> None:
    from accelerate import cpu_offload

    target = cpu_offload(fresh_model("llama"), execution_device=torch.device("cuda"))
    assert same_tokens(target, inputs(2), NgramCandidates(k=3)).drafted > 0
    assert same_tokens(target, inputs(1), LayerSkipCandidates(1, k=3)).drafted > 0


def test_target_on_two_devices_same_tokens() -> None:
    """Layers on the GPU and on the CPU, as `device_map` places a model that does not fit."""
    from accelerate import dispatch_model

    target = fresh_model("llama")
    places: dict[str, Any] = {"model.embed_tokens": 0, "model.norm": "cpu", "lm_head": "cpu", "model.rotary_emb": 0}
    places |= {
        f"model.layers.{number}": 0 if number < 1 else "cpu" for number in range(target.config.num_hidden_layers)
    }
    target = dispatch_model(target, device_map=places, main_device=0)
    assert same_tokens(target, inputs(2), NgramCandidates(k=3)).drafted > 0


def test_quantized_draft_on_cuda_same_tokens() -> None:
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantized = copy.deepcopy(draft())
    quantize_(quantized, Int8WeightOnlyConfig())
    assert same_tokens(model(), inputs(2), DraftModelCandidates(quantized, k=3)).drafted > 0


def test_cache_of_a_call_on_cuda_continues() -> None:
    """The cache that a speculative call returns serves the next turn, plain and speculative."""
    given = inputs(1)
    first = model().generate(
        **given, max_new_tokens=8, candidate_generator=NgramCandidates(k=3), return_dict_in_generate=True
    )
    text = torch.cat([first.sequences, given["input_ids"][:, :2]], dim=1)
    cache, another = first.past_key_values, copy.deepcopy(first.past_key_values)
    whole = model().generate(text, max_new_tokens=12)
    plain = model().generate(text, max_new_tokens=12, past_key_values=another)
    ours = model().generate(text, max_new_tokens=12, past_key_values=cache, candidate_generator=NgramCandidates(k=3))
    assert ours.tolist() == plain.tolist() == whole.tolist()
