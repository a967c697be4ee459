"""A whole benchmark run: its counts, its page, its files, and the tables in the README."""

import json
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.__main__ import main
from benchmarks.harness import runner
from benchmarks.harness.runner import Outcome
from benchmarks.report import page as report
from benchmarks.report.results import differing
from benchmarks.report.tables import cell
from hf_specgen.heads import save_head
from tests.helpers.bench_run import SMALL, measured, on_tiny_target
from tests.helpers.medusa import random_heads
from tests.helpers.paths import ROOT


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href") and value]


@pytest.fixture(scope="module")
def finished(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, dict[str, Any], Path]:
    """A small benchmark run with everything in it. Tests that read it are in this file, so that it is made once."""
    heads = random_heads(AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32))
    save_head(heads, folder / "heads")
    plan = replace(SMALL, strategies=("ngram", "layerskip=2", f"medusa={folder / 'heads'}"))
    return measured(on_tiny_target(plan, folder), tmp_path_factory.mktemp("bench"))


def test_ours_writes_the_tokens_of_plain_decoding(finished) -> None:
    outcome, found, _ = finished
    ours = [r for r in outcome.records if "steps" in r]
    assert len(ours) > 20 and all(r["identical"] for r in ours)
    assert differing(outcome) == [] and "differences" not in found["tables"]


def test_a_different_token_fails_the_run(
    finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    outcome, _, _ = finished
    difference = {"row": 0, "position": 9, "plain_token": 1, "our_token": 2, "plain_logit": 0.5, "our_logit": 0.25}
    difference |= {"decided by": "logits", "margin": 0.25, "explained": "rounding"}  # which float32 must not need
    bad = [
        {**r, "identical": False, "difference": difference} if "steps" in r and r["cell"] == "edit" else r
        for r in outcome.records
    ]
    monkeypatch.setattr(runner, "run", lambda *_, **__: replace(outcome, records=bad))
    monkeypatch.setattr(report, "save", lambda *_: {})  # the figures are drawn in the run itself
    assert main(["suite", "--out", str(tmp_path)]) == 1
    assert "tokens differ from plain decoding" in capsys.readouterr().err
    rows = json.loads((tmp_path / "report.json").read_text())["tables"]["differences"]
    assert (rows[0]["position"], rows[0]["margin"], rows[0]["explained"]) == (9, 0.25, "rounding")
    lower = replace(outcome, records=bad, plan=replace(outcome.plan, dtype="bfloat16"))
    assert differing(lower) == [], "rounding explains a near-tie in lower precision"
    for record in bad:
        record |= {"difference": {**difference, "explained": "NO"}} if not record["identical"] else {}
    assert differing(lower), "no near-tie"


def test_page_holds_itself(finished) -> None:
    """Nothing is fetched, no script runs, and each figure has a table with the numbers that it draws."""
    _, found, page = finished
    text = page.read_text()
    parsed = _Page()
    parsed.feed(text)
    assert [link for link in parsed.links if not link.startswith(("#", "data:"))] == []
    assert "script" not in parsed.tags and "@import" not in text and "url(http" not in text
    assert parsed.tags.count("svg") == 6 == len(list((page.parent / "plots").glob("*.png")))
    for name in ("speed", "acceptance", "cost", "tuning", "batch", "temperature", "context"):
        for row in found["tables"][name]:
            assert all(cell(value) in text for value in row.values() if isinstance(value, float)), (name, row)
    assert 'name="viewport"' in text and "prefers-color-scheme: dark" in text


def test_readme_shows_the_recorded_results(tmp_path: Path) -> None:
    """Would catch: results recorded, or the format changed, without `python -m benchmarks tables … --write`."""
    readme = tmp_path / "README.md"
    shutil.copy(ROOT / "benchmarks" / "README.md", readme)
    assert main(["tables", str(ROOT / "benchmarks" / "results"), "--write", str(readme)]) == 0
    assert readme.read_text() == (ROOT / "benchmarks" / "README.md").read_text()


def test_page_escapes_texts(finished) -> None:
    """Would catch: markup from a model's answer or from an option that becomes part of the page."""
    _, found, _ = finished
    text = {"domain": "edit", "variant": "<i>v</i>", "tokens": [["<script>alert(1)</script>", True], ["a&b", False]]}
    shown = report.html({**found, "notes": ["<u>note</u>"], "texts": [text]}, {})
    assert "<script>alert(1)" not in shown and "&lt;script&gt;alert(1)" in shown
    assert "a&amp;b" in shown and "&lt;u&gt;note" in shown and "&lt;i&gt;v" in shown
