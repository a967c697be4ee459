"""Heads in the tools: comparing taps, the doctor's checks, export, and the strategies of the command line."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hf_specgen import EagleCandidates
from hf_specgen.cli.app import app
from hf_specgen.cli.doctor.blueprint import blueprint
from hf_specgen.cli.doctor.findings import CheckResult
from hf_specgen.cli.doctor.recommend import taps
from hf_specgen.cli.doctor.static_checks import heads
from hf_specgen.evaluation.workloads import head_strategy, strategies
from hf_specgen.evaluation.calibration import TapsResult, compare_taps
from hf_specgen.heads.loading import load_head
from tests.helpers import prompts
from tests.helpers.eagle import predictable_pair
from tests.helpers.head_fixtures import find_fixtures
from tests.helpers.paths import DRAFT_LM

ROOT = Path(__file__).parents[1] / "assets" / "fixtures"
FIXTURES = {fixture.folder.name: fixture for fixture in find_fixtures(ROOT)}
pytestmark = pytest.mark.filterwarnings("ignore")


def test_compare_taps_measures_the_neighbours() -> None:
    fixture = FIXTURES["eagle3_original"]
    candidates = EagleCandidates(fixture.head_folder)
    found = compare_taps(fixture.target, candidates, [prompts(1)], {"max_new_tokens": 4, "do_sample": False})
    assert [one.shift for one in found] == [0, -1, 1]
    assert found[1].taps == tuple(tap - 1 for tap in found[0].taps)
    assert all(one.tokens_per_step >= 1 for one in found)
    assert candidates.taps is None, "the strategy itself must stay as it was"


def test_compare_taps_leaves_out_what_the_target_does_not_have() -> None:
    """EAGLE-1 reads the last state: there is none behind it."""
    target, head = predictable_pair(FIXTURES["eagle1_original"])
    found = compare_taps(target, EagleCandidates(head), [prompts(1)], {"max_new_tokens": 8, "do_sample": False})
    assert [one.shift for one in found] == [0, -1]
    assert found[0].tokens_per_step > 1


@pytest.mark.parametrize(("neighbour", "result"), [(2.0, CheckResult.GOOD), (2.4, CheckResult.WARNING)])
def test_doctor_taps_warns_if_a_neighbour_is_clearly_better(neighbour: float, result: CheckResult) -> None:
    finding = taps([TapsResult(0, (2, 4, 5), 2.1), TapsResult(1, (3, 5, 6), neighbour)])
    assert finding.result is result
    assert ("taps=(3, 5, 6)" in finding.meaning) == (result is CheckResult.WARNING)


@pytest.mark.parametrize("name", ["eagle3_original", "dflash_zlab", "speculators_peagle_llama"])
def test_doctor_head_of_this_target_is_good(name: str) -> None:
    fixture = FIXTURES[name]
    found = heads(str(fixture.head_folder), blueprint(str(fixture.target_folder), "float32"))
    assert found[0].result is CheckResult.GOOD and "reads hidden states" in found[0].found
    assert not any(finding.result is CheckResult.BAD for finding in found)


def test_doctor_head_of_another_target_is_bad() -> None:
    found = heads(str(FIXTURES["eagle3_original"].head_folder), blueprint(str(DRAFT_LM), "float32"))
    assert any(finding.result is CheckResult.BAD and "made for a target" in finding.meaning for finding in found)


@pytest.mark.parametrize(
    ("name", "to"), [("eagle3_original", "sglang"), ("speculators_dflash_full", "vllm"), ("eagle1_original", "eagle")]
)
def test_export_command_writes_a_head_that_loads_alike(name: str, to: str, tmp_path: Path) -> None:
    source = str(FIXTURES[name].head_folder)
    result = CliRunner().invoke(app, ["export", source, "--to", to, "--output", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    ours: dict[str, Any] = load_head(source).state_dict()
    for key, tensor in load_head(tmp_path / "out").state_dict().items():
        torch.testing.assert_close(tensor, copy.deepcopy(ours[key]))


def test_export_command_refuses_what_a_layout_cannot_express(tmp_path: Path) -> None:
    source = str(FIXTURES["speculators_eagle3_e_twolayers_bias_fourtaps"].head_folder)
    result = CliRunner().invoke(app, ["export", source, "--to", "eagle", "--output", str(tmp_path / "out")])
    assert result.exit_code == 2 and "several layers" in result.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("name", "expected"), [("eagle1_original", "EAGLE"), ("jetspec_causal", "DFlash"), ("medusa_v1", "Medusa")]
)
def test_strategies_heads_of_every_format_are_named_by_kind(name: str, expected: str) -> None:
    found = strategies(heads=str(FIXTURES[name].head_folder))
    assert [one.name for one in found] == ["n-grams", expected]
    assert found[1].code.startswith(type(found[1].candidates).__name__)


def test_strategies_draft_model_as_heads_raises() -> None:
    with pytest.raises(ValueError, match="holds no heads, but what DraftModelCandidates drafts with"):
        head_strategy(str(DRAFT_LM))
