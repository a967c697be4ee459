"""A draft model or head with n-grams: its passes are left out only where n-grams are expected to be faster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_specgen import AdaptiveDepth, CombinedCandidates, DraftModelCandidates, EagleCandidates, NgramCandidates
from hf_specgen.candidates import Candidates
from hf_specgen.depth import CostCurve, LatencyModel
from hf_specgen.evaluation.workloads import EMBEDDED_DRAFT, EMBEDDED_EAGLE

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


def _latency(draft_token: float) -> LatencyModel:
    curve = CostCurve((1, 64), (1.0, 1.5), context=512, batch=1)
    return LatencyModel.from_curves(curve, draft_token=draft_token)


@pytest.mark.parametrize("network", [DraftModelCandidates(str(EMBEDDED_DRAFT)), EagleCandidates(str(EMBEDDED_EAGLE))])
def test_slow_network_is_left_out_of_copied_text(network: Candidates, reference_model: Any, tokenizer: Any) -> None:
    """Would catch: a network that drafts in every step, and other tokens after steps in which it did not."""
    lines = "".join(f"    total += weights[{one}] * values[{one}]  # term {one}\n" for one in range(12))
    prompt = f"def weighted(weights, values):\n    total = 0\n{lines}    return total\n\n\n" * 2
    settings = {**tokenizer(prompt, return_tensors="pt"), "min_new_tokens": 200, "max_new_tokens": 200}
    settings["do_sample"] = False
    expected = reference_model.generate(**settings)
    passes = {}
    for cost in (0.01, 0.6):
        combined = CombinedCandidates([NgramCandidates(k=8), network], policy=AdaptiveDepth(_latency(cost)))
        assert reference_model.generate(**settings, candidate_generator=combined).tolist() == expected.tolist()
        passes[cost] = [bool(step.drafter) for step in combined.speculation.passes]
    fast, slow = (sum(drafted) / len(drafted) for drafted in passes.values())
    assert slow < 0.5
    assert fast > 1.4 * slow
