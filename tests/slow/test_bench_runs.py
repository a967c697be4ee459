"""Runs that are interrupted and resumed, bad input, several processes, profiles, memory."""

import json
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks import records
from benchmarks.__main__ import app, main
from benchmarks.harness import memory, runner
from benchmarks.harness.journal import Journal, JournalError
from benchmarks.harness.plan import Plan
from benchmarks.harness.runner import Outcome, run
from benchmarks.micro import MICRO
from benchmarks.report import page as report
from benchmarks.report.results import differing, result
from benchmarks.report.tables import cell
from benchmarks.suites import SUITES
from hf_specgen.depth import CostCurve
from hf_specgen.heads import save_head
from tests.helpers.medusa import random_heads
from tests.helpers.paths import ROOT
from tests.helpers.processes import run_in_ranks
from tests.helpers.recipes import SIZES, save_tiny

QUIET = Console(quiet=True)
commands: Any = typer.main.get_command(app)
COUNTS = {"prompts": 1, "tuning_prompts": 1, "max_new_tokens": 5, "repeats": 2, "sweep_prompts": 1}
SWEEPS: dict[str, Any] = {"batches": (3,), "temperatures": (1.3,), "contexts": (64,)}
SMALL = Plan(strategies=("ngram", "layerskip", "medusa"), domains=("edit", "chat"), **COUNTS, **SWEEPS)


def on_tiny_target(plan: Plan, folder: Path) -> Plan:
    """The plan with the tiny target of `tests.helpers.recipes.folder`; how fast and how good it is plays no part."""
    return replace(plan, model=str(folder / "target"))


def measured(plan: Plan, folder: Path) -> tuple[Outcome, dict[str, Any], Path]:
    """The outcome, the dictionary that is saved of it, and its page."""
    outcome = run(plan, folder, QUIET)
    found = result(outcome)
    return outcome, found, report.write(found, folder)


@pytest.fixture(autouse=True)
def given_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """T(q) is not measured and figures are not drawn again in every run; `finished` is a run that does both."""
    curve = CostCurve((1, 32), (0.010, 0.012), context=256, batch=1)
    monkeypatch.setattr(runner, "measure_cost_curve", lambda *_, **__: curve)
    monkeypatch.setattr(report, "save", lambda *_: {})


