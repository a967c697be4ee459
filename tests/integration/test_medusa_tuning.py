"""`hf-specgen tune`, `export` and `profile`: what is measured, what is stored, and how it is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_specgen.evaluation.latency import measure_profile, measure_slice
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_specgen import AdaptiveDepth, DraftModelCandidates, MedusaCandidates, NgramCandidates
from hf_specgen.cli import tune
from hf_specgen.cli.app import app
from hf_specgen.depth import profiles
from hf_specgen.evaluation import latency
from hf_specgen.evaluation.calibration import Counts, measure_acceptance, save_acceptance
from hf_specgen.heads import load_medusa
from hf_specgen.heads.medusa import CONFIDENCE_EDGES, confidence_bin
from tests.helpers import prompts, tiny_model
from tests.helpers.medusa import fitted_heads, random_heads
from tests.helpers.paths import REFERENCE_LM


def run(*arguments: str, exit_code: int = 0) -> str:
    """The output of a command, with single spaces."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == exit_code, result.output
    return " ".join(result.output.split())


def test_counts_stop_at_the_first_head_whose_tokens_are_all_wrong() -> None:
    """Would catch: later heads counted where their tokens could not have been accepted."""
    counts = Counts(heads=3)
    counts.add([[5, 6], [7, 8], [9, 1]], [0.9, 0.3, 0.5], [6, 4, 9])
    assert counts.seen.sum(dim=1).tolist() == [1, 1, 0]
    assert counts.hits[0, confidence_bin(0.9), 1] == 1 and counts.hits[1].sum() == 0
    table = counts.acceptance().table
    assert len(table) == 3 and all(len(bins) == len(CONFIDENCE_EDGES) + 1 for bins in table)
    assert all(list(ranks) == sorted(ranks, reverse=True) for bins in table for ranks in bins)


def test_measure_acceptance_is_high_for_fitted_heads_and_low_for_random_ones() -> None:
    model, inputs = tiny_model("llama"), prompts(1)
    counts = measure_acceptance(model, fitted_heads(model, inputs), [{**inputs, "max_new_tokens": 24}])
    assert float(counts.hits[0, :, 0].sum() / counts.seen[0].sum()) > 0.9
    random_counts = measure_acceptance(model, random_heads(model), [{**inputs, "max_new_tokens": 24}])
    assert float(random_counts.by_rank()[0, 0]) < 0.5
    assert random_counts.seen[0].sum() >= counts.seen[0].sum()  # the better the heads, the fewer the steps


def test_save_acceptance_is_read_by_the_next_call(tmp_path: Path) -> None:
    model, inputs = tiny_model("llama"), prompts(1)
    heads = fitted_heads(model, inputs)
    counts = measure_acceptance(model, heads, [{**inputs, "max_new_tokens": 24}])
    save_acceptance(heads, counts)
    heads.save_pretrained(tmp_path)
    assert load_medusa(tmp_path, model).config.acceptance == heads.config.acceptance
    ours = model.generate(**inputs, max_new_tokens=24, candidate_generator=MedusaCandidates(str(tmp_path), tree=8))
    assert torch.equal(ours, model.generate(**inputs, max_new_tokens=24))


@pytest.fixture
def target(folder: Path) -> Path:
    """A tiny target with a tokenizer: how long a pass takes plays no part here."""
    return folder / "target"


