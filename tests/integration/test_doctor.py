"""The doctor on good and broken pairs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from hf_specgen.cli.app import app
from hf_specgen.cli.doctor import CheckResult, DoctorSettings, Report, examine
from hf_specgen.cli.doctor import recommend as advice
from hf_specgen.cli.doctor import static_checks as paper
from hf_specgen.cli.doctor.blueprint import blueprint
from hf_specgen.evaluation.cost import CostCurve
from hf_specgen.evaluation.measure import Total
from hf_specgen.evaluation.workloads import EMBEDDED_DRAFT, EMBEDDED_MODEL
from tests.helpers import tiny_model

MODEL, DRAFT = str(EMBEDDED_MODEL), str(EMBEDDED_DRAFT)


def _verdicts(report: Report) -> dict[str, str]:
    return {finding.subject: finding.verdict.value for finding in report.findings}


def _on_paper(**settings) -> Report:
    return examine(DoctorSettings(**{"model": MODEL, "run": False, **settings}))


def test_a_good_pair_measured() -> None:
    result = CliRunner().invoke(app, ["doctor", "--model", MODEL, "--draft", DRAFT, "--max-new-tokens", "24", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    verdicts = {finding["subject"]: finding["verdict"] for finding in report["findings"]}
    assert verdicts["tokenizers"] == verdicts["chat template"] == verdicts["memory"] == "good"
    assert verdicts["same tokens"] == "good" and verdicts["draft size"] == "warning"  # half the target
    assert set(report["measured"]) == {"plain", "n-grams", "draft model", "n-grams, draft model"}
    assert report["measured"]["plain"]["speedup"] == 1
    assert report["recommendation"].startswith("model.generate(**inputs, candidate_generator=")


def test_the_table_is_readable_and_nothing_is_loaded_without_a_run() -> None:
    result = CliRunner().invoke(app, ["doctor", "--model", MODEL, "--no-run"])
    assert result.exit_code == 0
    for text in ("✓", "target support", "memory", "NgramCandidates()", "it was not measured"):
        assert text in result.output


def test_wrong_tokenizer(tmp_path: Path) -> None:
    """The same size, two entries exchanged: only a comparison of the entries can tell."""
    shutil.copytree(DRAFT, tmp_path, dirs_exist_ok=True)
    text = (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    vocabulary = json.loads(text)["model"]["vocab"]
    pair = [token for token, index in vocabulary.items() if index in (500, 501)]
    first, second = (json.dumps(token, ensure_ascii=False) for token in pair)
    swapped = text.replace(f"{first}: 500", f"{first}: 501").replace(f"{second}: 501", f"{second}: 500")
    assert swapped != text
    (tmp_path / "tokenizer.json").write_text(swapped, encoding="utf-8")
    report = _on_paper(draft=str(tmp_path))
    assert _verdicts(report)["tokenizers"] == "bad" and not report.recommendation
    assert "must share the target's tokenizer" in report.bad[0].meaning


def test_another_template_and_end_token(tmp_path: Path) -> None:
    shutil.copytree(DRAFT, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["eos_token"] = "a"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    verdicts = _verdicts(_on_paper(draft=str(tmp_path)))
    assert verdicts["chat template"] == verdicts["special tokens"] == "warning"
    assert verdicts["tokenizers"] == "good"


def test_no_memory() -> None:
    """Told from the configuration: a million rows are not tried out."""
    report = _on_paper(batch_size=1_000_000, length=100_000)
    assert _verdicts(report)["memory"] == "bad" and "does not fit" in report.bad[0].meaning
    assert CliRunner().invoke(app, ["doctor", "--model", MODEL, "--batch-size", "1000000"]).exit_code == 1


def test_memory_is_that_of_the_tensors() -> None:
    """The estimate against a model and a cache that are really there."""
    plan = blueprint(MODEL, "float32")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    assert plan.weight_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    output = model(torch.ones(3, 20, dtype=torch.long), use_cache=True)
    layers = output.past_key_values.layers
    assert plan.cache_bytes(3, 20) == sum(t.numel() * t.element_size() for x in layers for t in (x.keys, x.values))
    tight = paper.memory([plan], 1, 20, "cpu", available=int(1.05 * plan.weight_bytes))
    assert tight.verdict is CheckResult.WARNING and "tight" in tight.meaning


def test_a_model_that_cannot_verify_trees(tmp_path: Path) -> None:
    tiny_model("bloom").save_pretrained(tmp_path)
    report = _on_paper(model=str(tmp_path))
    assert _verdicts(report)["target support"] == "bad" and "takes no position_ids" in report.bad[0].meaning


def _heads(folder: Path, width: int, base: str) -> str:
    folder.mkdir()
    tensors = {f"{head}.0.linear.weight": torch.zeros(width, width) for head in range(3)}
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "base_model_name_or_path": base}))
    return str(folder)


def test_heads(tmp_path: Path) -> None:
    """The number of heads is that of the tensors (the config says 2); heads of another width or base are noticed."""
    width = blueprint(MODEL, "float32").config.hidden_size
    good = _on_paper(heads=_heads(tmp_path / "good", width, "org/reference-lm"))
    assert _verdicts(good)["heads"] == "good" and "3 heads" in [f.found for f in good.findings]
    assert "heads' size" not in _verdicts(good) and "heads' base" not in _verdicts(good)
    wrong = _on_paper(heads=_heads(tmp_path / "wrong", width + 8, "org/another-model"))
    assert _verdicts(wrong)["heads' size"] == "bad" and _verdicts(wrong)["heads' base"] == "warning"
    (tmp_path / "empty").mkdir()
    assert _verdicts(_on_paper(heads=str(tmp_path / "empty")))["heads"] == "bad"


def test_the_readme_and_the_doctor_follow_one_tree() -> None:
    text = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"Up to {advice.CHEAP_WIDTH:g}:" in text and f"Up to {advice.DEAR_WIDTH:g}:" in text
    assert f"at least {advice.CLEAR - 1:.0%}\n" in text
    widths = {1.2: "good", 1.7: "warning", 2.5: "warning"}
    for ratio, verdict in widths.items():
        assert advice.width(CostCurve((1, 8, 16), (0.01, 0.01 * ratio, 0.03), 128, 1)).verdict.value == verdict


def _total(tokens: int, seconds: float, accepted: int = 5) -> Total:
    return Total(tokens=tokens, seconds=seconds, steps=tokens, emitted=tokens, drafted=10, accepted=accepted)


def test_the_recommendation_is_what_was_fastest() -> None:
    codes = {"n-grams": "NgramCandidates()", "draft model": "DraftModelCandidates()"}
    faster = {"plain": _total(100, 2.0), "n-grams": _total(100, 1.8), "draft model": _total(100, 1.0)}
    line, why = advice.recommend(faster, "plain", codes)
    assert "DraftModelCandidates()" in line and "2.00x" in why
    nothing = {"plain": _total(100, 2.0), "n-grams": _total(100, 2.0), "draft model": _total(100, 3.0)}
    line, why = advice.recommend(nothing, "plain", codes)
    assert "NgramCandidates()" in line and "nothing was clearly faster" in why
    assert "few guesses are right" in advice.speed("x", _total(100, 3.0, accepted=1), nothing["plain"]).meaning
    assert "costs as much as they save" in advice.speed("x", _total(100, 3.0), nothing["plain"]).meaning


def test_bad_input() -> None:
    runner = CliRunner()
    for arguments in (["--dtype", "int3"], ["--batch-size", "0"], ["--temperature", "-1"]):
        assert runner.invoke(app, ["doctor", "--model", MODEL, *arguments]).exit_code == 2
    missing = runner.invoke(app, ["doctor", "--model", "there/is-none"])
    assert missing.exit_code == 2 and "error:" in missing.output
