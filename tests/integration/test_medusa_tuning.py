"""`hf-specgen tune` and `export`: what is counted, what is saved, and the tree that comes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_specgen.adaptive import Fixed
from typer.testing import CliRunner

from hf_specgen import MedusaCandidates
from hf_specgen.cli.app import app
from hf_specgen.evaluation.calibration import Counts, measure_acceptance, save_tuning
from hf_specgen.evaluation.cost import CostCurve
from hf_specgen.heads import load_medusa
from hf_specgen.heads.acceptance import CONFIDENCE_EDGES, confidence_bin
from tests.helpers import prompts, tiny_model
from tests.helpers.medusa import fitted_heads, random_heads
from tests.helpers.paths import REFERENCE_LM


def test_counts_stop_at_the_first_head_that_had_no_right_guess() -> None:
    """What later heads guessed does not matter there, and would make them look worse than they are."""
    counts = Counts(heads=3)
    counts.add([[5, 6], [7, 8], [9, 1]], [0.9, 0.3, 0.5], [6, 4, 9])
    assert counts.seen.sum(dim=1).tolist() == [1, 1, 0]
    assert counts.hits[0, confidence_bin(0.9), 1] == 1 and counts.hits[1].sum() == 0
    table = counts.acceptance().table
    assert len(table) == 3 and all(len(bins) == len(CONFIDENCE_EDGES) + 1 for bins in table)
    assert all(list(ranks) == sorted(ranks, reverse=True) for bins in table for ranks in bins)


def test_measured_acceptance_is_that_of_the_text() -> None:
    """The reference: what the heads say at every step of a plain run, compared with the text by hand."""
    model, inputs = tiny_model("llama"), prompts(1)
    heads = fitted_heads(model, inputs)
    counts = measure_acceptance(model, heads, [{**inputs, "max_new_tokens": 24}])
    assert float(counts.hits[0, :, 0].sum() / counts.seen[0].sum()) > 0.9
    random_counts = measure_acceptance(model, random_heads(model), [{**inputs, "max_new_tokens": 24}])
    assert float(random_counts.by_rank()[0, 0]) < 0.5
    assert random_counts.seen[0].sum() >= counts.seen[0].sum()  # the better the heads, the fewer the steps


def test_tuned_heads_get_other_trees(tmp_path: Path) -> None:
    model, inputs = tiny_model("llama"), prompts(1)
    heads = fitted_heads(model, inputs)
    drafted = []
    for curve in (CostCurve((1, 64), (1.0, 1.01), 256, 1), CostCurve((1, 2), (1.0, 1.9), 256, 1)):
        save_tuning(heads, measure_acceptance(model, heads, [{**inputs, "max_new_tokens": 24}]), curve)
        heads.save_pretrained(tmp_path)
        candidates = MedusaCandidates(str(tmp_path), policy=Fixed())
        ours = model.generate(**inputs, max_new_tokens=24, candidate_generator=candidates)
        assert torch.equal(ours, model.generate(**inputs, max_new_tokens=24))
        assert candidates.speculation is not None
        drafted.append(candidates.speculation.drafted)
    assert drafted[0] > drafted[1]


def test_the_tune_command(reference_model: Any, tmp_path: Path) -> None:
    random_heads(reference_model, num_heads=2).save_pretrained(tmp_path / "heads")
    rows = [{"domain": "edit", "prompt": "Fix: a b"}, {"domain": "math", "prompt": "1 + 1"}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = ["tune", str(tmp_path / "heads"), "--target", str(REFERENCE_LM), "--output", str(tmp_path / "tuned")]
    more = ["--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "6"]
    result = CliRunner().invoke(app, [*command, *more])
    assert result.exit_code == 0, result.output
    assert "T(q) / T(1)" in result.output and "tokens per step" in result.output
    tuned = load_medusa(tmp_path / "tuned", reference_model)
    assert tuned.config.acceptance is not None and tuned.config.cost is not None
    assert CostCurve(**tuned.config.cost).relative(8) > 0


def test_bad_prompts_and_heads_get_one_sentence(reference_model: Any, tmp_path: Path) -> None:
    command = ["tune", str(tmp_path), "--target", str(REFERENCE_LM), "--output", str(tmp_path / "tuned")]
    for text, message in (("{}", "line 1: expected"), ("", "has no prompts"), ('{"prompt": "x"}', "no Medusa heads")):
        (tmp_path / "prompts.jsonl").write_text(text)
        result = CliRunner().invoke(app, [*command, "--prompts", str(tmp_path / "prompts.jsonl")])
        assert result.exit_code == 2 and message in " ".join(result.output.split())
    result = CliRunner().invoke(app, [*command, "--prompts", str(tmp_path / "none.jsonl")])
    assert result.exit_code == 2 and "no such file" in " ".join(result.output.split())


@pytest.mark.parametrize("to", ["medusa", "tgi", "vllm"])
def test_the_export_command(to: str, reference_model: Any, tmp_path: Path) -> None:
    random_heads(reference_model, num_heads=2).save_pretrained(tmp_path / "heads")
    command = ["export", str(tmp_path / "heads"), "--to", to, "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*command, "--target", str(REFERENCE_LM)])
    assert result.exit_code == 0, result.output
    assert load_medusa(tmp_path / "out", reference_model).config.num_heads == 2
    failed = CliRunner().invoke(app, [*command[:3], "onnx", *command[4:]])
    assert failed.exit_code == 2 and "unknown format 'onnx'" in failed.output
