"""Compiled passes with the compiler that users run, inductor."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from hf_specgen import DraftModelCandidates
from hf_specgen.targets.compilable import CPU_COMPILER
from tests.helpers import perturbed_copy, prompts
from tests.helpers.models import fresh_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which(CPU_COMPILER) is None, reason="no C++ compiler"),
]


@pytest.fixture(scope="module")
def target() -> Any:
    return fresh_model("llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def candidates(target: Any) -> DraftModelCandidates:
    """A draft model whose passes, as those of the target, are compiled by the first call for all of the file."""
    return DraftModelCandidates(perturbed_copy(target), k=3, compile=True)


@pytest.mark.parametrize("mode", [{}, {"do_sample": True, "top_k": 20}], ids=["greedy", "sampled"])
def test_inductor_draft_and_target_same_tokens(
    mode: dict[str, Any], target: Any, candidates: DraftModelCandidates
) -> None:
    """Would catch: a function that the compiler gets wrong, and one that is compiled again in a later call."""
    for length in (12, 30, 30):
        torch.manual_seed(5)
        plain = target.generate(**prompts(1, length), max_new_tokens=16, **mode)
        torch.manual_seed(5)
        output = target.generate(
            **prompts(1, length),
            max_new_tokens=16,
            candidate_generator=candidates,
            compile=True,
            return_dict_in_generate=True,
            **mode,
        )
        assert torch.equal(plain, output.sequences)
        assert output.speculation.accepted > 0
    assert "compile" not in output.speculation.seconds