def test_interrupted_run_keeps_its_records_and_goes_on(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Would catch: records that are lost at an interruption, or measured again in other rounds."""
    plan = replace(SMALL, strategies=("ngram",), domains=("edit",), batches=(), temperatures=(), contexts=())
    plan = replace(on_tiny_target(plan, folder), repeats=4, seed=7, tuning_prompts=1)
    rounds: list[int] = []
    seeds: list[int] = []
    measure_round = runner.measure_round

    def interrupted(*arguments: Any, **options: Any) -> Any:
        rounds.append(1)
        if len(rounds) == 7:  # one to warm up, one to tune, two in each repeat, with plain decoding prepacked
            raise KeyboardInterrupt
        seeds.append(arguments[4])
        return measure_round(*arguments, **options)

    monkeypatch.setattr(runner, "measure_round", interrupted)
    first = run(plan, tmp_path, QUIET)
    assert first is not None and "interrupted" in first.notes[-1]
    kept = {r["unit"] for r in first.records}
    assert len([unit for unit in kept if unit.startswith("domains")]) == 2
    assert seeds == [0, 7, *[7] * 2, *[1007] * 2]  # the warm-up, the tuning prompt, two repeats of one prompt
    assert "speed" in result(first)["tables"]
    monkeypatch.setattr(runner, "measure_round", measure_round)
    second = run(plan, tmp_path, QUIET, resume=True)
    assert second is not None and {r["unit"] for r in second.records if r["section"] == "domains"} == {
        f"domains/edit/0/{repeat}" for repeat in range(4)
    }
    old = {(r["unit"], r["variant"]): r["seconds"] for r in first.records}
    again = {(r["unit"], r["variant"]): r["seconds"] for r in second.records}
    assert len(again) == len(second.records) and all(again[key] == seconds for key, seconds in old.items())


def test_journal(tmp_path: Path) -> None:
    """Half a line at the end of a killed run does not count, and does not spoil what is written after it."""
    with pytest.raises(JournalError, match="nothing to resume"):
        Journal(tmp_path / "none", SMALL, resume=True)
    Journal(tmp_path, SMALL).add("a/b/0/0", [{"x": 1}, {"x": 2}])
    file = tmp_path / "records-0.jsonl"
    file.write_text(file.read_text() + '[{"unit": "half')
    assert "a/b/0/0" in Journal(tmp_path, SMALL, rank=1, resume=True)
    Journal(tmp_path, SMALL, resume=True).add("half", [{"x": 3}])
    resumed = Journal(tmp_path, SMALL, resume=True)
    assert "half" in resumed and [record["x"] for record in resumed.old] == [1, 2, 3]
    (tmp_path / "records-2.jsonl").write_text('{"plan": ')  # killed while it began
    assert len(Journal(tmp_path, SMALL, rank=2, resume=True).old) == 3
    with pytest.raises(JournalError, match="measured with other options"):
        Journal(tmp_path, replace(SMALL, seed=5), resume=True)
    with pytest.raises(JournalError, match="measured with other prompts or weights"):
        Journal(tmp_path, SMALL, resume=True, inputs="other")
    assert Journal(tmp_path, SMALL).old == []


BAD_ARGUMENTS: list[tuple[str, str]] = [
    ("--strategies magic", "unknown strategy 'magic'"),
    ("--strategies ngram+telepathy", "unknown strategy 'telepathy'"),
    ("--strategies ngram=4", "ngram takes no source, got '4'"),
    ("--strategies medusa=./no-heads", "medusa"),
    ("--domains poetry", "there is no domain 'poetry'"),
    ("--peers vllm", "unknown peer 'vllm'"),
    ("--model ./no-such-folder", "no-such-folder"),
    ("--prompts 0", "prompts must be at least 1, got 0"),
    ("--dtype int3", "int3"),
    ("--batches 1,x", "'1,x'"),
    ("--profile no-such-file.json", "no-such-file.json"),
    ("--profile pyproject.toml", "'pyproject.toml' is not a latency file"),
    ("--out-of-range", "--out-of-range"),
    ("--resume", "nothing to resume"),
    ("--domains gsm8k-hub", "no domain is left to measure"),
    ("--domains rag --max-new-tokens 2100", "no prompt of domain 'rag' fits"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS)
def test_bad_arguments(arguments: str, message: str, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """Would catch: a run of hours that fails at its end because of a name in its plan."""
    monkeypatch.chdir(ROOT)
    exit_code = main(["suite", *arguments.split(), "--out", str(tmp_path / "out")])
    assert exit_code == 2 and message in re.sub(r"\s+", " ", capsys.readouterr().err)


def test_measurement_without_its_libraries_keeps_the_record(tmp_path: Path, monkeypatch: Any) -> None:
    """Would catch: an empty table written over a record, where no grammar library is installed."""
    monkeypatch.setattr("benchmarks.micro.grammars.find_spec", lambda name: None)
    for name in ("grammar-drafts", "grammar-verification"):
        (tmp_path / f"{name}.json").write_text("recorded")
        assert main(["micro", name, "--quick", "--out", str(tmp_path)]) == 0
        assert (tmp_path / f"{name}.json").read_text() == "recorded"


def test_ngram_lookup_times_proposals_without_a_target(tmp_path: Path) -> None:
    """Would catch: stand-ins for target and verification that lack what n-grams read."""
    assert main(["micro", "ngram-lookup", "--quick", "--repeats", "1", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "ngram-lookup.json").read_text())["rows"]
    assert len(rows) == 6 and all(row["median us"] > 0 for row in rows)


def test_learnt_latency_simulates_the_policy(tmp_path: Path) -> None:
    """Would catch: stand-ins for a call and a model that lack what the policy reads, or times that are not counted."""
    assert main(["micro", "learnt-latency", "--quick", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "learnt-latency.json").read_text())["rows"]
    assert len(rows) == 3 and all(0.9 < row["later calls"] < 1 for row in rows), "drafts are hardly ever accepted"


@pytest.mark.parametrize("name", records.RECORDS)
def test_command_of_a_record_is_understood(name: str) -> None:
    """Would catch: a record whose suite, measurement or option is gone."""
    kind, *arguments = shlex.split(records.RECORDS[name].arguments)
    context = commands.commands[kind].make_context(kind, arguments)
    named = [context.params["name"]] if kind == "suite" else context.params["names"]
    assert set(named) <= set(SUITES if kind == "suite" else MICRO)


def test_records_of_a_clean_clone_replace_the_old_ones_without_paths(tmp_path: Path, monkeypatch: Any) -> None:
    """Would catch: a record of uncommitted code or of a failed run, one that names folders of the machine."""
    (tmp_path / "grammar-drafts.json").write_text("recorded")
    ran: list[Any] = []

    def finish(command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        folder = Path(command[-1])
        folder.mkdir(exist_ok=True)
        (folder / "records-0.jsonl").touch()
        (folder / "report.json").write_text(json.dumps({"argv": command, "file": str(ROOT / "benchmarks")}))
        ran.append((command[3:-2], env["OMP_NUM_THREADS"]))
        return SimpleNamespace(returncode=int("batches" in command))

    monkeypatch.setattr(records.subprocess, "run", finish)
    monkeypatch.setattr(records, "find_spec", lambda name: None)
    for commit in (None, "abc+changes"):
        monkeypatch.setattr(records, "provenance", lambda commit=commit: {"commit": commit})
        assert main(["records", "memory", "--out", str(tmp_path)]) == 2 and not ran
    monkeypatch.setattr(records, "provenance", lambda: {"commit": "abc"})
    assert main(["records", "memory", "batches", "grammar-drafts", "--out", str(tmp_path)]) == 1
    memory = ["suite", "memory", "--strategies", "ngram,auto,draft,eagle"]
    assert ran == [(memory, "1"), (["suite", "batches"], "2")]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["grammar-drafts.json", "memory", "report.json"]
    written = json.loads((tmp_path / "memory" / "report.json").read_text())
    assert written["argv"][-2:] == ["--out", "benchmarks/results/memory"] and written["file"] == "benchmarks"
    assert main(["records", "none"]) == 2


def test_two_processes_share_the_prompts(folder: Path, tmp_path: Path) -> None:
    """Would catch: a prompt that two processes measure, or a report of one process alone."""
    arguments = ["suite", "--model", str(folder / "target"), "--strategies", "ngram", "--peers", ""]
    arguments += ["--domains", "edit,json", "--prompts", "2", "--repeats", "1", "--max-new-tokens", "4"]
    arguments += ["--batches", "", "--temperatures", "", "--contexts", "", "--out", str(tmp_path)]
    assert run_in_ranks(main, [[arguments]] * 2) == [0, 0]
    shards = [file.read_text().splitlines()[1:] for file in sorted(tmp_path.glob("records-*.jsonl"))]
    units = [{json.loads(line)[0]["unit"] for line in lines} for lines in shards]
    assert len(units) == 2 and all(units) and not units[0] & units[1]
    measured = {unit for unit in units[0] | units[1] if unit.startswith("domains")}
    assert measured == {f"domains/{domain}/{number}/0" for domain in ("edit", "json") for number in (0, 1)}
    saved = json.loads((tmp_path / "report.json").read_text())
    over_all = {row["variant"]: row for row in saved["tables"]["speed"] if row["domain"] == "all"}
    assert len(over_all) == 3 and {"plain", "plain, prepacked"} < set(over_all)
    assert all("low" in row for name, row in over_all.items() if name != "plain")  # 4 requests, from both processes
    assert saved["execution"] == "eagerly"


ONE_DOMAIN = replace(SMALL, peers=(), domains=("edit",), batches=(), temperatures=(), contexts=())


def test_memory_is_measured_for_every_strategy_with_and_without_scores(tmp_path: Path, monkeypatch: Any) -> None:
    """Would catch: a peak that includes what was measured before, or scores that are not kept."""
    monkeypatch.setattr(memory, "in_new_process", lambda function, *given: run_in_ranks(function, [given])[0])
    save_tiny(LlamaConfig(**{**SIZES, "vocab_size": 8192}), tmp_path / "target")
    plan = replace(on_tiny_target(ONE_DOMAIN, tmp_path), strategies=("ngram",), memory_context=256)
    rows = memory.measure_memory(plan)
    assert [(row["output_scores"], row["variant"]) for row in rows] == [
        ("no", "plain"), ("no", "n-grams k=8 tree=32"), ("yes", "plain"), ("yes", "n-grams k=8 tree=32"),
    ]  # fmt: skip
    if all(row["peak MB"] for row in rows):
        assert rows[2]["peak MB"] > rows[0]["peak MB"] + 2, "128 tokens of 8,192 float32 scores are 4 MB"
        assert rows[0]["of plain"] == 1.0


def test_records_older_than_the_package_are_listed(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Would catch: figures of a code that has changed since, at a release; or records that any commit outdates."""
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def commit(file: str) -> str:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(file)
        git("add", "--all")
        git("commit", "--message", file)
        return git("rev-parse", "HEAD")

    monkeypatch.setattr(
        records, "RECORDS", {name: records.RECORDS[name] for name in ("memory", "step-operations", "rollouts")}
    )
    git("init")
    old = commit("hf_specgen/a.py")
    new = commit("hf_specgen/b.py")
    results = tmp_path / "results"
    made = {"memory/report": old, "step-operations": new, "ngram-lookup": old, "rollouts": "0" * 40}
    for name, at in made.items():
        file = results / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"provenance": {"commit": at}}))
    commit("docs/c.md")
    assert main(["records", "--outdated", "--out", str(results)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"memory: made at {old[:12]}; 1 later commits change hf_specgen",
        f"ngram-lookup: made at {old[:12]}; 1 later commits change hf_specgen",
        "rollouts: made at 000000000000, which this repository does not have",
    ]


# A whole benchmark run: its counts, its page, its files, and the tables in the README


@pytest.fixture(scope="module")
def finished(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, dict[str, Any], Path]:
    """A small benchmark run with everything in it. Tests that read it are in this file, so that it is made once."""
    heads = random_heads(AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32))
    save_head(heads, folder / "heads")
    plan = replace(SMALL, strategies=("ngram", "layerskip=2", f"medusa={folder / 'heads'}"))
    return measured(on_tiny_target(plan, folder), tmp_path_factory.mktemp("bench"))


