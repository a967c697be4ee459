"""Every code block of README and documentation runs, page by page."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = ROOT / "benchmarks" / "assets" / "reference-lm"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ELSEWHERE = ROOT / "docs" / "integrations.md"
"""A page whose examples need other libraries: run by tests/integrations."""
WITH_CODE = [page for page in PAGES if "```python" in page.read_text(encoding="utf-8") and page != ELSEWHERE]
LENGTH = re.compile(r"max_new_tokens=\d\d+")
"""Replaced by few tokens: other tests compare long outputs with those of plain `generate`."""
MODEL = re.compile(r'^name = "[^"]+"', flags=re.M)
"""The model of a first example: replaced by the bundled one, since tests load nothing from the Hub."""
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#]+)(#[^)]*)?\)")


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What a page may assume from the pages before it: a model, its tokenizer, inputs, two strategies."""
    from hf_specgen import DraftModelCandidates, NgramCandidates

    folder = str(BUNDLED)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    return {
        "model": AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        "tokenizer": tokenizer,
        "inputs": tokenizer("def add(x, y):", return_tensors="pt"),
        "draft": DraftModelCandidates(str(ROOT / "benchmarks" / "assets" / "draft-lm")),
        "NgramCandidates": NgramCandidates,
    }


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_of_a_page_run(page: Path, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: an example that the API has left behind."""
    monkeypatch.chdir(ROOT)
    before = set(ROOT.iterdir())
    namespace = dict(names)
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S):
        code = MODEL.sub(f'name = "{BUNDLED.as_posix()}"', LENGTH.sub("max_new_tokens=8", block))
        exec(compile(code, str(page), "exec"), namespace)
    assert set(ROOT.iterdir()) == before, "an example wrote into the working folder"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_to_files(page: Path) -> None:
    """Would catch: a page that was moved or renamed."""
    for target, _ in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_navigation_names_every_page() -> None:
    """Would catch: a page that nobody finds."""
    navigation = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        assert f'"{page.relative_to(ROOT / "docs")}"' in navigation
