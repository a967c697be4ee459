"""`hf-specgen doctor`: static checks of good and broken models, heads and drafts, and its quick benchmark."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_specgen.cli.app import app
from hf_specgen.cli.doctor import CheckResult, DoctorSettings, Report, examine, quick_benchmark, static_checks
from hf_specgen.cli.doctor.blueprint import blueprint
from hf_specgen.cli.doctor.recommend import Speed, recommend, same_tokens, speed, verification_cost
from hf_specgen.depth.cost import CostCurve
from hf_specgen.evaluation.measure import Interval
from hf_specgen.evaluation.measure import Sample, Total
from hf_specgen.evaluation.workloads import EMBEDDED_DRAFT, EMBEDDED_HEADS, EMBEDDED_MODEL
from hf_specgen.heads.export import export_medusa
from tests.helpers import tiny_model
from tests.helpers.medusa import random_heads

MODEL, DRAFT, HEADS = str(EMBEDDED_MODEL), str(EMBEDDED_DRAFT), str(EMBEDDED_HEADS)


def results(report: Report) -> dict[str, str]:
    return {finding.subject: finding.result.value for finding in report.findings}


def checked(**settings: Any) -> Report:
    """The report of the static checks."""
    return examine(DoctorSettings(**{"model": MODEL, "run": False, **settings}))


def test_doctor_measures_and_recommends_every_strategy_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: heads that are checked, but neither measured nor recommended (defect B11)."""
    monkeypatch.setattr(quick_benchmark, "PROMPTS", quick_benchmark.PROMPTS[:1])
    command = ["doctor", "--model", MODEL, "--draft", DRAFT, "--heads", HEADS, "--max-new-tokens", "6", "--json"]
    result = CliRunner().invoke(app, [*command, "--rounds", "1"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    found = {finding["subject"]: finding for finding in report["findings"]}
    for subject in ("tokenizers", "chat template", "heads", "memory", "same tokens"):
        assert found[subject]["result"] == "good"
    assert found["draft size"]["result"] == "warning"  # half the target
    names = {"n-grams", "Medusa", "draft model", "n-grams + draft"}
    assert set(report["measured"]) == {"plain", *names} and report["measured"]["plain"]["speedup"] == 1
    for name in names:
        measured = report["measured"][name]
        assert measured["speedup_low"] <= measured["speedup"] <= measured["speedup_high"]
        assert "tokens per step" in found[name]["found"]
    assert report["recommendation"].startswith("model.generate(**inputs, candidate_generator=")


def test_doctor_without_a_run_loads_nothing_and_recommends_what_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were loaded"))
    result = CliRunner().invoke(app, ["doctor", "--model", MODEL, "--heads", HEADS, "--no-run"])
    assert result.exit_code == 0, result.output
    for text in ("✓", "target support", "memory", "MedusaCandidates(", "was not measured"):
        assert text in result.output


def test_tokenizers_of_one_size_with_two_entries_exchanged_are_bad(tmp_path: Path) -> None:
    """Would catch: comparing sizes only."""
    shutil.copytree(DRAFT, tmp_path, dirs_exist_ok=True)
    text = (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    vocabulary = json.loads(text)["model"]["vocab"]
    pair = [token for token, index in vocabulary.items() if index in (500, 501)]
    first, second = (json.dumps(token, ensure_ascii=False) for token in pair)
    swapped = text.replace(f"{first}: 500", f"{first}: 501").replace(f"{second}: 501", f"{second}: 500")
    assert swapped != text
    (tmp_path / "tokenizer.json").write_text(swapped, encoding="utf-8")
    report = checked(draft=str(tmp_path))
    assert results(report)["tokenizers"] == "bad" and not report.recommendation
    assert "must share the target's tokenizer" in report.bad[0].meaning


def test_damaged_tokenizer_is_a_finding_and_no_exception(tmp_path: Path) -> None:
    shutil.copytree(DRAFT, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    report = checked(draft=str(tmp_path))
    assert results(report)["tokenizers"] == "warning"


def test_other_chat_template_and_end_token_are_warnings(tmp_path: Path) -> None:
    shutil.copytree(DRAFT, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["eos_token"] = "a"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    found = results(checked(draft=str(tmp_path)))
    assert found["chat template"] == found["special tokens"] == "warning"
    assert found["tokenizers"] == "good"


def test_memory_that_does_not_suffice_is_bad_and_nothing_is_loaded() -> None:
    report = checked(batch_size=1_000_000, length=100_000)
    assert results(report)["memory"] == "bad" and "does not fit" in report.bad[0].meaning
    assert CliRunner().invoke(app, ["doctor", "--model", MODEL, "--batch-size", "1000000"]).exit_code == 1


def test_memory_estimate_equals_the_bytes_of_weights_and_cache() -> None:
    plan = blueprint(MODEL, "float32")
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    assert plan.weight_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    output = model(torch.ones(3, 20, dtype=torch.long), use_cache=True)
    layers = output.past_key_values.layers
    assert plan.cache_bytes(3, 20) == sum(t.numel() * t.element_size() for x in layers for t in (x.keys, x.values))
    tight = static_checks.memory([plan], 1, 20, "cpu", available=int(1.05 * plan.weight_bytes))
    assert tight.result is CheckResult.WARNING and "tight" in tight.meaning


def test_target_that_cannot_verify_trees_is_bad_with_the_reason(tmp_path: Path) -> None:
    tiny_model("bloom").save_pretrained(tmp_path)
    report = checked(model=str(tmp_path))
    assert results(report)["target support"] == "bad" and "takes no position_ids" in report.bad[0].meaning


def saved_heads(folder: Path, width: int, base: str, count: int = 3) -> str:
    """Medusa v2 heads of zeros, whose config states a wrong number of heads."""
    folder.mkdir()
    tensors = {f"{head}.0.linear.weight": torch.zeros(width, width) for head in range(count)}
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "base_model_name_or_path": base}))
    return str(folder)


def test_heads_number_is_that_of_the_tensors(tmp_path: Path) -> None:
    width = blueprint(MODEL, "float32").config.hidden_size
    report = checked(heads=saved_heads(tmp_path / "heads", width, "org/reference-lm"))
    assert {finding.subject: finding.found for finding in report.findings}["heads"] == "3 heads, layers in each: 1"
    assert not {"heads' target", "heads' base"} & results(report).keys()


@pytest.mark.parametrize("to", ["medusa", "tgi", "vllm"])
@pytest.mark.parametrize("own_outputs", [False, True])
def test_heads_of_every_format_that_can_be_loaded_are_good(
    to: str, own_outputs: bool, reference_model: Any, tmp_path: Path
) -> None:
    """Would catch: `medusa_lm_head.pt` or the names of a program called bad, with exit code 1 (defect B11)."""
    heads = random_heads(reference_model, num_heads=2, own_outputs=own_outputs)
    export_medusa(heads, tmp_path / "heads", to, reference_model)
    assert results(checked(heads=str(tmp_path / "heads")))["heads"] == "good"


def test_heads_of_another_target_are_bad(tmp_path: Path) -> None:
    width = blueprint(MODEL, "float32").config.hidden_size
    report = checked(heads=saved_heads(tmp_path / "heads", width + 8, "org/another-model"))
    assert results(report)["heads' target"] == "bad" and results(report)["heads' base"] == "warning"
    assert f"hidden size {width + 8}" in report.bad[0].meaning


def test_heads_that_are_not_there_are_bad(tmp_path: Path) -> None:
    assert results(checked(heads=str(tmp_path)))["heads"] == "bad"


@pytest.mark.parametrize(("ratio", "result"), [(1.2, "good"), (1.7, "warning"), (2.5, "warning")])
def test_verification_cost_by_ratio(ratio: float, result: str) -> None:
    assert verification_cost(CostCurve((1, 8, 16), (0.01, 0.01 * ratio, 0.03), 128, 1)).result.value == result


def test_verification_cost_of_weights_that_can_be_packed_names_the_setting() -> None:
    slow, fast = (CostCurve((1, 8, 16), (0.01, 0.01 * ratio, 0.03), 128, 1) for ratio in (2.5, 1.2))
    assert "pack_weights=True" in verification_cost(slow, packable=True).meaning
    assert "pack_weights" not in verification_cost(fast, packable=True).meaning + verification_cost(slow).meaning


def total(seconds: float, accepted: int = 5, drafted: int = 10, steps: int = 25, calls: int = 4) -> Total:
    """Several calls of 25 tokens each, in so many seconds and steps together."""
    sums = Total(steps=steps * calls, emitted=25 * calls, drafted=drafted, accepted=accepted)
    sums.samples = [Sample(25, seconds / calls, torch.zeros(1, 1), None) for _ in range(calls)]
    sums.tokens, sums.seconds = 25 * calls, seconds
    return sums


PLAIN = total(2.0)
CODES = {"n-grams": "NgramCandidates()", "draft model": "DraftModelCandidates()"}


def test_recommend_fastest_strategy_with_its_interval() -> None:
    speeds = {"n-grams": Speed.of(total(1.8), PLAIN), "draft model": Speed.of(total(1.0, steps=10), PLAIN)}
    line, reason = recommend(speeds, CODES)
    assert "DraftModelCandidates()" in line and "2.00x plain (2.00-2.00)" in reason


def test_recommend_without_a_clear_winner_is_the_cheapest_strategy() -> None:
    speeds = {"n-grams": Speed.of(total(2.0), PLAIN), "draft model": Speed.of(total(3.0), PLAIN)}
    line, reason = recommend(speeds, CODES)
    assert "NgramCandidates()" in line and "no strategy was clearly faster" in reason


def test_speedup_above_tokens_per_step_is_reported_as_impossible_and_not_recommended() -> None:
    """Would catch: "3.88x plain with 2.07 tokens a step" (defect D8)."""
    disturbed = Speed.of(total(2 / 3.88, steps=12), PLAIN)
    finding = speed("n-grams", disturbed)
    assert finding.result is CheckResult.WARNING and "not possible" in finding.meaning
    assert "3.88x plain" in finding.found and "2.08 tokens per step" in finding.found
    line, reason = recommend({"n-grams": disturbed, "draft model": Speed.of(total(1.7, steps=15), PLAIN)}, CODES)
    assert "DraftModelCandidates()" in line and "1.18x plain" in reason


def test_speedup_whose_interval_includes_1_is_not_recommended() -> None:
    """Would catch: one slow plain call taken for a speedup."""
    ours = total(1.7, steps=10)
    for sample, seconds in zip(ours.samples, (0.1, 0.7, 0.7, 0.2), strict=True):
        sample.seconds = seconds
    uncertain = Speed.of(ours, PLAIN)
    assert uncertain.interval.value > 1.05 and not uncertain.faster
    assert "no difference was shown" in speed("x", uncertain).meaning


@pytest.mark.parametrize(
    ("measured", "explanation"),
    [
        (total(3.0, accepted=0, drafted=0), "nothing was drafted"),
        (total(3.0, accepted=1), "few draft tokens are accepted"),
        (total(3.0, accepted=9), "takes too long"),
    ],
)
def test_slow_strategy_is_explained(measured: Total, explanation: str) -> None:
    assert explanation in speed("x", Speed.of(measured, PLAIN)).meaning


def test_quick_benchmark_runs_every_variant_in_every_round_after_a_whole_warm_up(monkeypatch: Any) -> None:
    """Would catch: kernels prepared, or latencies learnt, in the measured calls of one side only (defect D8)."""
    from hf_specgen.evaluation.workloads import strategies

    calls: list[tuple[int, int, list[str]]] = []

    def interleave(model: Any, batches: Any, variants: Any, generation: dict[str, Any], seed: int = 0) -> Any:
        batches = list(batches)
        calls.append((len(batches), generation["max_new_tokens"], [variant.name for variant in variants]))
        for _ in batches:
            yield {variant.name: Sample(5, 1.0, torch.zeros(1, 1), None) for variant in variants}

    monkeypatch.setattr(quick_benchmark, "interleave", interleave)
    benchmark = quick_benchmark.QuickBenchmark(MODEL, strategies(DRAFT), torch.float32, "cpu", batch=1)
    totals, plain = benchmark.run(["a", "b"], rounds=3, generation={"max_new_tokens": 7})
    names = ["plain", "n-grams", "draft model", "n-grams + draft"]
    assert calls == [(1, 7, names), (6, 7, names)]
    assert set(totals) == set(names[1:]) and len(plain.samples) == 6


@pytest.mark.parametrize(("exact", "result"), [(True, "bad"), (False, "warning")])
def test_other_tokens_are_bad_in_float32_only(exact: bool, result: str) -> None:
    assert same_tokens({"n-grams": Total(identical=False)}, exact).result.value == result


def test_interval_of_speed_is_in_the_json() -> None:
    measured = Speed(10.0, Interval(1.5, 1.2, 1.8), 2.0, 0.5, 10)
    assert (measured.to_dict()["speedup_low"], measured.to_dict()["speedup_high"]) == (1.2, 1.8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", MODEL, "--dtype", "int3"], "'int3' is not one of 'auto', 'float32'"),
        (["--model", MODEL, "--batch-size", "0"], "--batch-size"),
        (["--model", MODEL, "--temperature", "-1"], "--temperature"),
        (["--model", MODEL, "--device", "toaster"], "device 'toaster' cannot be used here"),
        (["--model", "there/is-none"], "there/is-none"),
        (["--model", "/there/is/none"], "there is no folder '/there/is/none'"),
        (["--model", MODEL, "--draft", "./none"], "there is no folder './none'"),
    ],
)
def test_doctor_bad_input_is_one_sentence_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.replace("│", " ").split())