def test_a_different_token_fails_the_run(finished, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Would catch: a run whose tokens differ, and that ends with success."""
    outcome, _, _ = finished
    difference = {"row": 0, "position": 9, "plain_token": 1, "our_token": 2}
    difference |= {"decided by": "logits", "margin": 0.25, "explained": "rounding"}  # which float32 must not need
    differs = {"identical": False, "difference": difference}
    bad = [r | (differs if "steps" in r and r["cell"] == "edit" else {}) for r in outcome.records]
    monkeypatch.setattr(runner, "run", lambda *_, **__: replace(outcome, records=bad))
    assert main(["suite", "--out", str(tmp_path)]) == 1
    assert "tokens differ from plain decoding" in capsys.readouterr().err
    rows = json.loads((tmp_path / "report.json").read_text())["tables"]["differences"]
    assert (rows[0]["position"], rows[0]["margin"], rows[0]["explained"]) == (9, 0.25, "rounding")
    lower = replace(outcome, records=bad, plan=replace(outcome.plan, dtype="bfloat16"))
    assert differing(lower) == [], "rounding explains a near-tie in lower precision"
    for record in bad:
        record |= {"difference": {**difference, "explained": "NO"}} if not record["identical"] else {}
    assert differing(lower), "no near-tie"


def test_page_has_all_numbers_and_nothing_to_fetch_or_run(finished) -> None:
    """Would catch: a script, markup from a model's answer or an option, a figure without a table."""
    outcome, found, page = finished
    ours = [record for record in outcome.records if "steps" in record]
    assert len(ours) > 20 and all(record["identical"] for record in ours) and differing(outcome) == []
    text = page.read_text()
    links = re.findall(r"""(?:src|href)\s*=\s*["']?([^"'\s>]+)""", text)
    assert links and all(link.startswith(("#", "data:")) for link in links)
    assert not any(word in text for word in ("<script", "@import", "url(http"))
    assert text.count("<svg") == 6 == len(list((page.parent / "plots").glob("*.png")))
    for name in ("speed", "acceptance", "cost", "tuning", "batch", "temperature", "context"):
        for row in found["tables"][name]:
            assert all(cell(value) in text for value in row.values() if isinstance(value, float)), (name, row)
    assert 'name="viewport"' in text and "prefers-color-scheme: dark" in text
    answer = {"domain": "edit", "variant": "<i>v</i>", "tokens": [["<script>alert(1)</script>", True], ["a&b", False]]}
    shown = report.html({**found, "notes": ["<u>note</u>"], "texts": [answer]}, {})
    for escaped in ("&lt;script&gt;alert(1)", "a&amp;b", "&lt;u&gt;note", "&lt;i&gt;v"):
        assert escaped in shown
