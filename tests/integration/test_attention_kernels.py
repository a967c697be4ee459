"""Targets with other attention kernels than SDPA: flex attention, and kernels that take no mask (FlashAttention).

FlashAttention does not run on a CPU: a stand-in computes what it does, and refuses what it does not take.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from hf_specgen import (
    CombinedCandidates,
    DraftModelCandidates,
    FixedDepth,
    LayerSkipCandidates,
    MedusaCandidates,
    NgramCandidates,
)
from tests.helpers import SAMPLING, Oracle, assert_same_tokens, prompts, shared_draft, tiny_model
from tests.helpers.medusa import random_heads
from tests.helpers.models import SHARED, fresh_model

STAND_IN = "flash_stand_in"


def stand_in(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as FlashAttention computes it without a mask: causal, aligned at the last key."""
    assert attention_mask is None, "the kernel takes no mask"
    queries, keys = query.shape[2], key.shape[2]
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    mask = distance >= 0
    if sliding_window is not None:
        mask &= distance < sliding_window
    output = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    return output.transpose(1, 2).contiguous(), None


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    AttentionInterface.register(STAND_IN, stand_in)
    AttentionMaskInterface.register(STAND_IN, flash_attention_mask)


@cache
def with_kernel(implementation: str, architecture: str = "llama") -> Any:
    """A model that runs this kernel, shared by the tests: never change it."""
    model = fresh_model(architecture)
    model.config._attn_implementation = implementation  # the method for it looks for a kernel of that name on the Hub
    SHARED.add(model)
    return model


FLASH_STRATEGIES: dict[str, Callable[[], Any]] = {
    "n-grams": lambda: NgramCandidates(k=4, tree=8),
    "draft model": lambda: DraftModelCandidates(shared_draft(tiny_model("llama")), k=3, tree=6),
    "combined": CombinedCandidates,
    "layer skip": lambda: LayerSkipCandidates(1, k=2),
    "Medusa": lambda: MedusaCandidates(random_heads(tiny_model("llama")), policy=FixedDepth()),
    "oracle": lambda: partial(Oracle, accuracy=1.0, k=3),
}


@pytest.mark.parametrize("strategy", FLASH_STRATEGIES)
@pytest.mark.parametrize("mode", SAMPLING)
def test_flash_target_with_every_strategy_same_tokens(strategy: str, mode: str) -> None:
    """Would catch: a tree that reaches the kernel, which would read it as a chain; drafts from the prompt alone that
    are not passed on."""
    candidates = FLASH_STRATEGIES[strategy]()
    statistics = assert_same_tokens(with_kernel(STAND_IN), prompts(1), candidates, max_new_tokens=12, **SAMPLING[mode])
    if strategy == "oracle":
        assert [step.accepted for step in statistics.rows[0]] == [3, 3, 3]


@pytest.mark.parametrize("architecture", ["mistral", "gemma3_text"])
def test_flash_target_with_sliding_windows_same_tokens(architecture: str) -> None:
    """Would catch: a window that is counted from dropped slots, and masks of several kinds that are left out."""
    model = with_kernel(STAND_IN, architecture)
    assert_same_tokens(model, prompts(1, 40), NgramCandidates(k=4), max_new_tokens=80)


def test_flash_target_with_batch_refused() -> None:
    """Would catch: rows that accept different numbers of tokens, which a kernel without a mask mixes up."""
    with pytest.raises(ValueError, match=r"flash_stand_in takes no mask.* one prompt at a time"):
        with_kernel(STAND_IN).generate(**prompts(2), max_new_tokens=4, candidate_generator=NgramCandidates(k=2))


def test_flash_draft_model_refused() -> None:
    with pytest.raises(ValueError, match="load the draft with attn_implementation='sdpa'"):
        tiny_model("llama").generate(
            **prompts(1), max_new_tokens=4, candidate_generator=DraftModelCandidates(with_kernel(STAND_IN), k=2)
        )


def test_flex_target_with_trees_same_tokens() -> None:
    """Would catch: a mask of the wrong kind, and a step without a mask, which flex attention would not make causal."""
    model = with_kernel("flex_attention", "gemma3_text")
    candidates = DraftModelCandidates(shared_draft(tiny_model("gemma3_text")), k=3, tree=6)
    with torch.compiler.set_stance("force_eager"):  # Transformers compiles the kernel; uncompiled it computes the same
        assert assert_same_tokens(model, prompts(2), candidates, max_new_tokens=8).accepted > 0
