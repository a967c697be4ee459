"""`hf-specgen doctor`: static checks of good and broken models, heads and drafts, and its measurements."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from typer.testing import CliRunner

import hf_specgen
from hf_specgen import AutoCandidates, NgramCandidates
from hf_specgen.call_statistics import RowStep, Statistics
from hf_specgen.cli import checkpoints, doctor
from hf_specgen.cli.__main__ import app
from hf_specgen.cli.doctor import Report, examine
from hf_specgen.cli.settings import DoctorSettings
from hf_specgen.depth import CostCurve
from hf_specgen.evaluation.measure import Comparison, Sample, Variant
from hf_specgen.evaluation.workloads import BUNDLED_DRAFT, BUNDLED_HEADS, BUNDLED_MODEL, Strategy
from hf_specgen.heads.source import Source
from tests.helpers import tiny_model
from tests.helpers.encoder_decoder import encoder_decoder
from tests.helpers.head_fixtures import FIXTURES
from tests.helpers.models import stateful_model

MODEL, DRAFT, HEADS = str(BUNDLED_MODEL), str(BUNDLED_DRAFT), str(BUNDLED_HEADS)


def results(report: Report) -> dict[str, str]:
    return {finding.subject: finding.result for finding in report.findings}


def checked(**settings: Any) -> Report:
    """The report of the static checks."""
    return examine(DoctorSettings(**{"model": MODEL, "run": False, **settings}))


def test_doctor_measures_and_recommends_every_strategy_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: heads that are checked, but neither measured nor recommended; the default strategy left out."""
    calls: list[int] = []
    generate = GenerationMixin.generate

    def recorded(model: Any, *arguments: Any, **settings: Any) -> Any:
        if "candidate_generator" in settings or "streamer" in settings:
            calls.append(id(settings.get("candidate_generator")))
        return generate(model, *arguments, **settings)

    monkeypatch.setattr(GenerationMixin, "generate", recorded)
    command = ["doctor", MODEL, "--draft", DRAFT, "--heads", HEADS, "--max-new-tokens", "6", "--json", "--prompt", "A"]
    result = CliRunner().invoke(app, [*command, "--rounds", "2", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    found = {finding["subject"]: finding for finding in report["findings"]}
    for subject in ("tokenizers", "chat template", "heads", "same tokens"):
        assert found[subject]["result"] == "good"
    assert found["draft size"]["result"] == "warning"  # half the target
    # N-grams with their defaults are the preset "throughput", and measured once.
    names = ["plain", "auto", "throughput", "memory", "draft model", "n-grams + draft", "Medusa"]
    once, others = calls[: len(names)], calls[len(names) :]
    assert len(set(once)) == len(names) and once[0] == id(None), "a whole warm-up of every variant"
    turns = [*once, once[0], *once[2:], once[1]]
    assert others[: 2 * len(names)] == turns, "plain first, then the others in turns"
    rounds, rest = divmod(len(others), len(names))
    assert 2 <= rounds <= 6 and not rest, "more rounds while undecided, at most three times as many"
    assert set(report["measured"]) == set(names) and report["measured"]["plain"]["speedup"] == 1
    for name in names[1:]:
        measured = report["measured"][name]
        assert measured["speedup_low"] <= measured["speedup"] <= measured["speedup_high"]
        assert measured["code"] and isinstance(measured["note"], str)
    # What pays depends on the machine at this moment: one of the lines is recommended, and every one of them runs.
    lines = [doctor.LINE.format(report["measured"][name]["code"]) for name in names[1:]]
    assert report["recommendation"] in [*lines, "model.generate(**inputs)"]
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    inputs = {"input_ids": torch.arange(5, 12)[None], "max_new_tokens": 2}
    for line in {*lines, report["recommendation"]}:
        assert eval(line, {**vars(hf_specgen), "model": model, "inputs": inputs}).shape[1] > 7


def test_variants_on_cuda_are_level_with_and_without_graphs() -> None:
    """Would catch: graphs on one side of a comparison only, as if drafting had made the difference."""
    found = [doctor.Strategy("auto", '"auto"', NgramCandidates())]
    codes, variants = doctor._variants(found, "cuda:0")
    assert [one.name for one in variants] == ["plain", "auto", "graphs, no drafts", "auto, eager"]
    assert codes["auto, eager"] == '"auto", compile=False' and variants[3].arguments()["compile"] is False
    assert len(doctor._variants(found, "cpu")[1]) == 2


def test_doctor_without_a_run_loads_nothing_and_recommends_what_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: weights of gigabytes loaded for static checks."""
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", lambda *_, **__: pytest.fail("weights were loaded"))
    result = CliRunner().invoke(app, ["doctor", MODEL, "--heads", HEADS, "--no-run"])
    assert result.exit_code == 0, result.output
    for text in ("✓", "target support", f"AutoCandidates.from_pretrained('{HEADS}')", "was not measured", "torch 2"):
        assert text in " ".join(result.output.split())


def test_doctor_without_a_run_recommends_the_first_draft_without_a_warning() -> None:
    """Would catch: the draft that was named last, here one of half the target's size, in the line of code."""
    first, last = (checked(draft=drafts) for drafts in ([DRAFT, HEADS], [HEADS, DRAFT]))
    assert first.recommendation == last.recommendation
    assert f"AutoCandidates.from_pretrained('{HEADS}')" in first.recommendation
    assert "first draft without a warning" in first.reason


def test_verification_cost_names_passes_and_the_least_acceptance() -> None:
    """Would catch: a ratio beside the wrong number of tokens."""
    finding = doctor.verification_cost(CostCurve((1, 2, 8), (0.05, 0.06, 0.1), context=64, batch=4))
    assert finding.found == "T(1) 50.0 ms; relative to it: T(2) 1.20, T(8) 2.00 (batch size 4)"
    assert finding.meaning.startswith("drafts are faster from an acceptance rate of ")


def test_doctor_prints_names_with_brackets(tmp_path: Path) -> None:
    """Would catch: a part of a folder's name that is read as a style, and is missing in the recommended line."""
    draft = shutil.copytree(DRAFT, tmp_path / "draft[small]")
    result = CliRunner().invoke(app, ["doctor", MODEL, "--draft", str(draft), "--no-run"])
    assert f"AutoCandidates.from_pretrained('{draft}')" in result.output, result.output


def exchange_two_tokens(folder: Path) -> None:
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    vocabulary = json.loads(text)["model"]["vocab"]
    first, second = (json.dumps(t, ensure_ascii=False) for t, index in vocabulary.items() if index in (500, 501))
    swapped = text.replace(f"{first}: 500", f"{first}: 501").replace(f"{second}: 501", f"{second}: 500")
    assert swapped != text
    (folder / "tokenizer.json").write_text(swapped, encoding="utf-8")


def test_draft_with_another_tokenizer_and_template_is_a_warning(tmp_path: Path) -> None:
    """Would catch: a supported pair called bad, so that nothing is measured; sizes alone do not show it."""
    template, tokens = (shutil.copytree(DRAFT, tmp_path / name) for name in ("template", "tokens"))
    (template / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    report = results(checked(draft=(str(template),)))
    assert (report["tokenizers"], report["chat template"]) == ("good", "warning")
    exchange_two_tokens(tokens)
    other = checked(draft=(str(tokens),))
    assert results(other)["tokenizers"] == "warning" and other.recommendation
    assert any("100% of those of sample texts" in finding.found for finding in other.findings)


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        (lambda: encoder_decoder("t5"), "the draft T5ForConditionalGeneration an encoder-decoder"),
        (lambda: stateful_model("lfm2"), "keeps a state that draft trees cannot branch from"),
    ],
)
def test_draft_that_every_call_refuses_is_bad(draft: Callable[[], Any], words: str, tmp_path: Path) -> None:
    """Would catch: a draft that is recommended by the static checks, or ends the doctor without a report."""
    draft().save_pretrained(tmp_path)
    (bad, *_) = checked(draft=(str(tmp_path),)).bad
    assert bad.subject == "draft support" and words in bad.meaning


def test_problems_end_with_exit_code_1_and_no_weights_are_loaded(tmp_path: Path) -> None:
    """Would catch: a problem that is printed and yet ends with success."""
    tiny_model("bloom").save_pretrained(tmp_path)
    report = checked(model=str(tmp_path))
    assert results(report)["target support"] == "bad" and "takes no position_ids" in report.bad[0].meaning
    assert CliRunner().invoke(app, ["doctor", str(tmp_path)]).exit_code == 1


@pytest.mark.parametrize("name", ["eagle3_original", "dflash_zlab", "speculators_peagle_llama", "medusa_v1"])
def test_draft_head_of_this_target_is_good_and_of_another_bad(name: str) -> None:
    """Would catch: a head of another target that is found out by its first call only."""
    fixture = FIXTURES[name]
    head = str(fixture.head_folder)
    candidates = AutoCandidates.from_pretrained(head)
    found = checkpoints.heads(candidates, Source(head), checkpoints.without_weights(Source(str(fixture.target_folder))))
    assert found[0].result == "good" and "parameters" in found[0].found
    assert not any(finding.result == "bad" for finding in found)
    others = checkpoints.heads(candidates, Source(head), checkpoints.without_weights(Source(DRAFT)))
    assert any(one.result == "bad" and "made for a target" in one.meaning for one in others)


def in_rounds(device: str, **rounds: list[float]) -> Comparison:
    """Three requests of 10 and more tokens in several rounds; by variant the time of a round, that of plain is 1.

    On a CPU other processes double the times of every second call, but not those in which the thread runs.
    """
    measured = Comparison([Variant(name, dict) for name in rounds], requests=3)
    measured.device = device
    counts = Statistics([[RowStep(4, 4, 3, 4)] * 5])
    for name, times in rounds.items():
        for number, seconds in enumerate(one for one in times for _ in range(3)):
            request, wall = number % 3, seconds * (1 + (device == "cpu" and number % 2))
            tokens = 10 * (1 + request)
            measured.samples[name].append(Sample(tokens, tokens * wall, torch.zeros(1), counts, 0.0, tokens * seconds))
    return measured


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("fastest", "ngram", "draft", "reason"),
    [
        # One of five rounds of the fastest one is disturbed: by the sums of all rounds the other one is faster.
        ("draft", [0.6] * 5, [0.5, 0.5, 1.5, 0.5, 0.5], "the fastest of hf_specgen's strategies: 2.00x plain"),
        ("ngram", [0.5, 0.5, 0.5, 1.9, 0.5], [0.6] * 5, "the fastest of hf_specgen's strategies: 2.00x plain"),
        # No difference that these rounds show: the simpler one, or plain `generate`.
        ("ngram", [0.51, 0.5, 0.52, 0.5, 0.51], [0.5, 0.5, 0.5, 0.51, 0.5], "as fast as draft and simpler"),
        ("plain", [0.99, 1.02, 0.99, 1.0, 0.99], [1.1] * 5, "no strategy was clearly faster than plain"),
        ("ngram", [0.95] * 5, [1.5] * 5, "the fastest of hf_specgen's strategies: 1.05x plain"),
        # A difference of 2% in every round, and one of 6% that is not certain.
        ("draft", [0.51] * 5, [0.5] * 5, "the fastest of hf_specgen's strategies: 2.00x plain (2.00-2.00)"),
        ("draft", [0.53, 0.49, 0.54, 0.53, 0.49], [0.5] * 5, "the fastest of hf_specgen's strategies: 2.00x plain"),
    ],
)
def test_recommendation_on_a_machine_whose_load_changes(
    device: str, fastest: str, ngram: list[float], draft: list[float], reason: str
) -> None:
    """Would catch: decisions by sums of time, or by wall times of a CPU; a tie that goes to the more complex one."""
    measured = in_rounds(device, plain=[1.0] * 5, ngram=ngram, draft=draft)
    found, why = doctor.recommend(measured, ["ngram", "draft"])
    assert found == fastest and reason in why
    speeds = {name: measured.tokens_per_second(name) for name in ("plain", "ngram", "draft")}
    assert speeds[found] >= 0.97 * max(speeds.values())


