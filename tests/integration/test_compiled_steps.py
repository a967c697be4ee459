"""Compiled passes: the tokens of plain `generate`, few compilations, and refusals that name the true reason.

Most tests trace with the backend "eager", which runs the traced operations without compiling them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hf_specgen import DraftModelCandidates, NgramCandidates
from hf_specgen.target import compiled
from tests.helpers import assert_same_tokens, perturbed_copy, prompts
from tests.helpers.models import fresh_model


class Backend:
    """Runs traced graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    counting = Backend()
    monkeypatch.setattr(compiled, "BACKEND", counting)
    yield counting
    torch._dynamo.reset()


def small(architecture: str = "llama", **overrides: Any) -> Any:
    return fresh_model(architecture, num_hidden_layers=2, **overrides)


@pytest.mark.parametrize("batch", [1, 3])
def test_compiled_draft_model_same_tokens(batch: int, backend: Backend) -> None:
    """Would catch: padding tokens that are seen by others, and a compilation in every step."""
    model = small()
    candidates = DraftModelCandidates(perturbed_copy(model), k=3, compile=True)
    statistics = assert_same_tokens(model, prompts(batch), candidates, max_new_tokens=16)
    assert statistics.accepted > 0
    assert 1 <= backend.graphs <= 2
    before = backend.graphs
    assert_same_tokens(model, prompts(batch, length=20), candidates, max_new_tokens=12)
    assert backend.graphs == before


@pytest.mark.parametrize("batch", [1, 3])
def test_compiled_target_same_tokens(batch: int, backend: Backend) -> None:
    """Would catch: masks of the wrong width, slots of the wrong row, accepted paths that are not kept."""
    model = small()
    candidates = NgramCandidates(k=4, branches=2)
    statistics = assert_same_tokens(model, prompts(batch), candidates, compile=True, max_new_tokens=16)
    assert backend.graphs >= 1 
