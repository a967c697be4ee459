"""A draft head with n-grams: its passes are left out only where n-grams are expected to be faster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_specgen import AdaptiveDepth, CombinedCandidates, EagleCandidates, NgramCandidates
from hf_specgen.evaluation.workloads import EMBEDDED_EAGLE

GPU_LIKE = Path(__file__).parents[2] / "benchmarks" / "profiles" / "gpu_like.json"
PROMPTS = ("def add(x, y):", "Once upon a time, in a small town")


@pytest.mark.parametrize("prompt", PROMPTS)
def test_head_with_ngrams_has_nearly_as_many_tokens_per_step_as_alone(
    prompt: str, reference_model: Any, tokenizer: Any
) -> None:
    policy, inputs = AdaptiveDepth(GPU_LIKE), tokenizer(prompt, return_tensors="pt")
    settings = {**inputs, "max_new_tokens": 64, "do_sample": False, "return_dict_in_generate": True}
    alone = EagleCandidates(str(EMBEDDED_EAGLE), policy=policy)
    combined = CombinedCandidates([NgramCandidates(), EagleCandidates(str(EMBEDDED_EAGLE))], policy=policy)
    steps = [
        reference_model.generate(**settings, candidate_generator=one).speculation.steps for one in (alone, combined)
    ]
    assert steps[1] <= 1.25 * steps[0]
