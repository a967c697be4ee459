"""`hf-specgen tune`: the latencies that it measures, and how they are used."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from hf_specgen import AdaptiveDepth, DraftModelCandidates, NgramCandidates
from hf_specgen.depth import LatencyModel
from hf_specgen.evaluation.cost import measure_latency
from hf_specgen.heads import save_head
from tests.helpers import prompts, tiny_model
from tests.helpers.cli import run
from tests.helpers.medusa import random_heads
from tests.helpers.paths import REFERENCE_LM


def test_measure_latency_has_the_drafters_that_run_a_network() -> None:
    model = tiny_model("llama")
    latency = measure_latency(model, [NgramCandidates(), DraftModelCandidates(model, k=3)], rows=[1, 2], context=30)
    assert [(one.target.batch, one.target.context) for one in latency.buckets] == [(1, 30), (2, 30)]
    for one in latency.buckets:
        assert set(one.drafters) == {"any", "draft_model"} and one.drafters["draft_model"].seconds[0] > 0


def test_tune_writes_a_latency_file_that_a_policy_reads(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    save_head(random_heads(model, num_heads=2), tmp_path / "heads")
    latency, heads = str(tmp_path / "latency.json"), str(tmp_path / "heads")
    options = ["--heads", heads, "--context", "40", "--device", "cpu", "--latency", latency]
    printed = run("tune", str(folder / "target"), *options)
    assert "T(8)" in printed and f"AdaptiveDepth(latency='{latency}')" in printed.replace(" ", "")  # long lines wrap
    (one,) = LatencyModel.load(latency).buckets
    assert (one.target.batch, one.target.context) == (1, 40) and "medusa" in one.drafters
    policy, inputs = AdaptiveDepth(latency=latency), prompts(1)
    ours = model.generate(**inputs, max_new_tokens=8, candidate_generator=NgramCandidates(policy=policy))
    assert torch.equal(ours, model.generate(**inputs, max_new_tokens=8))
    assert "hidden size" in run("tune", str(REFERENCE_LM), "--heads", heads, exit_code=2)
