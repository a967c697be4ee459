"""Heads in the tools: export, and the strategies of the command line."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hf_specgen.cli.app import app
from hf_specgen.heads.head_formats import load_head
from tests.helpers.head_fixtures import FIXTURES

pytestmark = pytest.mark.filterwarnings("ignore")


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
