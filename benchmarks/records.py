"""Renews recorded results: `python -m benchmarks records`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from shlex import split
from shutil import copytree, ignore_patterns
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import NamedTuple

from benchmarks.harness.provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
GRAMMAR_LIBRARIES = ("xgrammar", "llguidance", "outlines")


class Record(NamedTuple):
    """A command of `python -m benchmarks` without `--out`, its threads, about how long it takes, what it needs."""

    arguments: str
    threads: int
    minutes: int
    libraries: tuple[str, ...] = ()


NO_SWEEPS = "--batches '' --temperatures '' --contexts ''"
RECORDS = {
    "domains": Record(
        "suite domains --default-settings --strategies ngram,auto,eagle,draft,ngram+eagle,ngram+draft --prompts 4 "
        "--repeats 1 --max-new-tokens 64", 2, 2,
    ),
    "projected": Record("suite projected", 1, 8),
    "published": Record("suite published", 2, 10),
    "wide": Record(
        "suite --wide --max-new-tokens 64 --strategies ngram,auto,eagle,draft,ngram+eagle --domains embedded "
        f"--prompts 2 --repeats 1 --default-settings {NO_SWEEPS}", 2, 8,
    ),
    "linear-products": Record("micro linear-products", 2, 1),
    "packed-passes": Record("micro packed-passes", 1, 3),
    "generate-batch": Record("micro generate-batch --repeats 1", 2, 2),
    "generate-many": Record("micro generate-many", 2, 5),
    "batches": Record("suite batches", 2, 2),
    "rollouts": Record("micro rollouts", 2, 4),
    "repeated-prompts": Record("micro repeated-prompts --repeats 1", 2, 10),
    "memory": Record("suite memory --strategies ngram,auto,draft,eagle", 1, 2),
    "batch-of-eight": Record("micro batch-of-eight --repeats 2", 2, 1),
    "block-verification": Record("micro block-verification", 1, 2),
    "learnt-latency": Record("micro learnt-latency", 1, 1),
    "draft-window": Record("micro draft-window", 1, 3),
    "grammar-verification": Record("micro grammar-verification --repeats 2", 2, 2, GRAMMAR_LIBRARIES),
    "grammar-drafts": Record("micro grammar-drafts", 1, 10, GRAMMAR_LIBRARIES),
    "step-operations": Record("micro step-operations ngram-lookup", 2, 1),
    "other-tokenizer": Record("micro other-tokenizer --repeats 1", 2, 2),
    "lm-eval": Record("micro lm-eval --repeats 1", 2, 2, ("lm_eval",)),
    "trace-replay": Record("micro trace-replay", 2, 1),
}  # fmt: skip
"""The most important ones first."""


def outdated(results: Path) -> list[str]:
    """A line for each record in a folder whose commit is older than the present code of `hf_specgen`.

    Those that `RECORDS` does not renew, which need a GPU, are left out.
    """
    lines = []
    for recorded, record in RECORDS.items():
        kind, *arguments = split(record.arguments)
        # `micro A B … --options` writes a file for each name.
        names = [recorded] if kind == "suite" else takewhile(lambda word: not word.startswith("-"), arguments)
        for name in names:
            file = results / (f"{name}/report.json" if kind == "suite" else f"{name}.json")
            commit = json.loads(file.read_text(encoding="utf-8"))["provenance"]["commit"]
            command = ["git", "rev-list", "--count", f"{commit}..HEAD", "--", ":/hf_specgen"]
            done = subprocess.run(command, cwd=results, capture_output=True, text=True)
            if done.returncode:
                lines.append(f"{name}: made at {commit[:12]}, which this repository does not have")
            elif later := int(done.stdout):
                lines.append(f"{name}: made at {commit[:12]}; {later} later commits change hf_specgen")
    return lines


def renew(names: Sequence[str], out: Path) -> list[str]:
    """Run the commands of these records, or of all, and replace their files in a folder; returns those that failed."""
    if unknown := sorted(set(names) - set(RECORDS)):
        raise ValueError(f"unknown record {unknown[0]!r}; there are {', '.join(RECORDS)}")
    commit = provenance()["commit"]
    if commit is None or commit.endswith("+changes"):
        raise ValueError("records are made in a clone of the repository without changes; commit them first")
    failed = []
    for name in names or RECORDS:
        if missing := [library for library in RECORDS[name].libraries if find_spec(library) is None]:
            print(f"{name}: left out; pip install {' '.join(missing)} first")
        elif not run(name, RECORDS[name], out):
            failed.append(name)
    return failed


def run(name: str, record: Record, out: Path) -> bool:
    """Run the command of a record in a new process; only if it succeeds, what it wrote goes to the folder.

    In that the temporary folder is called `benchmarks/results`, and files of the clone are named by their paths in it.
    """
    print(f"{name}: about {record.minutes} minutes", flush=True)
    begin, (kind, *arguments) = perf_counter(), split(record.arguments)
    environment = {"OMP_NUM_THREADS": str(record.threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with TemporaryDirectory() as folder:
        written = Path(folder) / name if kind == "suite" else Path(folder)
        command = [sys.executable, "-m", "benchmarks", kind, *arguments, "--out", str(written)]
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}).returncode
        print(f"{name}: exit code {code} after {perf_counter() - begin:.0f} s", flush=True)
        if code == 0:
            for file in (path for path in Path(folder).rglob("*") if path.suffix in (".json", ".html", ".svg")):
                text = file.read_text(encoding="utf-8").replace(folder, "benchmarks/results").replace(f"{ROOT}/", "")
                file.write_text(text, encoding="utf-8")
            copytree(folder, out, ignore=ignore_patterns("records-*.jsonl"), dirs_exist_ok=True)
    return code == 0
