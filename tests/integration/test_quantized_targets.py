"""Targets that `from_pretrained` quantizes, by each library that is installed and runs on a CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from tests.helpers.models import prompts, tiny_model
from tests.helpers.oracle import ORACLES


def _torchao() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return transformers.TorchAoConfig(Int8WeightOnlyConfig())


def _bitsandbytes(**settings: Any) -> Any:
    return transformers.BitsAndBytesConfig(**settings)


QUANTIZED: dict[str, tuple[str, Callable[[], Any]]] = {
    "torchao_int8": ("torchao", _torchao),
    "bitsandbytes_4_bit": (
        "bitsandbytes",
        lambda: _bitsandbytes(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32),
    ),
    "bitsandbytes_8_bit": ("bitsandbytes", lambda: _bitsandbytes(load_in_8bit=True)),
    "quanto_int8": ("optimum", lambda: transformers.QuantoConfig(weights="int8")),
}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_target_same_tokens(kind: str, tmp_path: Path) -> None:
    """Would catch: a target that is refused or drafts other tokens because its layers are not ordinary ones."""
    library, settings = QUANTIZED[kind]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    # Blocks of 64 weights divide each layer.
    tiny_model("llama", intermediate_size=128).save_pretrained(tmp_path)
    loading = {"quantization_config": settings(), "device_map": "cpu", "dtype": torch.float32}
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, **loading)
    call: dict[str, Any] = {"max_new_tokens": 14, "return_dict_in_generate": True, "pad_token_id": 0}
    plain = model.generate(**prompts(3), **call).sequences
    oracle = ORACLES["tree"](plain[:, prompts(3)["input_ids"].shape[1] :])
    output = model.generate(**prompts(3), **call, candidate_generator=oracle)
    assert torch.equal(output.sequences, plain) and output.speculation.accepted > 0
