"""`hf-specgen train`: from prompts to a drafter in one command; signals in every stage, after which it goes on."""

import gzip
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM

import train_draft
import train_eagle
from hf_specgen import AutoCandidates
from hf_specgen.cli.__main__ import app
from tests.helpers.cli import run
from tests.helpers.network import cached, use_cache
from tests.helpers.paths import ROOT
from tests.helpers.processes import SECONDS_PER_CALL, run_by_torchrun, started
from tests.helpers.recipes import arguments, losses, run_as_script, write_rows
from whole_training import revision_in, rows_per_step

SHORT = ["--steps", "8", "--max-length", "96", "--evaluation-tokens", "4"]
SHORT += ["--disable-tqdm", "true"]
KINDS = {
    "eagle3": ["--depth", "2", "--anchors", "8"],
    "medusa": ["--num-heads", "2"],
    "dflash": ["--depth", "2", "--anchors", "8"],
    "dspark": ["--depth", "2", "--anchors", "8", "--markov-rank", "4"],
    "draft": [],
    "layer-skip": ["--rank", "2"],
}
PLANNED = ("medusa", "dflash")
"""Kinds whose recipes get the arguments that `dspark` gets, and whose results `test_recipes.py` loads: only tried."""


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty short prompts without answers."""
    lines = (ROOT / "benchmarks" / "assets" / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    write_rows(path, [{"prompt": json.loads(line)["prompt"][:40]} for line in lines[:500:25]])
    return path


def command(folder: Path, prompt_file: Path, output: Path, kind: str = "eagle3", tokens: int = 6) -> list[str]:
    """The arguments of a short run, in which answers have `tokens` tokens."""
    given = ["train", str(folder / "target"), "--data", str(prompt_file), "--kind", kind, "--output", str(output)]
    return [*given, "--max-new-tokens", str(tokens), "--", *SHORT, *KINDS[kind]]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in PLANNED])
def test_train_makes_a_drafter(folder: Path, prompt_file: Path, tmp_path: Path, kind: str) -> None:
    """Would catch: a stage whose files the next one does not find, a drafter that does not load, missing figures."""
    output = tmp_path / "head"
    printed = run(*command(folder, prompt_file, output, kind))
    assert "1. 16 answers of up to 6 tokens" in printed and "tokens per step" in printed and "n-grams" in printed
    words = " ".join(printed.split())
    assert "answers differ from plain generate" in words or "are those of plain generate" in words
    assert printed.endswith(f"candidate_generator=AutoCandidates.from_pretrained('{output}'))")
    target: Any = AutoModelForCausalLM.from_pretrained(folder / "target")
    ids = torch.arange(5, 14)[None]
    drafted = target.generate(
        ids, max_new_tokens=8, do_sample=False, candidate_generator=AutoCandidates.from_pretrained(output)
    )
    assert torch.equal(drafted, target.generate(ids, max_new_tokens=8, do_sample=False))
    published = [output / "README.md", *output.glob("*config.json")]
    folders = [str(folder), str(tmp_path)]
    assert not [file for file in published for path in folders if path in file.read_text(encoding="utf-8")]


def test_train_reads_the_target_of_a_revision_everywhere(
    folder: Path, prompt_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch: a tokenizer, answers or a comparison of `main`, which is not cached here."""
    cached(tmp_path / "hub", "target", folder / "target", "v1")
    use_cache(tmp_path / "hub", monkeypatch)
    arguments = command(Path("org"), prompt_file, tmp_path / "draft", "draft")
    printed = run(*arguments, "--target-kwargs", "{revision: v1}")
    assert printed.endswith(f"candidate_generator=AutoCandidates.from_pretrained('{tmp_path / 'draft'}'))")
    same = {"layers": None, "draft": str(folder / "target"), "target": "org/target"}
    train_draft.ModelDrafter.check(SimpleNamespace(**same, target_kwargs={"revision": "v1"}), cast(Any, None))


