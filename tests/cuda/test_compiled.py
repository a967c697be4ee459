"""Compiled passes with the real compiler and CUDA graphs: the tokens of plain `generate`, call after call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hf_specgen import (
    CombinedCandidates,
    DraftModelCandidates,
    FixedDepth,
    MedusaCandidates,
    NgramCandidates,
)
from tests.cuda.helpers import draft, inputs, same_tokens
from tests.helpers import SAMPLING
from tests.helpers.medusa import random_heads
from tests.helpers.models import fresh_model


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def target() -> Any:
    return fresh_model("llama").to("cuda")


@pytest.mark.parametrize("mode", SAMPLING)
@pytest.mark.parametrize("batch", [1, 3])
def test_compiled_target_in_several_calls_same_tokens(target: Any, mode: str, batch: int) -> None:
    """Graphs are replayed in later calls, whose prompts are shorter and longer."""
    candidates = NgramCandidates(k=4, tree=8)
    for length in (12, 30, 7):
        statistics = same_tokens(target, inputs(batch, length), candidates, compile=True, **SAMPLING[mode])
        assert statistics.drafted > 0


@pytest.mark.parametrize("compile_target", [False, True])
@pytest.mark.parametrize("tree", [None, 6])
def test_compiled_draft_same_tokens(target: Any, compile_target: bool, tree: Any) -> None:
    """CUDA graphs of target and draft are replayed alternately."""
    candidates = DraftModelCandidates(draft(), k=3, tree=tree, compile=True)
    for length in (12, 20):
        statistics = same_tokens(target, inputs(1, length), candidates, compile=compile_target)
        assert statistics.drafted > 0


def test_compiled_target_with_heads_same_tokens(target: Any) -> None:
    """Heads read the hidden states of a replayed pass."""
    candidates = MedusaCandidates(random_heads(fresh_model("llama")).to("cuda"), policy=FixedDepth())
    assert same_tokens(target, inputs(2), candidates, compile=True).drafted > 0


def test_compiled_target_with_combined_drafts_same_tokens(target: Any) -> None:
    members = [NgramCandidates(), DraftModelCandidates(draft(), compile=True)]
    assert same_tokens(target, inputs(1), CombinedCandidates(members, policy=FixedDepth()), compile=True).drafted > 0


@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "gpt2", "qwen3"])
def test_compiled_architecture_same_tokens(architecture: str) -> None:
    model = fresh_model(architecture).to("cuda")
    assert same_tokens(model, inputs(2), NgramCandidates(k=4), compile=True).drafted > 0


def test_cache_of_a_compiled_call_is_not_overwritten_by_the_next(target: Any) -> None:
    """A returned cache has buffers of its own, not those that the graphs of later calls write to."""
    arguments: dict[str, Any] = {"max_new_tokens": 12, "candidate_generator": NgramCandidates(k=4), "compile": True}
    first = target.generate(**inputs(1), **arguments, return_dict_in_generate=True)
    before = [layer.keys.clone() for layer in first.past_key_values.layers]
    target.generate(**inputs(1, 20), **arguments)
    for keys, layer in zip(before, first.past_key_values.layers, strict=True):
        assert torch.equal(keys, layer.keys)
