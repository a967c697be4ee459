"""`AutoCandidates`: every format leads to its strategy, and every other folder to a reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

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
    attached,
    speculate,
)
from hf_specgen.candidates.presets import PresetCandidates
from tests.helpers import prompts, tiny_model
from tests.helpers.head_fixtures import FIXTURES
from tests.helpers.paths import BENCHMARK_ASSETS, HEAD_FIXTURES

KINDS: dict[str, type] = {
    "autoregressive": EagleCandidates,
    "block": DFlashCandidates,
    "path": DFlashCandidates,
    "parallel": PEagleCandidates,
    "mtp": MTPCandidates,
    "mtp_recursive": MTPCandidates,
    "assistant": GemmaAssistantCandidates,
    "medusa": MedusaCandidates,
    "parallel_draft": DraftModelCandidates,
}
EMBEDDED = {"medusa-heads": MedusaCandidates, "exit-adapter": LayerSkipCandidates, "draft-lm": DraftModelCandidates}


def test_auto_known_format_gives_its_strategy() -> None:
    for fixture in FIXTURES.values():
        assert type(AutoCandidates.from_pretrained(fixture.checkpoint_folder)) is KINDS[fixture.family], fixture.folder
    for name, kind in EMBEDDED.items():
        assert type(AutoCandidates.from_pretrained(BENCHMARK_ASSETS / name)) is kind


def test_auto_subfolder_and_settings_reach_the_strategy() -> None:
    candidates = AutoCandidates.from_pretrained(HEAD_FIXTURES / "eagle3_original", subfolder="head", k=3, tree=8)
    assert repr(candidates) == f"EagleCandidates({str(HEAD_FIXTURES / 'eagle3_original' / 'head')!r}, k=3, tree=8)"


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


# Presets: the strategy that each chooses for a target, and the tokens of plain generate


CHOSEN = {
    "auto": "CombinedCandidates([NgramCandidates(",
    "latency": "CombinedCandidates([NgramCandidates(",
    "throughput": "NgramCandidates(",
    "memory": "NgramCandidates(k=8",
}


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("batch", [1, 3])
def test_preset_has_plain_tokens_and_names_what_it_chose(name: str, batch: int) -> None:
    model, inputs = tiny_model("llama"), prompts(batch)
    plain = model.generate(**inputs, max_new_tokens=12)
    settings = {"max_new_tokens": 12, "return_dict_in_generate": True}
    outputs = [
        model.generate(**inputs, candidate_generator=name, **settings),
        model.generate(**inputs, custom_generate=speculate(name), **settings),  # type: ignore[arg-type]
    ]
    with attached(model, name) as totals:  # type: ignore[arg-type]
        outputs.append(model.generate(**inputs, **settings))
    for output in outputs:
        assert torch.equal(output.sequences, plain)
        assert output.speculation.summary().startswith(CHOSEN[name])
        assert "AdaptiveDepth()" in output.speculation.summary()
    assert totals.calls == 1


def test_latency_preset_uses_the_mtp_layer_of_a_checkpoint_that_has_one() -> None:
    """Would catch: a config with a default number of MTP layers whose checkpoint has none, refused as an error."""
    preset, fixture = PresetCandidates("latency"), FIXTURES["mtp_transformers_glm4_moe"]
    model = AutoModelForCausalLM.from_pretrained(fixture.target_folder)
    assert "MTPCandidates" in repr(preset.for_model(model)) and preset.for_model(model) is preset.for_model(model)
    without = AutoModelForCausalLM.from_config(model.config)
    without.config.name_or_path = ""
    assert "MTPCandidates" not in repr(preset.for_model(without))
    assert "MTPCandidates" not in repr(PresetCandidates("throughput").for_model(model))
