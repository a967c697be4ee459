"""`AutoCandidates`: every format leads to its strategy, and every other folder to a reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from hf_specgen import (
    AutoCandidates,
    DFlashCandidates,
    DraftModelCandidates,
    EagleCandidates,
    GemmaAssistantCandidates,
    LayerSkipCandidates,
    MedusaCandidates,
    MTPCandidates,
    PEagleCandidates,
)
from tests.helpers.paths import BENCHMARK_ASSETS, DRAFT_LM

FIXTURES = Path(__file__).parents[1] / "assets" / "fixtures"


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        *((FIXTURES / name / "head", EagleCandidates) for name in ("eagle1_original", "eagle3_original")),
        (FIXTURES / "speculators_eagle3_a_llama" / "head", EagleCandidates),
        *((FIXTURES / name / "head", DFlashCandidates) for name in ("dflash_zlab", "jetspec_causal", "dflash2_zlab")),
        *((FIXTURES / f"speculators_{name}" / "head", DFlashCandidates) for name in ("dspark_rnn", "dflash2")),
        *((FIXTURES / name / "head", DFlashCandidates) for name in ("deepspec_dspark_qwen3_rnn", "domino_specforge")),
        (FIXTURES / "speculators_dflash_full" / "head", DFlashCandidates),
        (FIXTURES / "speculators_peagle_llama" / "head", PEagleCandidates),
        (FIXTURES / "medusa_v1" / "head", MedusaCandidates),
        (FIXTURES / "gemma4_assistant" / "head", GemmaAssistantCandidates),
        *((FIXTURES / name / "target", MTPCandidates) for name in ("mtp_qwen3_5_native", "mtp_transformers_glm4_moe")),
        (FIXTURES / "speculators_mtp_qwen3" / "head", MTPCandidates),
        (BENCHMARK_ASSETS / "medusa-heads", MedusaCandidates),
        (BENCHMARK_ASSETS / "exit-adapter", LayerSkipCandidates),
        (DRAFT_LM, DraftModelCandidates),
    ],
    ids=lambda value: value.parent.name if isinstance(value, Path) else None,
)
def test_auto_known_format_gives_its_strategy(folder: Path, kind: type) -> None:
    assert type(AutoCandidates.from_pretrained(folder)) is kind


def test_auto_subfolder_and_settings_reach_the_strategy() -> None:
    candidates = AutoCandidates.from_pretrained(FIXTURES / "eagle3_original", subfolder="head", k=3, tree=8)
    assert repr(candidates) == f"EagleCandidates({str(FIXTURES / 'eagle3_original' / 'head')!r}, k=3, tree=8)"


@pytest.mark.parametrize("kind", [DraftModelCandidates, EagleCandidates, MedusaCandidates])
def test_hub_arguments_reach_the_download_of_any_checkpoint(
    kind: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Would catch: a revision or token that is taken and not used."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(name: str, **options: Any) -> str:
        calls.append({"name": name, **options})
        return str(tmp_path)

    monkeypatch.setattr("hf_specgen.heads.checkpoint.snapshot_download", snapshot_download)
    given = {"revision": "v2", "token": "secret", "cache_dir": tmp_path}
    assert repr(str(tmp_path / "sub")) in repr(kind.from_pretrained("org/draft", subfolder="sub", **given))
    (call,) = calls
    assert given.items() <= call.items() and call["name"] == "org/draft" and "sub/*.json" in call["allow_patterns"]
    assert "'org/draft'" in repr(kind.from_pretrained("org/draft")) and len(calls) == 1


@pytest.mark.parametrize("config", [{}, {"speculators_model_type": "hydra"}, {"architectures": ["LlamaForCausalLM"]}])
def test_auto_unknown_format_raises_and_lists_the_known_ones(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError, match=r"none of the known formats, which are: exit adapters; Medusa heads; .*EAGLE"):
        AutoCandidates.from_pretrained(tmp_path)
