"""The tokens of plain `generate` on a GPU: strategies, batches, sampling, devices of the weights."""

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch

from hf_specgen import DraftModelCandidates, LayerSkipCandidates, NgramCandidates
from tests.cuda.helpers import draft, inputs, model, same_tokens
from tests.helpers import SAMPLING, perturbed_copy
from tests.helpers.models import fresh_model
from tests.helpers.paths import ROOT


def test_random_cases_equal_plain_generate() -> None:
    """Every strategy on the architectures of `tests/fuzz`, with random settings; tables of the run are printed."""
    command = [sys.executable, "-m", "tests.fuzz", "--cases", "200", "--seed", "cuda", "--device", "cuda"]
    subprocess.run(command, cwd=ROOT, check=True)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "qwen3", "gpt2", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("mode", SAMPLING)
def test_architecture_on_cuda_same_tokens(architecture: str, mode: str) -> None:
    candidates = DraftModelCandidates(draft(architecture), k=3, tree=6)
    assert same_tokens(model(architecture), inputs(3), candidates, **SAMPLING[mode]).drafted > 0


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