@pytest.fixture
def heads_and_prompts(target: Path, tmp_path: Path) -> tuple[str, str]:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    random_heads(model, num_heads=2).save_pretrained(tmp_path / "heads")
    rows = [{"domain": "edit", "prompt": "Fix: a b"}, {"domain": "math", "prompt": "1 + 1"}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(tmp_path / "heads"), str(tmp_path / "prompts.jsonl")


def test_tune_command_saves_acceptance_with_heads_and_stores_profiles(
    heads_and_prompts: tuple[str, str], target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latency, "MEDIAN_WINDOW", 1)  # times of each size; how exact they are plays no part
    heads, file = heads_and_prompts
    output = str(tmp_path / "tuned")
    options = ["--output", output, "--prompts", file, "--max-new-tokens", "6", "--context", "40", "--batch-size", "1"]
    printed = run("tune", str(target), "--heads", heads, *options)
    assert "acceptance of each head's tokens" in printed and "expected tokens per step" in printed
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    assert load_medusa(output, model).config.acceptance is not None
    kinds = sorted((key.split("-")[0], latency.description["samples"]) for key, latency in stored().items())
    assert kinds == [("medusa", False), ("medusa", True), ("ngram", False), ("ngram", True)]
    medusa = next(latency for key, latency in stored().items() if key.startswith("medusa"))
    assert output in medusa.description["strategy"], "the profile is that of the heads that were written"


def test_tune_command_in_its_earlier_form_tunes_the_same(
    heads_and_prompts: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was written before latency profiles: `tune HEADS --target MODEL`."""
    heads, file = heads_and_prompts
    seen: list[Any] = []
    monkeypatch.setattr(tune, "tune_heads", lambda settings, *_: seen.append(settings) or "")
    monkeypatch.setattr(tune, "strategies", lambda *_: [])
    run("tune", heads, "--target", str(REFERENCE_LM), "--output", str(tmp_path / "tuned"), "--prompts", file)
    assert (seen[0].model, seen[0].heads) == (str(REFERENCE_LM), heads)


def stored() -> dict[str, Any]:
    return profiles.list_profiles()


@pytest.mark.parametrize("rows", [1, 3])
def test_measure_profile_is_the_one_that_calls_use(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a profile under a key that no call looks up, or at a size that they take for another."""
    model, candidates = tiny_model("llama"), NgramCandidates()
    key = measure_profile(model, candidates, rows=[rows], context=30, sample=False)
    (one,) = profiles.load(key).slices
    assert one.target.batch in (1, 4) and one.target.context == 512 and list(one.drafters) == ["ngram"]
    assert max(one.target.queries) >= candidates.k
    from hf_specgen.depth.controller import AdaptiveSession

    used = []
    plan = AdaptiveSession._make_plan
    monkeypatch.setattr(
        AdaptiveSession, "_make_plan", lambda self, *rest: used.append(self.latency.slices) or plan(self, *rest)
    )
    model.generate(**prompts(rows), max_new_tokens=20, candidate_generator=candidates)
    assert used[0] == (one,)  # later rows end, and fewer rows are another slice
    assert AdaptiveDepth(profiles.directory() / f"{key}.json").latency.slices == (one,)


def test_measure_slice_of_a_draft_model_has_its_passes_and_leaves_the_random_state(reference_model: Any) -> None:
    model = tiny_model("llama")
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    one = measure_slice(model, DraftModelCandidates(model, k=3), rows=2, context=64, sample=True)
    assert torch.equal(before, torch.random.get_rng_state())
    drafter = one.drafters["draft_model"]
    assert min(drafter.seconds) > 0 and drafter.prefill >= 0 and one.target.batch == 2
    assert all(later >= one.target.seconds[0] for later in one.target.seconds)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": 0, "context": 8}, "rows must be at least 1, got 0"),
        ({"rows": 1, "context": 0}, "context must be at least 1, got 0"),
        ({"rows": 1, "context": 10**6}, "positions"),
    ],
)
def test_measure_slice_bad_size_is_a_value_error(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure_slice(tiny_model("llama"), NgramCandidates(), sample=False, **arguments)


def test_profile_commands_list_show_export_and_delete(tmp_path: Path) -> None:
    assert "no latency profiles" in run("profile", "list")
    key = measure_profile(tiny_model("llama"), NgramCandidates(k=4), context=30, sample=True)
    assert key in run("profile", "list").replace(" ", "") and "sampled" in run("profile", "list")
    shown = run("profile", "show", key)
    assert "T(8)" in shown and "threads" in shown and "LlamaForCausalLM" in shown
    run("profile", "export", key, str(tmp_path / "profile.json"))
    assert AdaptiveDepth(tmp_path / "profile.json").latency.slices == profiles.load(key).slices
    assert f"deleted {key}" in run("profile", "delete", key)
    assert profiles.load(key) is None


@pytest.mark.parametrize("command", [["show"], ["export"], ["delete"]])
@pytest.mark.parametrize("key", ["none", "../none", "/etc/passwd"])
def test_profile_command_with_an_unknown_key_is_one_sentence(command: list[str], key: str, tmp_path: Path) -> None:
    more = [str(tmp_path / "out.json")] if command == ["export"] else []
    printed = run("profile", *command, key, *more, exit_code=2)
    assert printed.startswith("error:") and key in printed and not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("text", "message"), [("{}", "line 1: expected"), ("", "has no prompts"), ('{"prompt": "x"}', "no Medusa heads")]
)
def test_tune_command_bad_prompts_or_heads_are_one_sentence(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(text)
    command = ["tune", str(REFERENCE_LM), "--heads", str(tmp_path), "--output", str(tmp_path / "tuned")]
    assert message in run(*command, "--prompts", str(tmp_path / "prompts.jsonl"), exit_code=2)
    assert "there is no file" in run(*command, "--prompts", str(tmp_path / "none.jsonl"), exit_code=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "int3"], "'int3' is not one of"),
        (["--output", "somewhere"], "name them with --heads"),
        (["--context", "100000"], "positions"),
    ],
)
def test_tune_command_bad_option_is_one_sentence(arguments: list[str], message: str) -> None:
    assert message in run("tune", str(REFERENCE_LM), *arguments, exit_code=2).replace("│ ", "")


@pytest.mark.parametrize("to", ["medusa", "tgi", "vllm"])
def test_export_command_writes_every_format(to: str, reference_model: Any, tmp_path: Path) -> None:
    random_heads(reference_model, num_heads=2).save_pretrained(tmp_path / "heads")
    command = ["export", str(tmp_path / "heads"), "--to", to, "--output", str(tmp_path / "out")]
    run(*command, "--target", str(REFERENCE_LM))
    assert load_medusa(tmp_path / "out", reference_model).config.num_heads == 2
    assert "unknown format 'onnx'" in run(*command[:3], "onnx", *command[4:], exit_code=2)
