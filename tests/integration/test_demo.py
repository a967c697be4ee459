"""The command line, the README's code, and the tools behind the benchmark."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.replay import tokens_per_forward
from benchmarks.widen import widen
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_specgen import NgramCandidates
from hf_specgen.cli import demo
from hf_specgen.cli.app import app
from hf_specgen.evaluation.measure import Sample, Total
from tests.helpers.paths import REFERENCE_LM, ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
CODE_BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.S)


def test_demo_prints_identical_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(
        app, ["demo", "--prompts", "1", "--max-new-tokens", "12", "--json", str(tmp_path / "demo.json")]
    )
    assert result.exit_code == 0, result.output
    saved = json.loads((tmp_path / "demo.json").read_text())
    assert set(saved["domains"]) == {"math", "code", "edit", "json", "prose"}
    variants = [d["variants"][name] for d in saved["domains"].values() for name in demo.OURS]
    assert len(variants) == 5 * len(demo.OURS) and all(variant["identical"] for variant in variants)
    assert {"commit", "versions", "machine", "argv"} <= set(saved["provenance"])
    for domain in saved["domains"]:
        assert domain in result.output
    assert "…" not in result.output.split("One answer.")[0], "the table does not fit 80 columns"


def test_demo_with_own_prompts_in_a_batch() -> None:
    arguments = ["demo", "--model", str(REFERENCE_LM), "--prompt", "Hello there.", "--prompt", "And you?"]
    result = CliRunner().invoke(app, [*arguments, "--batch-size", "2", "--max-new-tokens", "8", "--branches", "2"])
    assert result.exit_code == 0, result.output
    assert "one row" in result.output and "n-grams" in result.output


def test_demo_fails_if_a_token_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "first_difference", lambda *_: demo.Difference(0, 9, 1, 2, 0.5, 0.25))
    result = CliRunner().invoke(app, ["demo", "--prompt", "Hello.", "--max-new-tokens", "4"])
    assert result.exit_code == 1
    assert "first difference at position 9" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "int3"], "int3"),
        (["--batch-size", "0"], "--batch-size"),
        (["--k", "0"], "k must be at least 1"),
        (["--model", "./no-such-folder"], "no-such-folder"),
    ],
)
def test_demo_with_bad_arguments(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["demo", "--prompt", "Hello.", *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_first_difference_finds_it(reference_model) -> None:
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]])
    other = ids.clone()
    other[1, 3] = 4
    plain, ours = Sample(4, 1.0, ids, None), Sample(4, 1.0, other, None)
    found = demo.first_difference(reference_model, plain, ours)
    assert (found.row, found.position, found.plain_token, found.our_token) == (1, 3, 9, 4)
    assert demo.first_difference(reference_model, plain, plain) is None


def test_totals_are_sums_of_tokens_over_sums_of_time() -> None:
    ids = torch.zeros(1, 2)
    fast, slow = Sample(10, 1.0, ids, None), Sample(10, 4.0, ids, None)
    total = Total()
    total.add(fast, fast)
    total.add(slow, slow)
    assert total.tokens_per_second == 4.0  # and not 6.25, the mean of the rates


def test_widened_model_writes_the_same_tokens(reference_model) -> None:
    wide = widen(reference_model, 30_000_000)
    assert sum(p.numel() for p in wide.parameters()) == pytest.approx(30_000_000, rel=0.01)
    ids = torch.randint(5, 8000, (2, 20))
    arguments = {"max_new_tokens": 40, "do_sample": False}
    assert torch.equal(wide.generate(ids, **arguments), reference_model.generate(ids, **arguments))
    with pytest.raises(ValueError, match="parameters must be at least"):
        widen(reference_model, 1000)


def test_replay_counts_forward_passes() -> None:
    """A text that repeats its prompt: a whole draft with the prompt's own pass, and the rest with another."""
    scripts = [([1, 2, 3, 4, 5, 6, 7, 8, 1], [2, 3, 4, 5, 6, 7, 8, 1, 2])]
    assert tokens_per_forward(scripts, 16, dict) == 1.0
    assert tokens_per_forward(scripts, 16, lambda: {"candidate_generator": NgramCandidates(k=7)}) == 4.5


@pytest.mark.parametrize("section", ["lookup", "traces"])
def test_benchmark_sections_run(section: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.core", section, "--quick", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    saved = json.loads((tmp_path / f"{section}.json").read_text())
    assert saved["rows"] and saved["provenance"]["versions"]["torch"] == torch.__version__


def test_readme_code_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    """The first block alone, and then all blocks in order: what a newcomer would paste."""
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in CODE_BLOCKS:
        exec(compile(block, "README.md", "exec"), names)
    assert "tokens per step" in capsys.readouterr().out
    assert (tmp_path / "acceptance.png").stat().st_size > 1000


def test_readme_names_the_commands_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for command in re.findall(r"^make (\w+)", README, flags=re.M):
        assert f"\n{command}:" in makefile
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_contributing_example_is_lossless() -> None:
    block = re.search(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.S).group(1)
    names: dict = {}
    exec(compile(block, "CONTRIBUTING.md", "exec"), names)
    model = AutoModelForCausalLM.from_pretrained(REFERENCE_LM, dtype=torch.float32)
    ids = torch.randint(5, 8000, (2, 9))
    arguments = {"max_new_tokens": 30, "attention_mask": torch.ones_like(ids)}
    ours = model.generate(ids, **arguments, candidate_generator=names["RepeatCandidates"]())
    assert torch.equal(ours, model.generate(ids, **arguments))
