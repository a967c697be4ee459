"""The repository for `generate(custom_generate="org/hf-specgen")`, from its folder, and the cards of heads."""

import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import huggingface_hub
import pytest
import torch
import yaml

from hf_specgen.heads import save_head
from tests.helpers.medusa import random_heads
from tests.helpers.models import tiny_model
from tests.helpers.paths import BENCHMARK_ASSETS, DRAFT_LM, ROOT

HUB = ROOT / "hub"
CALL = {"custom_generate": str(HUB), "trust_remote_code": True}


@pytest.mark.parametrize("draft", [None, str(DRAFT_LM)], ids=["auto", "draft model"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_custom_generate_of_the_hub_folder_same_tokens(
    reference_model: Any, tokenizer: Any, draft: str | None, sampled: bool
) -> None:
    """Would catch: an argument that is lost on the way, an import that Transformers does not follow."""
    inputs = tokenizer("def add(x, y):\n    return x + y\n\ndef add(x, y):", return_tensors="pt")
    settings = {"max_new_tokens": 12, "do_sample": sampled, "return_dict_in_generate": True}
    given = {} if draft is None else {"draft": draft}
    torch.manual_seed(5)
    ours = reference_model.generate(**inputs, **settings, **given, **CALL)
    torch.manual_seed(5)
    assert torch.equal(ours.sequences, reference_model.generate(**inputs, **settings).sequences)
    assert 0 < ours.speculation.steps < 12


@pytest.fixture
def uninstalled(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The code of the folder where the package cannot be imported."""
    spec: Any = importlib.util.spec_from_file_location("hub_generate", HUB / "custom_generate" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "hf_specgen", None)
    return module


def test_package_that_is_not_installed_is_fetched_at_a_fixed_revision(
    uninstalled: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Would catch: a download of a whole repository or of another revision, or one without a message."""
    calls = []

    def download(repository: str, **settings: Any) -> str:
        calls.append((repository, settings))
        monkeypatch.delitem(sys.modules, "hf_specgen")  # from now on the import finds the package
        return str(ROOT)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with caplog.at_level(logging.WARNING):
        assert Path(uninstalled.package().__file__) == ROOT / "hf_specgen" / "__init__.py"
    assert calls == [(uninstalled.REPOSITORY, {"revision": uninstalled.REVISION, "allow_patterns": "hf_specgen/**"})]
    assert "hf_specgen is not installed" in caplog.text and sys.path[-1] == str(ROOT)


def test_package_that_can_neither_be_imported_nor_fetched_raises(
    uninstalled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch: a traceback of an HTTP library in place of what to install."""

    def download(repository: str, **settings: Any) -> str:
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ImportError, match=r"not installed and could not be fetched .*no network.*pip install hf-spec"):
        uninstalled.generate(tiny_model("llama"))


def metadata_of(card: Path) -> dict[str, Any]:
    metadata: dict[str, Any] = yaml.safe_load(card.read_text(encoding="utf-8").split("---\n")[1])
    return metadata


CARDS = sorted(BENCHMARK_ASSETS.glob("*/README.md"))


@pytest.mark.parametrize("card", [*CARDS, HUB / "README.md"], ids=lambda card: card.parent.name)
def test_cards_have_library_license_and_base_model(card: Path) -> None:
    """Would catch: a head on the Hub whose page says neither how it is used nor what it belongs to."""
    metadata = metadata_of(card)
    assert metadata["license"] and "speculative-decoding" in metadata["tags"]
    is_drafter = card.parent.name not in ("reference-lm", "hub")
    assert metadata["library_name"] == ("hf-specgen" if "-lm" not in card.parent.name else "transformers")
    assert bool(metadata.get("base_model")) == is_drafter


def test_saved_head_has_a_card_that_is_not_replaced(tmp_path: Path) -> None:
    """Would catch: a card without metadata, or one that replaces what somebody has written."""
    heads, folder = random_heads(tiny_model("llama")), tmp_path / "my-heads"
    files = save_head(heads, folder, base_model="org/target")
    card = folder / "README.md"
    expected = {"library_name": "hf-specgen", "tags": ["speculative-decoding"], "base_model": "org/target"}
    assert metadata_of(card) == expected and card in files
    assert 'AutoCandidates.from_pretrained("org/my-heads")' in card.read_text(encoding="utf-8")
    card.write_text("mine", encoding="utf-8")
    assert card not in save_head(heads, folder) and card.read_text(encoding="utf-8") == "mine"
