"""Draft heads against ground truth computed by the original implementations.

`pytest tests --fixtures DIR` runs other fixtures of the same kind; each folder with an `expected.json` is one.
"""

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.head_fixtures import Comparison, Fixture
from tests.helpers.head_runs import run_autoregressive, run_block, run_parallel
from tests.helpers.head_runs_native import run_assistant, run_medusa, run_mtp, run_mtp_recursive

RUNS = {
    "autoregressive": run_autoregressive,
    "parallel": run_parallel,
    "block": run_block,
    "mtp": run_mtp,
    "mtp_recursive": run_mtp_recursive,
    "assistant": run_assistant,
    "medusa": run_medusa,
}


@pytest.mark.parametrize("rows", ["alone", "batch"])
def test_head_fixture_computed_by_original_is_reproduced(head_fixture: Fixture, rows: str) -> None:
    run = RUNS[head_fixture.family]
    for prompts in [[prompt] for prompt in head_fixture.prompts] if rows == "alone" else [head_fixture.prompts]:
        comparison = Comparison(head_fixture)
        run(head_fixture, prompts, comparison)
        comparison.assert_complete(prompts)


def test_head_fixture_of_unknown_format_fails(tmp_path: Path) -> None:
    (tmp_path / "expected.json").write_text(json.dumps({"format": "hydra_v2"}), encoding="utf-8")
    with pytest.raises(AssertionError, match="unknown format 'hydra_v2'"):
        _ = Fixture(tmp_path, tmp_path).family


def test_head_fixture_with_numbers_that_no_test_compares_fails(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    source: Path = request.config.getoption("head_fixtures") / "eagle1_original"
    if not source.is_dir():
        pytest.skip("needs the project's own fixtures")
    shutil.copytree(source, tmp_path / "copy")
    fixture = Fixture(tmp_path / "copy", source.parent / "targets")
    fixture.tensors["a.round1.chain.confidence"] = fixture.tensors["a.round1.chain.hidden"]
    comparison = Comparison(fixture)
    run_autoregressive(fixture, ["a"], comparison)
    with pytest.raises(AssertionError, match=r"never compared: \['a.round1.chain.confidence'\]"):
        comparison.assert_complete(["a"])
