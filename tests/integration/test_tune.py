"""`hf-specgen tune`: the acceptance of heads and the latencies that it measures, and how they are used."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_specgen import AdaptiveDepth, DraftModelCandidates, MedusaCandidates, NgramCandidates
from hf_specgen.depth import LatencyModel
from hf_specgen.evaluation.calibration import Counts, measure_acceptance, save_acceptance
from hf_specgen.evaluation.cost import measure_latency
from hf_specgen.heads import load_medusa
from hf_specgen.heads.medusa import CONFIDENCE_EDGES, confidence_bin
from tests.helpers import prompts, tiny_model
from tests.helpers.medusa import fitted_heads, random_heads
from tests.helpers.paths import REFERENCE_LM
from tests.integration.test_commands import run


def test_counts_stop_at_the_first_head_whose_tokens_are_all_wrong() -> None:
    """Would catch: later heads counted where their tokens could not have been accepted."""
    counts = Counts(heads=3)
    counts.add([[5, 6], [7, 8], [9, 1]], [0.9, 0.3, 0.5], [6, 4, 9])
    assert counts.seen.sum(dim=1).tolist() == [1, 1, 0]
    assert counts.hits[0, confidence_bin(0.9), 1] == 1 and counts.hits[1].sum() == 0
    table = counts.acceptance().table
    assert len(table) == 3 and all(len(bins) == len(CONFIDENCE_EDGES) + 1 for bins in table)
    assert all(list(ranks) == sorted(ranks, reverse=True) for bins in table for ranks in bins)


def test_measured_acceptance_is_high_for_fitted_heads_and_read_by_the_next_call(tmp_path: Path) -> None:
    model, inputs = tiny_model("llama"), prompts(1)
    heads = fitted_heads(model, inputs)
    counts = measure_acceptance(model, heads, [{**inputs, "max_new_tokens": 24}])
    assert float(counts.hits[0, :, 0].sum() / counts.seen[0].sum()) > 0.9
    random_counts = measure_acceptance(model, random_heads(model), [{**inputs, "max_new_tokens": 24}])
    assert float(random_counts.by_rank()[0, 0]) < 0.5
    assert random_counts.seen[0].sum() >= counts.seen[0].sum()  # the better the heads, the fewer the steps
    save_acceptance(heads, counts)
    heads.save_pretrained(tmp_path)
    assert load_medusa(tmp_path, model).config.acceptance == heads.config.acceptance
    ours = model.generate(**inputs, max_new_tokens=24, candidate_generator=MedusaCandidates(str(tmp_path), tree=8))
    assert torch.equal(ours, model.generate(**inputs, max_new_tokens=24))


def test_measure_latency_has_the_drafters_that_run_a_network() -> None:
    model = tiny_model("llama")
    latency = measure_latency(model, [NgramCandidates(), DraftModelCandidates(model, k=3)], rows=[1, 2], context=30)
    assert [(one.target.batch, one.target.context) for one in latency.buckets] == [(1, 30), (2, 30)]
    for one in latency.buckets:
        assert set(one.drafters) == {"any", "draft_model"} and one.drafters["draft_model"].seconds[0] > 0


@pytest.fixture
def heads_and_prompts(folder: Path, tmp_path: Path) -> tuple[str, str]:
    """Heads of a tiny target, and prompts: how long a pass takes plays no part here."""
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    random_heads(model, num_heads=2).save_pretrained(tmp_path / "heads")
    rows = [{"domain": "edit", "prompt": "Fix: a b"}, {"domain": "math", "prompt": "1 + 1"}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(tmp_path / "heads"), str(tmp_path / "prompts.jsonl")


def test_tune_saves_acceptance_with_heads_and_a_latency_file(
    heads_and_prompts: tuple[str, str], folder: Path, tmp_path: Path
) -> None:
    heads, file = heads_and_prompts
    output, latency = str(tmp_path / "tuned"), str(tmp_path / "latency.json")
    options = ["--output", output, "--prompts", file, "--max-new-tokens", "6", "--context", "40", "--device", "cpu"]
    printed = run("tune", str(folder / "target"), "--heads", heads, *options, "--latency", latency)
    assert "acceptance of each head's tokens" in printed
    assert "T(8)" in printed and f"AdaptiveDepth(latency='{latency}')" in printed.replace(" ", "")  # long lines wrap
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    assert load_medusa(output, model).config.acceptance is not None
    (one,) = LatencyModel.load(latency).buckets
    assert (one.target.batch, one.target.context) == (1, 40) and "medusa" in one.drafters
    policy, inputs = AdaptiveDepth(latency=latency), prompts(1)
    ours = model.generate(**inputs, max_new_tokens=8, candidate_generator=NgramCandidates(policy=policy))
    assert torch.equal(ours, model.generate(**inputs, max_new_tokens=8))


def test_tune_with_heads_of_another_target_measures_nothing(
    heads_and_prompts: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_specgen.cli.tune.measure_latency", lambda *_, **__: pytest.fail("measured"))
    assert "hidden size" in run("tune", str(REFERENCE_LM), "--heads", heads_and_prompts[0], exit_code=2)


@pytest.mark.parametrize(
    ("text", "message"), [("{}", "line 1: expected"), ("", "has no prompts"), ('{"prompt": "x"}', "not a checkpoint")]
)
def test_tune_bad_prompts_or_heads_are_one_sentence(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(text)
    command = ["tune", str(REFERENCE_LM), "--heads", str(tmp_path), "--output", str(tmp_path / "tuned")]
    assert message in run(*command, "--prompts", str(tmp_path / "prompts.jsonl"), exit_code=2)
    assert "there is no file" in run(*command, "--prompts", str(tmp_path / "none.jsonl"), exit_code=2)
