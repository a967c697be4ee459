"""A whole benchmark: what it counts, how it stops and goes on, several processes, bad input, the page."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import runner, summary
from benchmarks.journal import Journal, JournalError
from benchmarks.results import differing, result
from benchmarks.runner import choose, run
from benchmarks.strategies import Family
from benchmarks.synthetic import synthetic
from hf_specgen import benchmark
from hf_specgen.cli import app
from hf_specgen.cost import CostCurve
from tests.bench_run import SMALL
from tests.conftest import ROOT


def quiet() -> Console:
    return Console(quiet=True)


def test_every_part_is_measured(finished) -> None:
    outcome, found, _ = finished
    assert {r["section"] for r in outcome.records} == {"tuning", "domains", "batch", "temperature", "context"}
    assert set(found["tables"]) == {
        "speed", "acceptance", "latency", "limits", "cost", "tuning", "batch", "temperature", "context", "traces",
        "synthetic",
    }  # fmt: skip
    names = {row["contender"].split()[0] for row in found["tables"]["speed"]}
    assert names == {"plain", "n-grams", "prompt", "layer", "assistant_early_exit"}
    assert outcome.curve is not None and outcome.curve.queries[-1] == 32


def test_ours_writes_the_tokens_of_plain_decoding(finished) -> None:
    outcome, found, _ = finished
    ours = [r for r in outcome.records if "steps" in r]
    assert len(ours) > 20 and all(r["identical"] for r in ours)
    assert differing(outcome) == [] and "differences" not in found["tables"]


def test_all_sides_have_the_same_tokens_to_write(finished) -> None:
    """Nobody is measured on more or fewer answers: greedy domains give the same count for everybody."""
    outcome, _, _ = finished
    rounds: dict[str, set[int]] = {}
    for r in outcome.records:
        if r["cell"] == "edit":
            rounds.setdefault(r["unit"], set()).add(r["tokens"])
    assert rounds and all(len(counts) == 1 for counts in rounds.values())


def test_counts_are_those_of_the_steps(finished) -> None:
    """The first token of an answer may come from the prompt alone, all others come from steps."""
    outcome, _, _ = finished
    for r in outcome.records:
        if "steps" in r:
            answers = r["rows"] * (2 if (r["section"], r["cell"]) == ("domains", "chat") else 1)
            assert 0 <= r["tokens"] - sum(emitted for *_, emitted in r["steps"]) <= answers


def test_settings_are_chosen_by_sums_over_all_tuning_prompts() -> None:
    """Setting b is faster on the short prompt, a over both together."""
    family = Family("x", {"a": dict, "b": dict}, ours=True)
    measured = [("a", 100, 10.0), ("a", 10, 2.0), ("b", 100, 20.0), ("b", 10, 0.1)]
    records = [{"section": "tuning", "contender": f"x {s}", "tokens": t, "seconds": d} for s, t, d in measured]
    assert choose([family], records) == {"x": "a"}


def cell_of(**columns: Any) -> summary.Cell:
    count = len(columns["seconds"])
    made = [
        {"cell": "c", "number": n, "tokens": 10, "identical": True, "sampled": False, "seconds": columns["seconds"][n]}
        for n in range(count)
    ]
    plain = [{**record, "seconds": columns["plain"][record["number"]]} for record in made]
    return summary.Cell("c", "ours", made, plain)


def test_verdicts() -> None:
    (faster,) = summary.speed([cell_of(seconds=[1.0, 1.1, 0.9, 1.0], plain=[2.0, 2.1, 1.9, 2.0])], "domain")
    assert faster["verdict"] == "faster" and faster["speedup"] == pytest.approx(2.0) and faster["low"] > 1.9
    (unsure,) = summary.speed([cell_of(seconds=[1.0, 3.0, 1.0, 3.0], plain=[1.5, 2.0, 2.0, 2.0])], "domain")
    assert unsure["verdict"] == "no difference" and unsure["low"] < 1 < unsure["high"]
    (few,) = summary.speed([cell_of(seconds=[1.0, 1.0], plain=[2.0, 2.0])], "domain")
    assert few["verdict"] == "too few requests" and "low" not in few


def test_repeats_of_a_prompt_are_one_request() -> None:
    """Ten repeats of the same two prompts say no more about other prompts than two do."""
    once = cell_of(seconds=[1.0, 2.0], plain=[2.0, 2.0])
    often = summary.Cell("c", "ours", once.records * 10, once.plain * 10)
    assert often.requests == 2
    assert often.speedup.low == pytest.approx(once.speedup.low)


def test_limits_follow_the_formulas() -> None:
    """Of two pairs of drafts of 4 one is accepted, one stops at its first guess: alpha = 8 / (8 + 2)."""
    steps = [[4, 4, 4, 5], [4, 4, 0, 1], [4, 4, 4, 5], [4, 4, 0, 1]]
    times = {"forward": 0.04, "draft": 0.016}
    base = {"cell": "c", "number": 0, "tokens": 12, "identical": True, "sampled": False}
    ours = {**base, "seconds": 0.08, "steps": steps, "times": times}
    curve = CostCurve((1, 8), (0.01, 0.01), context=1, batch=1)
    (row,) = summary.limits([summary.Cell("c", "ours", [ours], [{**base, "seconds": 0.12}])], curve)
    assert row["alpha"] == pytest.approx(0.8) and row["tokens/step"] == 3.0
    assert row["expected"] == pytest.approx(1 + 0.8 + 0.64 + 0.512 + 0.4096)
    assert row["limit"] == pytest.approx(3 * 0.01 / 0.014)
    assert row["of limit"] == pytest.approx(1.5 / row["limit"])


def test_synthetic_acceptance_comes_out_as_it_went_in() -> None:
    """40 texts of 200 tokens: about 2,500 drafts at alpha 0.8, a standard error of 0.03 tokens a step."""
    for row in synthetic(40, alphas=(0.0, 0.8, 1.0), batches=(1,)):
        assert row["tokens/step"] == pytest.approx(row["expected"], abs=0.2)
        assert row["alpha found"] == pytest.approx(row["alpha"], abs=0.03)
        assert row["loop, ms a step"] > 0


def test_interrupted_run_keeps_its_records_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(SMALL, strategies=("ngram",), domains=("edit",), batches=(), temperatures=(), contexts=())
    plan = replace(plan, repeats=4, trace_texts=0, seed=7)
    rounds: list[int] = []
    seeds: list[int] = []
    race = runner.race

    def interrupted(*arguments: Any, **options: Any) -> Any:
        rounds.append(1)
        if len(rounds) == 5:  # one to warm up, one to tune, two of the four repeats
            raise KeyboardInterrupt
        seeds.append(arguments[4])
        return race(*arguments, **options)

    monkeypatch.setattr(runner, "race", interrupted)
    first = run(plan, tmp_path, quiet())
    assert first is not None and "interrupted" in first.notes[-1]
    kept = {r["unit"] for r in first.records}
    assert len([unit for unit in kept if unit.startswith("domains")]) == 2
    assert seeds == [0, 7, 7, 1007]  # the warm-up, the tuning prompt, two repeats of one prompt
    assert "speed" in result(first)["tables"]
    monkeypatch.setattr(runner, "race", race)
    second = run(plan, tmp_path, quiet(), resume=True)
    assert second is not None and {r["unit"] for r in second.records if r["section"] == "domains"} == {
        f"domains/edit/0/{repeat}" for repeat in range(4)
    }
    old = {(r["unit"], r["contender"]): r["seconds"] for r in first.records}
    again = {(r["unit"], r["contender"]): r["seconds"] for r in second.records}
    assert len(again) == len(second.records) and all(again[key] == seconds for key, seconds in old.items())


def test_journal(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="nothing to resume"):
        Journal(tmp_path / "none", SMALL, resume=True)
    Journal(tmp_path, SMALL).add("a/b/0/0", [{"x": 1}])
    file = tmp_path / "records-0.jsonl"
    file.write_text(file.read_text() + '{"unit": "half')
    resumed = Journal(tmp_path, SMALL, rank=1, resume=True)
    assert "a/b/0/0" in resumed and len(resumed.old) == 1
    with pytest.raises(JournalError, match="measured with other options"):
        Journal(tmp_path, replace(SMALL, seed=5), resume=True)
    assert Journal(tmp_path, SMALL).old == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategies", "magic"], "unknown strategy 'magic'"),
        (["--strategies", "medusa=./no-heads"], "medusa"),
        (["--domains", "poetry"], "there is no domain 'poetry'"),
        (["--peers", "vllm"], "unknown peer 'vllm'"),
        (["--model", "./no-such-folder"], "no-such-folder"),
        (["--prompts", "0"], "prompts must be at least 1, got 0"),
        (["--dtype", "int3"], "int3"),
        (["--batches", "1,x"], "'x'"),
        (["--resume"], "nothing to resume"),
        (["--domains", "gsm8k-hub"], "no domain is left to measure"),
        (["--domains", "rag", "--max-new-tokens", "2100"], "no prompt of domain 'rag' fits"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, tmp_path: Path) -> None:
    outcome = CliRunner().invoke(app, ["bench", *arguments, "--out", str(tmp_path / "out")])
    assert outcome.exit_code == 2, outcome.output
    assert message in re.sub(r"\s+", " ", outcome.output)


def test_without_network_the_local_domains_still_run(tmp_path: Path) -> None:
    plan = replace(SMALL, strategies=("ngram",), peers=(), domains=("gsm8k-hub", "edit"), repeats=1, trace_texts=0)
    outcome = run(replace(plan, batches=(), temperatures=(), contexts=()), tmp_path, quiet())
    assert outcome is not None and {r["cell"] for r in outcome.records} == {"edit"}
    assert "gsm8k-hub" in outcome.notes[0] and "no network" in outcome.notes[0]


def test_model_without_a_chat_template(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(ROOT / "benchmarks" / "assets" / "reference-lm", model)
    (model / "chat_template.jinja").unlink()
    plan = replace(SMALL, model=str(model), strategies=("ngram",), peers=(), domains=("edit", "chat"), trace_texts=0)
    outcome = run(replace(plan, batches=(), temperatures=(), contexts=()), tmp_path / "out", quiet())
    assert outcome is not None and {r["cell"] for r in outcome.records} == {"edit"}
    assert "has no chat template" in outcome.notes[0] and "'chat' has several turns" in outcome.notes[1]


def test_a_different_token_fails_the_run(finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, _, _ = finished
    difference = {"row": 0, "position": 9, "plain_token": 1, "our_token": 2, "plain_logit": 0.5, "our_logit": 0.25}
    bad = [
        {**r, "identical": False, "difference": difference} if "steps" in r and r["cell"] == "edit" else r
        for r in outcome.records
    ]
    monkeypatch.setattr(runner, "run", lambda *_, **__: replace(outcome, records=bad))
    ended = CliRunner().invoke(app, ["bench", "--out", str(tmp_path)])
    assert ended.exit_code == 1 and "tokens differ from plain decoding" in ended.output
    rows = json.loads((tmp_path / "report.json").read_text())["tables"]["differences"]
    assert rows[0]["position"] == 9 and rows[0]["logit margin"] == 0.25


def test_two_processes_share_the_prompts(tmp_path: Path) -> None:
    # `--cpu` starts one process only, whatever the number (accelerate 1.15); this is its launcher of several.
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["--main_process_port", "29611", "benchmarks/run.py", "--strategies", "ngram", "--peers", ""]
    command += ["--domains", "edit,json", "--prompts", "2", "--repeats", "1", "--max-new-tokens", "4", "--batches", ""]
    command += ["--temperatures", "", "--contexts", "", "--traces", "0", "--out", str(tmp_path)]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr[-2000:]
    shards = [file.read_text().splitlines()[1:] for file in sorted(tmp_path.glob("records-*.jsonl"))]
    units = [{json.loads(line)["unit"] for line in lines} for lines in shards]
    assert len(units) == 2 and all(units) and not units[0] & units[1]
    measured = {unit for unit in units[0] | units[1] if unit.startswith("domains")}
    assert measured == {f"domains/{domain}/{number}/0" for domain in ("edit", "json") for number in (0, 1)}
    saved = json.loads((tmp_path / "report.json").read_text())
    over_all = [row for row in saved["tables"]["speed"] if row["domain"] == "all" and row["contender"] != "plain"]
    assert len(over_all) == 1 and "low" in over_all[0]  # 4 requests, from both processes


def test_installed_package_says_where_the_benchmark_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(benchmark, "REPOSITORY", tmp_path)
    with pytest.raises(SystemExit, match="comes with the repository"):
        benchmark.command()


def test_help_is_that_of_the_script() -> None:
    shown = CliRunner().invoke(app, ["bench", "--help"])
    assert shown.exit_code == 0 and "--strategies" in shown.output
