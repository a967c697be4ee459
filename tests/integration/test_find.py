"""`hf-specgen find`: what of the Hub or of the local cache may draft for a target, in which order."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_specgen.cli import find
from tests.helpers.cli import run
from tests.helpers.paths import DRAFT_LM, HEAD_FIXTURES, REFERENCE_LM

EAGLE_HEAD = REFERENCE_LM.parent / "eagle3-head"


def repo(name: str, parameters: int | None, tags: tuple[str, ...] = (), downloads: int = 1) -> Any:
    """What the Hub tells of a repository."""
    safetensors = None if parameters is None else SimpleNamespace(total=parameters)
    config = {"model_type": "qwen3"}
    return SimpleNamespace(id=name, safetensors=safetensors, tags=list(tags), downloads=downloads, config=config)


class Hub:
    """Stands in for `HfApi`."""

    def model_info(self, name: str, **_: Any) -> Any:
        return repo(name, 8_000)

    def list_models(self, *, filter: str, author: str = "", **_: Any) -> list[Any]:
        if author:
            return [repo("org/target-8B", 8_000), repo("org/target-4B", 4_000), repo("org/target-0.6B", 600)]
        assert filter == "base_model:org/target-8B"
        return [
            repo("a/target-8B-medusa", 800),
            repo("b/target-8B-finetuned", 8_000),
            repo("c/target-8B-speculator.eagle3", 400, downloads=9),
            repo("d/target-8B-EAGLE", None, downloads=99),
            repo("e/target_8B_head", 300, ("dflash", "base_model:org/eagle")),
        ]


def test_found_on_the_hub_by_base_model_and_family_best_format_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: fine-tuned models listed as drafts, formats read from the names of base models."""
    monkeypatch.setattr(find, "HfApi", Hub)
    monkeypatch.setattr(find.constants, "HF_HUB_OFFLINE", False)
    found = sorted(find.on_hub("org/target-8B", 10), key=lambda one: one.rank)
    assert [(one.name[0], one.kind, one.size) for one in found] == [
        ("c", "EAGLE", 0.05),
        ("d", "EAGLE", None),
        ("e", "block head", 0.0375),
        ("a", "Medusa", 0.1),
        ("o", "draft model", 0.075),
    ]
    printed = run("find", "org/target-8B", "--limit", "3")
    assert "5.0%" in printed and "target-8B-medusa" not in printed
    assert "hf-specgen doctor org/target-8B --heads c/target-8B-speculator.eagle3" in printed


@pytest.mark.filterwarnings("ignore")
def test_found_in_the_cache_are_checkpoints_that_fit_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: heads of another target, draft models of half its size, folders that hold neither."""
    other_head = next(HEAD_FIXTURES.glob("eagle3_original")) / "head"
    names = [str(REFERENCE_LM), str(EAGLE_HEAD), str(DRAFT_LM), str(other_head), str(Path(__file__).parent)]
    repos = [SimpleNamespace(repo_id=name, repo_type="model") for name in names]
    monkeypatch.setattr(find, "scan_cache_dir", lambda: SimpleNamespace(repos=repos))
    assert [one.kind for one in find.in_cache(str(REFERENCE_LM))] == ["EAGLE"]
    monkeypatch.setattr(find, "MAX_RATIO", 0.9)
    found = sorted(find.in_cache(str(REFERENCE_LM)), key=lambda one: one.rank)
    assert [(Path(one.name).name, one.kind) for one in found] == [("eagle3-head", "EAGLE"), ("draft-lm", "draft model")]
    assert run("find", str(REFERENCE_LM), "--offline").endswith(f"--heads {EAGLE_HEAD} --draft {DRAFT_LM}")


def test_nothing_found_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "scan_cache_dir", lambda: SimpleNamespace(repos=[]))
    assert "nothing was found" in run("find", str(REFERENCE_LM), "--offline", exit_code=1)