def test_recommendation_only_of_what_was_shown() -> None:
    """Would catch: a strategy recommended of which nothing was accepted; an interval made from one measurement."""
    measured = in_rounds("cuda", plain=[1.0] * 5, ngram=[0.5] * 5)
    assert not doctor.undecided(measured, ["ngram"])
    for number, sample in enumerate(measured.samples["ngram"]):
        measured.samples["ngram"][number] = replace(sample, speculation=Statistics([[RowStep(4, 4, 0, 1)] * 5]))
    assert doctor.recommend(measured, ["ngram"])[0] == "plain"
    assert not doctor.undecided(measured, ["ngram"]), "more rounds cannot decide it"
    assert doctor.undecided(in_rounds("cuda", plain=[1.0, 1.1, 1.0], ngram=[0.9, 1.2, 1.0]), ["ngram"])
    single = in_rounds("cuda", plain=[1.0], ngram=[0.5])
    for samples in single.samples.values():
        del samples[1:]
    assert "which shows no interval" in doctor.recommend(single, ["ngram"])[1]


def test_strategies_that_draft_alike_are_measured_once() -> None:
    """Would catch: a preset and n-grams, which are the same strategy, measured twice with different results."""
    found = [Strategy("throughput", '"throughput"', NgramCandidates()), Strategy("n-grams", "N()", NgramCandidates())]
    other = Strategy("k", "N(k=3)", NgramCandidates(k=3))
    assert doctor.distinct([*found, other]) == [found[0], other]


@pytest.mark.parametrize("kind", ["t5", "whisper"])
def test_any_class_of_models_that_generate_is_checked(kind: str, tmp_path: Path) -> None:
    """Would catch: an encoder-decoder loaded as a causal language model."""
    model = encoder_decoder(kind)
    model.save_pretrained(tmp_path)
    report = checked(model=str(tmp_path), draft=(str(tmp_path),))
    assert all(one.found.startswith(type(model).__name__) and one.result == "good" for one in report.findings[1:3])
    assert report.recommendation.count(f"AutoCandidates.from_pretrained('{tmp_path}')") == 1
