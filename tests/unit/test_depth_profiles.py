"""Profile files: keys, atomic writes, damaged files, threads, and what later steps contradict."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_specgen.depth import AdaptiveDepth, CostCurve, DraftLatency, LatencyModel, Slice, profiles
from hf_specgen.depth.latency import MAX_SLICES, slice_of
from hf_specgen.depth.learning import Profile
from tests.helpers.depth_simulator import Candidates, Simulation, Target

FLAT = CostCurve((1, 8, 16, 32), (0.010, 0.0118, 0.0125, 0.0166), context=512, batch=1)
MODEL = LatencyModel((Slice(FLAT, {"draft_model": DraftLatency(seconds=(0.001,))}),), "draft_model")
DESCRIPTION = {"target": "LlamaForCausalLM", "strategy": ["draft_model", "5"], "threads": 2}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_SPECGEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "profiles"


def _simulation(model: Any, **settings: Any) -> Simulation:
    return Simulation(lambda *_: 0.8, FLAT, Candidates(negligible_draft_cost=False), model=model, **settings)


def _learn(model: Any, **settings: Any) -> Simulation:
    simulation = _simulation(model, draft_token=0.001, **settings)
    simulation.run(AdaptiveDepth(), 100)
    return simulation


def test_profile_is_saved_listed_exported_and_deleted(cache: Path, tmp_path: Path) -> None:
    key = profiles.save(DESCRIPTION, MODEL)
    assert key == profiles.key_of(DESCRIPTION) and (cache / f"{key}.json").exists()
    found = profiles.list_profiles()
    assert list(found) == [key] and found[key].slices == MODEL.slices and found[key].description == DESCRIPTION
    profiles.export(key, tmp_path / "copy.json")
    assert LatencyModel.load(tmp_path / "copy.json").slices == MODEL.slices
    assert profiles.delete(key) and not profiles.delete(key)
    assert profiles.list_profiles() == {} and profiles.load(key) is None
    assert not list(cache.glob("*.tmp"))


def test_export_of_an_unknown_key_names_those_that_exist(tmp_path: Path) -> None:
    key = profiles.save(DESCRIPTION, MODEL)
    with pytest.raises(ValueError, match=key):
        profiles.export("nothing", tmp_path / "copy.json")
    for name in ("../elsewhere", "", "a/b"):
        with pytest.raises(ValueError, match="without a folder"):
            profiles.delete(name)


def test_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_SPECGEN_CACHE", str(tmp_path))
    assert profiles.directory() == tmp_path / "profiles"
    monkeypatch.delenv("HF_SPECGEN_CACHE")
    monkeypatch.setattr(profiles.constants, "HF_ASSETS_CACHE", str(tmp_path / "assets"))
    assert profiles.directory() == tmp_path / "assets" / "hf_specgen" / "profiles"


class Linear(torch.nn.Linear):
    dtype = torch.float32


@pytest.mark.parametrize(
    "change",
    [
        lambda model: profiles.describe(Linear(2, 3), ("draft_model", 5), False),
        lambda model: profiles.describe(model.bfloat16(), ("draft_model", 5), False),
        lambda model: profiles.describe(model, ("draft_model", 6), False),
        lambda model: profiles.describe(model, ("ngram", 5), False),
        lambda model: profiles.describe(model, ("draft_model", 5), True),
        lambda model: {**profiles.describe(model, ("draft_model", 5), False), "threads": 99},
        lambda model: {**profiles.describe(model, ("draft_model", 5), False), "versions": ["0"]},
    ],
)
def test_key_depends_on_all_that_times_depend_on(change: Callable[[Any], dict[str, Any]]) -> None:
    before = profiles.key_of(profiles.describe(Linear(2, 2), ("draft_model", 5), False))
    assert before == profiles.key_of(profiles.describe(Linear(2, 2), ("draft_model", 5), False))
    assert profiles.key_of(change(Linear(2, 2))) != before


DAMAGED: dict[str, Callable[[str], bytes]] = {
    "empty": lambda text: b"",
    "cut": lambda text: text[: len(text) // 2].encode(),
    "binary": lambda text: b"\xff\xfe\x00\x01",
    "nested": lambda text: b"[" * 100_000,
    "list": lambda text: b"[]",
    "other format": lambda text: text.replace("profile 1", "profile 99").encode(),
    "not a number": lambda text: text.replace("0.01,", "NaN,").encode(),
    "negative": lambda text: text.replace("0.01,", "-0.01,").encode(),
    "huge": lambda text: text.encode() + b" " * (profiles.MAX_BYTES + 1),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_profile_is_no_error_and_is_learnt_again(damage: str, cache: Path, caplog) -> None:
    model = Target()
    _learn(model)
    (path,) = cache.glob("*.json")
    path.write_bytes(DAMAGED[damage](path.read_text(encoding="utf-8")))
    with caplog.at_level(logging.DEBUG, logger="hf_specgen"):
        assert profiles.load(path.stem) is None
    assert "is not used" in caplog.text
    assert profiles.list_profiles() == {}
    with pytest.raises(ValueError, match="no readable profile"):
        profiles.export(path.stem, cache / "copy.json")
    if damage != "huge":
        with pytest.raises(ValueError, match="is not a latency profile"):
            AdaptiveDepth(path)


def test_damaged_profile_is_replaced_by_the_next_process(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _learn(Target())
    (path,) = cache.glob("*.json")
    path.write_text("damaged", encoding="utf-8")
    copy = cache.parent / "link"
    copy.symlink_to(cache.parent)  # another name of the folder stands for another process
    monkeypatch.setenv("HF_SPECGEN_CACHE", str(copy))
    _learn(Target())
    assert list(profiles.list_profiles()) == [path.stem]


def test_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latencies are kept in memory then: the second call begins without plain steps."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("HF_SPECGEN_CACHE", str(tmp_path / "file"))
    model = Target()
    assert _learn(model).requested[0] == [0]
    assert _learn(model).requested[0] != [0]
    assert profiles.list_profiles() == {}


def test_profile_learnt_once_is_used_by_other_models_of_the_same_shape(cache: Path) -> None:
    assert _learn(Target()).requested[0] == [0]
    (path,) = cache.glob("*.json")
    before = path.read_text(encoding="utf-8")
    assert _learn(Target()).requested[0] != [0]
    assert path.read_text(encoding="utf-8") == before, "a profile that is fixed must not change"


def test_profile_learnt_is_close_to_the_true_latencies() -> None:
    simulation = _learn(Target(), noise=0.1)
    (latency,) = profiles.list_profiles().values()
    step, truth = latency.select("draft_model").at(1, 200), simulation.latency.at(1, 200)
    for width in (1, 4, 8):
        assert float(step.target.by_tokens(width)) == pytest.approx(float(truth.target.by_tokens(width)), rel=0.1)
    assert step.drafter.draft([1] * 4) == pytest.approx(0.004, rel=0.1)


def test_eight_threads_learn_one_profile_and_then_decide_alike(cache: Path) -> None:
    """B6: dictionaries changed while another thread read them; here readers meet files being written, too."""
    model = Target()
    names = [("draft_model", k) for k in (3, 5, 8)]

    def work(thread: int) -> list[list[int]]:
        for call in range(4):
            kind, k = names[(thread + call) % len(names)]
            simulation = Simulation(
                lambda *_: 0.8, FLAT, Candidates(k, False, False, kind), model=model, noise=0.2, seed=thread
            )
            simulation.run(AdaptiveDepth(), 60)
            profiles.list_profiles()
        return simulation.requested

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert len(profiles.list_profiles()) == len(names)
    assert not list(cache.glob("*.tmp"))


def _run_with_other_times(model: Any, draft_token: float, slower: float = 1.0) -> list[str]:
    simulation = _simulation(model, draft_token=draft_token, slowdown=lambda step: slower)
    simulation.acceptance = lambda step, row, i: 0.8 if step % 60 < 30 else 0.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            simulation.run(AdaptiveDepth(), 400)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize(("draft_token", "slower", "reports"), [(0.02, 1.0, 1), (0.001, 5.0, 0), (0.001, 1.0, 0)])
def test_profile_that_times_contradict_is_reported_once(draft_token: float, slower: float, reports: int) -> None:
    """Drafting that became 20 times slower is reported; a machine on which everything became 5 times slower is not."""
    model = Target()
    _learn(model)
    (key,) = profiles.list_profiles()
    messages = _run_with_other_times(model, draft_token, slower)
    assert len(messages) == reports
    assert all(f"hf-specgen profile delete {key}" in message for message in messages)


def test_profile_of_one_process_is_merged_with_what_another_wrote(cache: Path) -> None:
    """Slices that another process fixed first stay as they are."""
    model = Target()
    _learn(model)
    (path,) = cache.glob("*.json")
    data = json.loads(path.read_text(encoding="utf-8"))
    other = json.loads(json.dumps(data["slices"][0]))
    other["target"]["batch"], other["target"]["seconds"] = 64, [7.0] * len(other["target"]["seconds"])
    data["slices"].append(other)
    path.write_text(json.dumps(data), encoding="utf-8")
    _learn(model, rows=4)
    slices = {one.target.batch: one.target for one in LatencyModel.load(path).slices}
    assert sorted(slices) == [1, 4, 64] and slices[64].seconds[0] == 7.0


def test_profile_of_a_full_file_uses_the_nearest_slice() -> None:
    """Would catch: steps of any other size that raise an error, or that are plain forever to be measured."""
    (_, drafters) = MODEL.slices[0]
    curves = [CostCurve((1, 2), (0.01, 0.02), context=512, batch=2**rows) for rows in range(MAX_SLICES)]
    profiles.save(DESCRIPTION, LatencyModel(tuple(Slice(curve, drafters) for curve in curves), "draft_model"))
    view = Profile(MODEL, DESCRIPTION).view(slice_of(1, 2048))
    assert view.fixed and not view.wants_plain_step and len(view.latency.slices) == MAX_SLICES
