"""An interrupted run of `build_distillation_set.py` is continued with the settings of its finished batches only."""

import json
from pathlib import Path
from typing import Any

import pytest

from build_distillation_set import RECORD, Settings, check_record, record_of

BATCHES = [[{"domain": "math", "prompt": "1 + 1?"}], [{"domain": "code", "prompt": "Sort a list."}]]


def settings(**changed: Any) -> Settings:
    return Settings(**{"target": "org/model", "prompts": "prompts.jsonl", "output": "answers.jsonl", **changed})


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """A folder with a finished batch."""
    (tmp_path / "0.jsonl").write_text(json.dumps({"batch": 0, "rows": []}))
    (tmp_path / RECORD).write_text(json.dumps(record_of(settings(), BATCHES)))
    return tmp_path


def test_check_record_with_the_same_settings_passes(parts: Path) -> None:
    """The output's name is no setting: the folder belongs to it."""
    check_record(parts, record_of(settings(output="moved.jsonl"), BATCHES))


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"seed": 1}, r"seed 0 \(now 1\);"),
        ({"batch_size": 4, "max_new_tokens": 9}, r"max_new_tokens 128 \(now 9\), batch_size 32 \(now 4\);"),
        ({"target": "org/other"}, r"target 'org/model' \(now 'org/other'\);"),
        ({"generation": {"default": {"do_sample": False}}}, r"generation .*\(now .*'do_sample': False"),
    ],
)
def test_check_record_with_other_settings_names_what_differs(
    parts: Path, changed: dict[str, Any], difference: str
) -> None:
    """Would catch: answers of two settings in one file."""
    with pytest.raises(ValueError, match=f"interrupted run with {difference}.*remove that folder"):
        check_record(parts, record_of(settings(**changed), BATCHES))


def test_check_record_with_other_prompts_under_the_same_name_is_refused(parts: Path) -> None:
    """Would catch: finished batches whose prompts are now in other batches."""
    with pytest.raises(ValueError, match="content of the prompts"):
        check_record(parts, record_of(settings(), BATCHES[::-1]))
