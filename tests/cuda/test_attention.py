"""Attention kernels of a GPU: FlashAttention, flex attention, and SDPA with grouped heads in bfloat16."""

import importlib.util
from typing import Any

import pytest
import torch

from hf_specgen import Candidates, DraftModelCandidates, LayerSkipCandidates, MedusaCandidates, NgramCandidates
from tests.cuda.helpers import draft, inputs, model, same_tokens
from tests.helpers import SAMPLING
from tests.helpers.medusa import random_heads
from tests.helpers.models import fresh_model

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
    target = with_attention(FLASH, dtype=torch.bfloat16)
    assert same_tokens(target, inputs(batch), strategy(name, target)).drafted > 0


@pytest.mark.parametrize("mode", SAMPLING)
@pytest.mark.parametrize("name", ["n-grams", "draft model"])
def test_flex_attention_same_tokens(name: str, mode: str) -> None:
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
