"""The tokens of plain `generate` on a GPU: strategies, batches, sampling, devices of the weights."""

import copy
import importlib.util
import subprocess
import sys
from typing import Any

import pytest
import torch

from hf_specgen import Candidates, DraftModelCandidates, LayerSkipCandidates, MedusaCandidates, NgramCandidates
from tests.cuda.helpers import draft, inputs, model, same_tokens
from tests.helpers import SAMPLING, perturbed_copy
from tests.helpers.medusa import random_heads
from tests.helpers.models import fresh_model
from tests.helpers.paths import ROOT


def test_random_cases_equal_plain_generate() -> None:
    """Every strategy on the architectures of `tests/fuzz`, with random settings; tables of the run are printed."""
    command = [sys.executable, "-m", "tests.fuzz", "--cases", "200", "--seed", "cuda", "--device", "cuda"]
    subprocess.run(command, cwd=ROOT, check=True)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "qwen3", "gpt2", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("mode", SAMPLING)
def test_architecture_on_cuda_same_tokens(architecture: str, mode: str) -> None:
    """Would catch: masks, positions or noise that a kernel of the GPU reads otherwise than one of the CPU."""
    candidates = DraftModelCandidates(draft(architecture), k=3, tree=6)
    assert same_tokens(model(architecture), inputs(3), candidates, **SAMPLING[mode]).drafted > 0


def test_draft_on_the_cpu_same_tokens() -> None:
    """A draft on another device than the target's."""
    on_cpu = perturbed_copy(fresh_model("llama"))
    assert same_tokens(model(), inputs(2), DraftModelCandidates(on_cpu, k=3)).drafted > 0


def test_offloaded_target_same_tokens() -> None:
    """Would catch: tensors on the device of the weights, which is not that of the passes."""
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
    """Would catch: weights of a quantised draft model that are read as ordinary ones."""
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantized = copy.deepcopy(draft())
    quantize_(quantized, Int8WeightOnlyConfig())
    assert same_tokens(model(), inputs(2), DraftModelCandidates(quantized, k=3)).drafted > 0


# Attention kernels of a GPU: FlashAttention, flex attention, and SDPA with grouped heads in bfloat16

FLASH = "flash_attention_2"
HAS_FLASH = importlib.util.find_spec("flash_attn") is not None


def with_attention(implementation: str, architecture: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    target = fresh_model(architecture, head_dim=32, num_key_value_heads=2).to("cuda", dtype)
    target.set_attn_implementation(implementation)
    return target


def strategy(name: str, target: Any) -> Candidates:
    made: dict[str, Any] = {
        "n-grams": lambda: NgramCandidates(k=4),
        "draft model": lambda: DraftModelCandidates(draft(dtype=target.dtype), k=3),
        "layer skip": lambda: LayerSkipCandidates(1, k=3),
        "medusa": lambda: MedusaCandidates(
            random_heads(fresh_model("llama", head_dim=32, num_key_value_heads=2)).to("cuda", target.dtype)
        ),
    }
    return made[name]()


@pytest.mark.skipif(not HAS_FLASH, reason="needs flash-attn")
@pytest.mark.parametrize("name", ["n-grams", "draft model", "layer skip", "medusa"])
@pytest.mark.parametrize("batch", [1, 3])
def test_flash_attention_same_tokens(name: str, batch: int) -> None:
    """Would catch: a mask or several branches given to a kernel that takes neither."""
    target = with_attention(FLASH, dtype=torch.bfloat16)
    assert same_tokens(target, inputs(batch), strategy(name, target)).drafted > 0


@pytest.mark.parametrize("mode", SAMPLING)
@pytest.mark.parametrize("name", ["n-grams", "draft model"])
def test_flex_attention_same_tokens(name: str, mode: str) -> None:
    """Would catch: a boolean mask given to a kernel that takes a block mask."""
    target = with_attention("flex_attention")
    assert same_tokens(target, inputs(2), strategy(name, target), **SAMPLING[mode]).drafted > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_first_tokens_same(dtype: torch.dtype) -> None:
    """Rounding depends on the number of tokens of a pass, so outputs may diverge at near-ties."""
    target = model(dtype=dtype)
    given = inputs(1)
    plain = target.generate(**given, max_new_tokens=4)
    ours = target.generate(**given, max_new_tokens=4, candidate_generator=NgramCandidates(k=4))
    assert ours.tolist() == plain.tolist()
