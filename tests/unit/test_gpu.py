"""Tests of `benchmarks.gpu`, which runs what only a GPU can show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu


def test_each_stage_is_recorded_and_one_without_time_is_not_begun(tmp_path: Path) -> None:
    """Would catch: a stage that begins when the machine is about to be given back; an outcome that nobody can read."""
    assert not gpu.run(tmp_path, seconds=0.0)
    summary = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert summary["stages"] == {stage.name: "no time was left" for stage in gpu.STAGES}
    assert summary["provenance"]
    with pytest.raises(ValueError, match="there is no stage 'speed'; there are tests, "):
        gpu.run(tmp_path, 60, ["speed"])


def test_a_stage_that_fails_or_takes_too_long_ends(tmp_path: Path) -> None:
    """Would catch: a process that runs on after its time, or a failure that is called done."""

    def stage(code: str) -> gpu.Stage:
        return gpu.Stage("part", 60.0, lambda out, seconds: [["-c", code], ["-c", "pass"]])

    assert gpu.run_stage(stage("pass"), tmp_path, 60.0).startswith("done in ")
    assert gpu.run_stage(stage("raise SystemExit(3)"), tmp_path, 60.0).startswith("failed with exit code 3 ")
    slow = gpu.run_stage(stage("print('begun', flush=True); import time; time.sleep(600)"), tmp_path, 5.0)
    assert slow.startswith("ended after ") and "begun" in (tmp_path / "part.log").read_text(encoding="utf-8")