@pytest.mark.parametrize(
    ("given", "revision"),
    [([], ""), (["--target_kwargs", "{revision: v1}"], "v1"), (["--config", "c.yaml"], "v2"), (["--lr", "1"], "")],
    ids=str,
)
def test_revision_is_that_of_the_arguments_of_the_recipe(
    given: list[str], revision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch: answers and a comparison of another revision than the one that is trained for."""
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("target_kwargs: {revision: v2}")
    assert revision_in(given) == revision


@pytest.mark.parametrize("kind", PLANNED)
def test_train_tries_a_kind_before_it_plans(folder: Path, prompt_file: Path, tmp_path: Path, kind: str) -> None:
    """Would catch: a kind without its recipe, or arguments that this recipe does not take."""
    given = command(folder, prompt_file, tmp_path / "head", kind)
    assert "2. hidden states and training, 8 steps of 4 rows" in run(*given[:1], "--dry-run", *given[1:])


@pytest.mark.parametrize(("answers", "rows"), [(8, 4), (300, 4), (713, 8), (2000, 16), (5000, 64), (10**6, 64)])
def test_train_takes_small_steps_with_few_answers(answers: int, rows: int) -> None:
    """Would catch: 64 rows a step of 713 answers, so that all time makes 63 steps, and a head that drafts nothing."""
    assert rows_per_step(answers) == rows


def test_train_dry_run_prints_the_plan_and_keeps_to_it(folder: Path, prompt_file: Path, tmp_path: Path) -> None:
    """Would catch: a plan that trains; a run that measures anew, or that mixes answers of two settings."""
    given, short = command(folder, prompt_file, tmp_path / "head"), ["--dry-run", "--hours", "0.5"]
    planned = run(*given[:1], *short, *given[1:])
    assert "hidden states and training, 8 steps of 4 rows" in planned and "a stopped run continues" in planned
    assert not (tmp_path / "head" / "config.json").exists()
    assert planned.endswith(run(*given[:1], *short, *given[1:]))
    changed = run(*given[:1], "--hours", "0.25", *given[1:], exit_code=2)
    assert "has a run with hours '0.5' (now '0.25'); give another --output, or delete that folder" in changed
    # The remedy: another output, and beside it the answers of the first run.
    assert "copy answers.jsonl.gz of that folder into one called like the new --output and -work" in changed
    answers = tmp_path / "other-work" / "answers.jsonl.gz"
    answers.parent.mkdir()
    with gzip.open(answers, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"prompt": "a", "response": "b c d"}) + "\n" for _ in range(9))
    given = command(folder, prompt_file, tmp_path / "other")
    again = run(*given[:1], "--dry-run", *given[1:])
    assert "1. 9 answers of up to 6 tokens: 0.0 minutes" in again


def test_train_refuses_to_go_on_with_an_overwritten_target(folder: Path, prompt_file: Path, tmp_path: Path) -> None:
    """Would catch: a drafter that is trained on the answers and hidden states of earlier weights."""
    shutil.copytree(folder / "target", tmp_path / "target")
    given = command(tmp_path, prompt_file, tmp_path / "head")
    run(*given[:1], "--dry-run", *given[1:])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    model.save_pretrained(tmp_path / "target")
    refused = run(*given, exit_code=2)
    assert "has a run with model_weights" in refused and "delete that folder" in refused
    assert "To keep its answers" not in refused


STAGES = {
    "plan": ("*-work/held-out.jsonl", signal.SIGINT),
    "answers": ("*-work/answers.jsonl.gz.*.parts/process-0.jsonl", signal.SIGTERM),
    "hidden states": ("*-work/features/train/index.json", signal.SIGINT),
    "training": ("head/checkpoint-*/trainer_state.json", signal.SIGTERM),
    "measurement": ("head/README.md", signal.SIGINT),
}
"""Files that a stage begins with, and a signal that asks to end; `unit/test_recipe_data.py` has both signals."""


def in_process(arguments: list[str], log: Path) -> None:
    """The command in a process of its own; its output goes to a file."""
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell runs the tests in the background
    app(arguments)


@pytest.mark.parametrize("kills", [False, True])
def test_train_goes_on_after_a_signal_in_any_stage(
    folder: Path, prompt_file: Path, tmp_path: Path, kills: bool
) -> None:
    """Would catch: a traceback, a stage that begins anew, half of a file that the next run takes for a whole one."""
    given = [*command(folder, prompt_file, tmp_path / "head", tokens=12), "--steps", "30"]
    for stage, (files, number) in STAGES.items():
        process = started(in_process, given, tmp_path / "log")
        while process.is_alive() and not list(tmp_path.glob(files)):
            time.sleep(0.005)
        assert process.is_alive(), (stage, (tmp_path / "log").read_text(encoding="utf-8"))
        os.kill(process.pid, signal.SIGKILL if kills else number)
        process.join(SECONDS_PER_CALL)
        printed = (tmp_path / "log").read_text(encoding="utf-8")
        assert "Traceback" not in printed
        if not kills:
            assert process.exitcode == 130, (stage, printed)
            assert printed.splitlines()[-1].startswith("hf-specgen train: ") and "the same command" in printed
    assert "100%" not in run(*given).split("measuring")[0]


def test_torchrun_trains_in_two_processes_what_one_trains(folder: Path, tmp_path: Path) -> None:
    """The documented launcher; would catch: two runs of one process each, losses that depend on the number."""
    more = ["--depth", "2", "--anchors", "8", "--save-strategy", "steps", "--save-steps", "2"]
    train_eagle.main(arguments(folder, str(tmp_path / "one"), *more))
    given = arguments(folder, str(tmp_path / "two"), *more)
    run_by_torchrun(run_as_script, ("train_eagle.py", given), ranks=2)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    parts = [json.loads(path.read_text())["gradient_accumulation_steps"] for path in tmp_path.glob("*/run.json")]
    assert sorted(parts) == [1, 2]
